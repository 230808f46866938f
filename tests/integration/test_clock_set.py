"""A control plane and its ranks on a machine whose clock is set, by Debian's libfaketime."""

from __future__ import annotations

import os
import signal
import time
from glob import glob
from pathlib import Path

import pytest
from tests.support.control_plane import ControlPlane, serving, wait_for

from atoll.backends.local import processes
from atoll.core.status import Training

LIBRARY = glob("/usr/lib/*/faketime/libfaketime.so.1")

pytestmark = pytest.mark.skipif(not LIBRARY, reason="needs Debian's package faketime")


@pytest.fixture
def fake_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says by how much the clock is wrong."""
    clock = tmp_path / "clock"
    clock.write_text("+0\n")
    settings = {
        "LD_PRELOAD": LIBRARY[0],
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    return clock


def test_a_clock_that_is_set_fails_bills_and_forgets_nothing(
    tmp_path: Path, fake_clock: Path
) -> None:
    clock, go = fake_clock, tmp_path / "go"
    with serving(tmp_path / "state") as plane:
        long = plane.create("exec sleep 1000", 2, deadline_s=3600.0)
        plane.until_ready(long, 2)
        short = plane.create("exit 0", ttl_seconds=600)
        plane.until_over(short)
        script = f"until [ -e {go} ]; do sleep 0.02; done; [ $ATOLL_ATTEMPT = 2 ] || exit 3"
        again = plane.create(script, max_restarts=2)
        plane.until_ready(again, 1)
        clock.write_text("-3600\n")
        go.touch()
        assert plane.until_over(again).status.phase == "succeeded"
        clock.write_text("+7200\n")
        for _ in range(2):  # the one that ran meanwhile, and one that starts then
            plane.until_over(plane.create("exit 0"))
            plane.restart()
        assert plane.get(long).status.phase == "ready"
        assert plane.get(short).status.phase == "succeeded"
        plane.ask(long, cancel=True)
        status = plane.until_over(long).status
        assert [r.termination_reason for r in status.rank_exits] == ["Stopped", "Stopped"]
        assert sum(r.metered_s for r in status.ranks) < 600


def lose_power(plane: ControlPlane, training: Training, *, asleep_s: float, clock: Path) -> None:
    """Everything ends at once, nothing is written, and the machine is off for so long."""
    plane.kill()
    for pid in plane.supervision_pids(training):
        os.kill(pid, signal.SIGSTOP)
    while pids := plane.left_pids():
        for pid in pids:
            processes.kill(pid)
    journal = plane.directory(training) / "journal"
    stamp = journal.stat()
    boot = processes.boot_id().encode()
    for path in (journal, plane.state / "clock"):
        path.write_bytes(path.read_bytes().replace(boot, b"an earlier one"))
    os.utime(journal, ns=(stamp.st_mtime_ns, stamp.st_mtime_ns))
    clock.write_text(f"+{asleep_s:g}\n")


def test_a_machine_that_was_off_for_an_hour_charges_nobody_for_it(
    tmp_path: Path, fake_clock: Path
) -> None:
    with serving(tmp_path / "state") as plane:
        script = "echo up; exec sleep 1000"
        name = plane.create(script, 2, max_restarts=1)
        plane.until_ready(name, 2)
        wait_for(lambda: len(plane.log_lines(name)) == 2)
        lose_power(plane, plane.get(name), asleep_s=3600, clock=fake_clock)
        plane.start()
        again = plane.until(name, lambda t: [r.attempt for r in t.status.ranks] == [1, 1])
        ends = [r.previous_exit for r in again.status.ranks]
        assert [end.reason for end in ends if end is not None] == ["SupervisorLost"] * 2
        assert sum(r.metered_s for r in again.status.ranks) < 600
        # What runs now is metered again, from its own start.
        before = plane.call("usage", float, name=name)
        wait_for(lambda: plane.call("usage", float, name=name) > before + 1.0)
        assert plane.call("usage", float, name=name) < 600
        plane.ask(name, cancel=True)
        status = plane.until_over(name).status
        assert 0 < sum(r.metered_s for r in status.ranks) < 600


def test_no_deadline_passes_while_the_machine_is_off(tmp_path: Path, fake_clock: Path) -> None:
    # To the control plane, this machine was started when it really was, and was off until then.
    up_s = time.monotonic()
    with serving(tmp_path / "state") as plane:
        script = "echo up; exec sleep 1000"
        name = plane.create(script, 2, max_restarts=1, deadline_s=up_s + 3600)
        plane.until_ready(name, 2)
        wait_for(lambda: len(plane.log_lines(name)) == 2)
        lose_power(plane, plane.get(name), asleep_s=up_s + 7200, clock=fake_clock)
        plane.start()
        again = plane.until(name, lambda t: [r.attempt for r in t.status.ranks] == [1, 1])
        plane.restart()
        plane.until_over(plane.create("exit 0"))
        assert plane.get(name).status.phase == "ready"
        assert again.status.failing == ""
