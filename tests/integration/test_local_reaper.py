"""With every process of atoll killed at once, nothing that a rank started is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.control_plane import serving

from atoll.backends.local import processes
from atoll.backends.local.processes import cgroup_for

MARK = b"TIDE_MARK"


def carriers(value: str) -> list[int]:
    wanted = value.encode()
    return [p for p in processes.all_pids() if processes.environment_of(p).get(MARK) == wanted]


@pytest.mark.parametrize(
    "command",
    ["sleep 1000; true", "setsid sleep 1000; true", "(sleep 1000 &) ; sleep 1000; true"],
    ids=["a child", "a child of its own session", "a daemon"],
)
def test_nothing_is_left_when_all_of_atoll_is_killed(tmp_path: Path, command: str) -> None:
    value = f"{os.getpid()}-{time.time_ns()}"
    with serving(tmp_path / "state") as plane:
        name = plane.create(["sh", "-c", command], ranks=2, env={MARK.decode(): value})
        plane.until_ready(name, 2)
        until(lambda: len(carriers(value)) >= 4)
        plane.kill()
        for pid in processes.all_pids():
            if str(tmp_path).encode() in words_of(pid):
                processes.kill(pid, signal.SIGKILL)
        until(lambda: not carriers(value))


def test_nothing_is_left_of_what_cleared_its_environment_and_left_its_session(
    tmp_path: Path,
) -> None:
    seconds = f"{1000 + os.getpid()}.{time.time_ns()}"
    script = f"env -i setsid sh -c 'sleep {seconds} & exec sleep {seconds}' & sleep {seconds}"
    with serving(tmp_path / "state") as plane:
        name = plane.create(["sh", "-c", script], ranks=2)
        plane.until_ready(name, 2)
        until(lambda: len(running(seconds)) == 6)
        pids = (*plane.supervision_pids(plane.get(name)), plane.pid)
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none can react to the end of another
            for pid in pids:
                processes.kill(pid, number)
        until(lambda: not running(seconds))


@pytest.mark.skipif(
    not cgroup_for(Path("x"), "1.2."), reason="no control group of cgroup v2 may be made"
)
def test_what_outlived_the_reaper_too_goes_with_the_next_control_plane(tmp_path: Path) -> None:
    seconds = f"{1000 + os.getpid()}.{time.time_ns()}"
    script = f"env -i setsid sleep {seconds} & exec sleep {seconds}"
    with serving(tmp_path / "state") as plane:
        name = plane.create(["sh", "-c", script], ranks=2)
        training = plane.until_ready(name, 2)
        until(lambda: len(running(seconds)) == 4)
        watchdog, supervisor = plane.supervision_pids(training)
        group = Path((plane.directory(training) / "cgroup").read_text())
        pids = (processes.parent(watchdog), watchdog, supervisor, plane.pid)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                processes.kill(pid, number)
        plane.reap()
        until(lambda: len(running(seconds)) == 2)  # their ranks died with the supervisor
        plane.start()
        plane.until_released(name)
        until(lambda: not running(seconds))
        until(lambda: not group.exists())


def test_reaper_that_was_stopped_goes_with_its_training(tmp_path: Path) -> None:
    with serving(tmp_path / "state") as plane:
        name = plane.create(["sleep", "1000"])
        watchdog, _ = plane.supervision_pids(plane.until_ready(name, 1))
        reaper = processes.parent(watchdog)
        start_ticks = processes.start_ticks(reaper)
        processes.kill(reaper, signal.SIGSTOP)
        plane.ask(name, cancel=True)
        plane.until_released(name)
        until(lambda: not processes.is_running(reaper, start_ticks))


def running(seconds: str) -> list[int]:
    words = [b"sleep", seconds.encode(), b""]
    return [pid for pid in processes.all_pids() if processes.command_line(pid) == words]


def until(holds: Callable[[], bool], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def words_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
