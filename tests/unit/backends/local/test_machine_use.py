"""What ranks use is read from the real /proc; what is not theirs or gone is absent."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from atoll.agent.records import AttemptFacts, start_record
from atoll.backends.local import processes
from atoll.backends.local.machine_use import UseMeter

CHILD = (
    "import os, sys\n"
    "block = bytearray(64 * 2**20)\n"
    "block[::4096] = b'x' * len(block[::4096])\n"
    "child = os.fork()\n"
    "print('up', flush=True)\n"
    "if child:\n"
    "    sys.stdin.read()\n"
    "    os.kill(child, 9)\n"
    "else:\n"
    "    while True: pass\n"
)


@pytest.fixture
def rank() -> Iterator[AttemptFacts]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.readline()
    ticks = processes.start_ticks(process.pid)
    start = start_record(0, 1, 0.0, pid=process.pid, startTicks=ticks)
    yield AttemptFacts(0, 1, None, start, None)
    process.communicate(timeout=30)


def test_a_rank_is_measured_with_the_processes_it_started(rank: AttemptFacts) -> None:
    meter = UseMeter()
    first = meter.measure([rank])[rank.pid]
    assert "cpu" not in first, "nothing to compare with yet: absent, not 0"
    assert first["processes"] == 2
    assert first["threads"] >= 2
    # The 64 MiB are shared by the fork and count once.
    assert 64 * 2**20 < first["memory"] < 160 * 2**20
    busy = 0.0
    while busy == 0.0:  # its child computes without end
        busy = meter.measure([rank])[rank.pid]["cpu"]
    assert busy > 0


def test_a_process_that_ended_or_has_another_birth_is_absent(rank: AttemptFacts) -> None:
    meter = UseMeter()
    assert meter.measure([rank._replace(start={**(rank.start or {}), "startTicks": 1})]) == {}
    assert meter.measure([rank._replace(exit={"code": 0})]) == {}
    assert meter.measure([rank._replace(start={**(rank.start or {}), "pid": 2**22 - 1})]) == {}
