"""When a silent pair is let go on, ended, or left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from atoll.backends.local import processes
from atoll.backends.local.liveness import (
    HUNG,
    HeartbeatMonitor,
    Pair,
    ProcessState,
    ask_to_restore,
    pair_of,
    send,
    supervision_pids,
)
from atoll.backends.local.protocol import HEARTBEAT, HEARTBEAT_S, RECORDS_GREW


class Listener:
    """A pulse with a clock of its own, ticking once a beat."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pulse = HeartbeatMonitor(lambda: self.now)
        self.pulse.receive(RECORDS_GREW + HEARTBEAT)
        self.progress = 0

    def tick(self, seconds: float = HEARTBEAT_S, **state: bool) -> int | None:
        self.now += seconds
        return self.pulse.judge(self.pair(**state)) if self.pulse.tick() else None

    def pair(self, stopped: bool = False, waits: bool = True, runs: bool = False) -> Pair:
        self.progress += runs
        life = ProcessState(1, 1, stopped, waits, (str(self.progress),))
        return Pair(life, life)

    def answers(self, ticks: int, **state: bool) -> list[int | None]:
        return [self.tick(**state) for _ in range(ticks)]


def test_pair_that_beats_is_not_looked_at() -> None:
    listener = Listener()
    for _ in range(100):
        assert listener.tick(stopped=True) is None
        listener.pulse.receive(HEARTBEAT)


def test_stopped_pair_goes_on_after_three_beats_and_is_ended_after_three_more() -> None:
    answers = Listener().answers(7, stopped=True)
    assert answers == [None] * 3 + [signal.SIGCONT] + [None] * 2 + [signal.SIGKILL]


def test_pair_that_goes_on_gets_the_same_help_the_next_time() -> None:
    listener = Listener()
    assert listener.answers(4, stopped=True)[-1] == signal.SIGCONT
    listener.pulse.receive(HEARTBEAT)
    assert listener.answers(4, stopped=True) == [None] * 3 + [signal.SIGCONT]


@pytest.mark.parametrize(
    "state",
    [{"waits": False}, {"runs": True}, {"waits": False, "runs": True}],
    ids=["starved, or waiting for a disk", "slow", "busy"],
)
def test_pair_that_is_only_held_up_is_left_alone(state: dict[str, bool]) -> None:
    assert set(Listener().answers(1000, **state)) == {None}


def test_pair_that_neither_runs_nor_waits_for_the_machine_is_ended_in_the_end() -> None:
    answers = Listener().answers(HUNG + 2)
    assert answers[-1] == signal.SIGKILL
    assert set(answers[:-1]) == {None}


def test_ticks_that_come_late_prove_nothing() -> None:
    listener = Listener()
    assert {listener.tick(10.0, stopped=True) for _ in range(100)} == {None}


def test_pair_of_the_release_before_never_beats_and_is_only_helped_when_stopped() -> None:
    listener = Listener()
    listener.pulse = HeartbeatMonitor(lambda: listener.now)
    assert set(listener.answers(1000)) == {None}
    assert listener.answers(3, stopped=True) == [None, None, signal.SIGCONT]
    assert set(listener.answers(1000)) == {None}
    assert listener.answers(3, stopped=True)[-1] == signal.SIGCONT


def test_keeper_that_runs_deals_with_its_supervisor_itself() -> None:
    stopped, running = ProcessState(1, 1, True, True, ()), ProcessState(2, 2, False, True, ())
    assert Pair(None, stopped).is_stopped
    assert Pair(stopped, None).is_stopped
    assert not Pair(running, stopped).is_stopped
    assert not Pair(None, None).is_stopped


def test_signal_never_reaches_another_process_of_that_pid(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1000"]) as bystander:
        start_ticks = processes.start_ticks(bystander.pid)
        send(ProcessState(bystander.pid, start_ticks - 1, True, True, ()), signal.SIGKILL)
        assert processes.is_running(bystander.pid, start_ticks)
        (tmp_path / "watchdog").write_text(f"{bystander.pid} {start_ticks - 1}")
        assert pair_of(tmp_path) == Pair(None, None)
        (tmp_path / "watchdog").write_text(f"{bystander.pid} {start_ticks}")
        watchdog = pair_of(tmp_path).watchdog
        assert watchdog is not None
        assert watchdog.pid == bystander.pid
        send(watchdog, signal.SIGKILL)
        assert bystander.wait() == -signal.SIGKILL
    send(ProcessState(os.getpid(), 0, True, True, ()), signal.SIGKILL)


NOBODY = 65534
SLEEP = "import time; time.sleep(1000)"
CATCH = f"import signal; signal.signal(1, lambda *_: print('asked', flush=True)); {SLEEP}"


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_process_of_another_user_is_no_shim_whatever_its_words(tmp_path: Path) -> None:
    words = [sys.executable, "-S", "-E", "-c", SLEEP, "/source", str(tmp_path)]
    become = f"import os; os.setresuid({NOBODY}, {NOBODY}, {NOBODY}); {SLEEP}"
    forged_words = [become if word == SLEEP else word for word in words]
    own, forged = subprocess.Popen(words), subprocess.Popen(forged_words)
    try:
        until(lambda: processes.owner(forged.pid) == NOBODY)
        until(lambda: own.pid in supervision_pids(tmp_path))
        assert supervision_pids(tmp_path) == [own.pid]
        own.kill()
        own.wait()
        assert not any(pair_of(tmp_path))
    finally:
        for each in (own, forged):
            each.kill()
            each.wait()


def test_a_supervisor_that_has_only_just_begun_does_not_die_of_being_asked() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", SLEEP]) as begun,
        subprocess.Popen([sys.executable, "-c", CATCH], stdout=subprocess.PIPE) as ready,
    ):
        try:
            until(lambda: processes.catches(ready.pid, signal.SIGHUP))
            for each in (begun, ready):
                ask_to_restore(
                    ProcessState(each.pid, processes.start_ticks(each.pid), False, True, ())
                )
            assert ready.stdout is not None
            assert ready.stdout.readline() == b"asked\n"
            assert begun.poll() is None
        finally:
            begun.kill()
            ready.kill()
