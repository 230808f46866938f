"""Keeper and supervisor stopped at the same time: noticed, whoever else is there or not."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.control_plane import ControlPlane, journal_records, wait_for

from atoll.backends.local import processes
from atoll.core.status import Training

RANKS = 3


def started(
    plane: ControlPlane, script: str = "echo up; exec sleep 1000", **options: object
) -> Training:
    name = plane.create(script, RANKS, **options)
    wait_for(lambda: sum(line.text == "up" for line in plane.log_lines(name)) == RANKS)
    return plane.until_ready(name, RANKS)


def freeze(plane: ControlPlane, training: Training) -> tuple[int, int]:
    pair = plane.supervision_pids(training)
    for pid in pair:
        os.kill(pid, signal.SIGSTOP)
    return pair


def starts(plane: ControlPlane, training: Training) -> dict[int, int]:
    """The pid of each rank; a rank is never started twice here."""
    every = journal_records(plane.directory(training) / "journal")
    records = [record for record in every if record["t"] == "start"]
    assert max(Counter(record["rank"] for record in records).values()) == 1
    return {record["rank"]: record["pid"] for record in records}


def test_end_of_a_rank_under_a_frozen_pair_is_told_with_its_code(plane: ControlPlane) -> None:
    training = started(plane)
    freeze(plane, training)
    os.kill(starts(plane, training)[1], signal.SIGKILL)
    ended = plane.until_over(training.name)
    assert [e.exit_code for e in ended.status.rank_exits] == [143, 137, 143]
    assert ended.status.root_cause is not None
    assert ended.status.root_cause.rank == 1
    plane.until_released(training.name)
    wait_for(lambda: not plane.left())


def test_training_with_a_frozen_pair_can_be_cancelled(plane: ControlPlane) -> None:
    training = started(plane)
    freeze(plane, training)
    plane.ask(training.name, cancel=True)
    assert plane.until_over(training.name).status.phase == "cancelled"
    wait_for(lambda: not plane.left())


def test_training_with_a_frozen_pair_can_be_deleted(plane: ControlPlane) -> None:
    training = started(plane)
    freeze(plane, training)
    plane.ask(training.name, delete=True)
    plane.until_removed(training.name)
    wait_for(lambda: not plane.left())


def test_ranks_go_on_under_a_pair_that_was_frozen_before_the_control_plane_came(
    plane: ControlPlane, tmp_path: Path
) -> None:
    script = f"echo up; while [ ! -e {tmp_path}/end ]; do sleep 0.02; done; exit $RANK"
    training = started(plane, script, min=1)
    pids = starts(plane, training)
    plane.kill()
    pair = freeze(plane, training)
    plane.start()
    wait_for(lambda: not any(is_stopped(pid) for pid in pair))
    (tmp_path / "end").touch()
    ended = plane.until_over(training.name)
    assert [e.exit_code for e in ended.status.rank_exits] == [0, 1, 2]
    assert [e.restart_count for e in ended.status.rank_exits] == [0, 0, 0]
    assert {r.rank: r.phase for r in plane.get(training.name).status.ranks}.keys() == pids.keys()


@pytest.fixture
def stopping() -> Iterator[list[int]]:
    """Processes that are stopped again at once whenever somebody lets them go on."""
    pids: list[int] = []
    is_over = threading.Event()

    def stop() -> None:
        while not is_over.wait(0.002):
            for pid in pids:
                processes.kill(pid, signal.SIGSTOP)

    thread = threading.Thread(target=stop)
    thread.start()
    yield pids
    is_over.set()
    thread.join()


@pytest.mark.soak
def test_pair_that_cannot_go_on_is_ended_and_replaced(
    plane: ControlPlane, stopping: list[int]
) -> None:
    training = started(
        plane, "echo $RANK.$ATOLL_ATTEMPT up; echo up; exec sleep 1000", max_restarts=1
    )
    pair = plane.supervision_pids(training)
    stopping += pair
    wait_for(lambda: not any(processes.is_running(pid, processes.start_ticks(pid)) for pid in pair))
    stopping.clear()
    again = plane.until(
        training.name, lambda t: [r.restarts for r in t.status.ranks] == [1] * RANKS
    )
    assert [r.phase for r in again.status.ranks] == ["Running"] * RANKS
    lines = Counter(line.text for line in plane.log_lines(training.name))
    assert all(lines[f"{rank}.0 up"] == 1 and lines[f"{rank}.1 up"] <= 1 for rank in range(RANKS))


@pytest.mark.soak
def test_pair_is_left_alone_when_only_its_listener_was_stopped(plane: ControlPlane) -> None:
    training = started(plane)
    pair = plane.supervision_pids(training)
    os.kill(plane.pid, signal.SIGSTOP)
    threading.Timer(4.0, os.kill, (plane.pid, signal.SIGCONT)).start()
    deadline = time.monotonic() + 4.5
    wait_for(lambda: time.monotonic() > deadline)
    plane.until_ready(training.name, RANKS)
    assert plane.supervision_pids(training) == pair


def is_stopped(pid: int) -> bool:
    return processes.stat_fields(pid)[0] in "Tt"
