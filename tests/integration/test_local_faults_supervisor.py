"""Keeper, supervisor and control plane killed or frozen, alone and together: no orphan, ever."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.support.control_plane import ControlPlane, journal_records, wait_for

from atoll.backends.local import processes
from atoll.backends.local.journal import JournalWriter, encode_batch
from atoll.backends.local.processes import cgroup_for
from atoll.core.status import Training

RANKS = 3
# Each rank has a child, one in a session of its own, and a double-forked daemon.
FAMILY = """setsid sleep 1000 &
    (setsid sh -c 'sleep 1000 & exec sleep 1000' &)
    sleep 1000 &
    echo up; wait"""
# With no child of its own: what the kernel alone must clear away.
ALONE = "echo up; exec sleep 1000"


def started(plane: ControlPlane, script: str = FAMILY, **options: object) -> Training:
    name = plane.create(script, RANKS, **options)
    wait_for(lambda: sum(line.text == "up" for line in plane.log_lines(name)) == RANKS)
    return plane.until_ready(name, RANKS)


def hit(plane: ControlPlane, training: Training, who: set[str], number: int) -> None:
    """All of them at once: each is stopped first, so none can react to the end of another."""
    watchdog, supervisor = plane.supervision_pids(training)
    pids = {"watchdog": watchdog, "supervisor": supervisor, "plane": plane.pid}
    if number == signal.SIGKILL and len(who) > 1:
        for name in sorted(who):
            os.kill(pids[name], signal.SIGSTOP)
    for name in sorted(who):
        os.kill(pids[name], number)
    if "plane" in who:
        plane.reap()


def all_lost(training: Training) -> None:
    assert training.status.phase == "failed"
    assert [e.rank for e in training.status.rank_exits] == list(range(RANKS))
    for ended in training.status.rank_exits:
        assert ended.exit_code in (None, 137)  # never 0, never made up
        assert ended.termination_reason == "SupervisorLost"


@pytest.mark.parametrize("who", ["supervisor", "supervisor watchdog"])
def test_killed_shim_is_noticed_and_nothing_of_it_is_left(plane: ControlPlane, who: str) -> None:
    training = started(plane)
    hit(plane, training, set(who.split()), signal.SIGKILL)
    all_lost(plane.until_over(training.name))
    plane.until_released(training.name)
    wait_for(lambda: not plane.left())


def test_killed_keeper_alone_disturbs_nobody(plane: ControlPlane, tmp_path: Path) -> None:
    script = f"echo up; while [ ! -e {tmp_path}/end ]; do sleep 0.02; done; exit $RANK"
    training = started(plane, script, min=1)
    hit(plane, training, {"watchdog"}, signal.SIGKILL)
    (tmp_path / "end").touch()
    ended = plane.until_over(training.name)
    assert [e.exit_code for e in ended.status.rank_exits] == [0, 1, 2]
    plane.until_released(training.name)
    wait_for(lambda: not plane.left())


@pytest.mark.parametrize("who", ["plane supervisor", "plane supervisor watchdog"])
def test_no_rank_outlives_shim_and_control_plane(plane: ControlPlane, who: str) -> None:
    training = started(plane, ALONE)
    hit(plane, training, set(who.split()), signal.SIGKILL)
    wait_for(lambda: not plane.left())  # with nobody there to do it
    plane.start()
    all_lost(plane.until_over(training.name))


def test_keeper_clears_whole_families_without_a_control_plane(plane: ControlPlane) -> None:
    training = started(plane)
    hit(plane, training, {"plane", "supervisor"}, signal.SIGKILL)
    wait_for(lambda: not plane.left())
    plane.start()
    all_lost(plane.until_over(training.name))


def test_families_of_ranks_go_when_a_control_plane_is_back(plane: ControlPlane) -> None:
    training = started(plane)
    hit(plane, training, {"plane", "supervisor", "watchdog"}, signal.SIGKILL)
    plane.start()
    all_lost(plane.until_over(training.name))
    plane.until_released(training.name)
    wait_for(lambda: not plane.left())


def test_daemon_goes_though_the_journal_says_its_rank_has_ended(plane: ControlPlane) -> None:
    """Both were killed between writing down an exit and clearing away what that rank had left."""
    training = started(plane, "setsid sleep 1000 & echo up; exec sleep 1000")
    hit(plane, training, {"plane", "supervisor", "watchdog"}, signal.SIGKILL)
    journal = JournalWriter(plane.directory(training) / "journal")
    for rank in range(RANKS):
        record = {"t": "exit", "rank": rank, "attempt": 0, "code": 0, "signal": None,
                  "reason": "Completed", "stopped": False, "at": 1.0}  # fmt: skip
        journal.append([record])
    journal.close()
    plane.start()
    assert plane.until_over(training.name).status.phase == "succeeded"
    plane.until_released(training.name)
    wait_for(lambda: not plane.left())


def test_ranks_are_started_again_under_a_new_shim_within_their_budget(
    plane: ControlPlane, tmp_path: Path
) -> None:
    script = f"""echo $RANK.$ATOLL_ATTEMPT >> {tmp_path}/ran; echo up
        [ $ATOLL_ATTEMPT = 0 ] && exec sleep 1000; exit 0"""
    training = started(plane, script, max_restarts=1)
    hit(plane, training, {"supervisor", "watchdog"}, signal.SIGKILL)
    ended = plane.until_over(training.name)
    assert [e.exit_code for e in ended.status.rank_exits] == [0] * RANKS
    assert [e.restart_count for e in ended.status.rank_exits] == [1] * RANKS
    ran = sorted((tmp_path / "ran").read_text().split())
    assert ran == [f"{rank}.{attempt}" for rank in range(RANKS) for attempt in range(2)]


@pytest.mark.skipif(
    not cgroup_for(Path("x"), "1.2."), reason="no control group of cgroup v2 may be made"
)
def test_guard_of_a_killed_shim_leaves_the_ranks_of_the_next_one_alone(
    plane: ControlPlane, tmp_path: Path
) -> None:
    script = f"""echo up; [ $ATOLL_ATTEMPT = 0 ] && exec sleep 1000
        echo again; while [ ! -e {tmp_path}/end ]; do sleep 0.02; done"""
    training = started(plane, script, max_restarts=1)
    watchdog, _ = plane.supervision_pids(training)
    reaper = processes.parent(watchdog)
    start_ticks = processes.start_ticks(reaper)
    os.kill(reaper, signal.SIGSTOP)  # it is slow
    hit(plane, training, {"supervisor", "watchdog"}, signal.SIGKILL)
    wait_for(lambda: sum(line.text == "again" for line in plane.log_lines(training.name)) == RANKS)
    os.kill(reaper, signal.SIGCONT)
    wait_for(lambda: not processes.is_running(reaper, start_ticks))
    (tmp_path / "end").touch()
    ended = plane.until_over(training.name)
    assert [e.exit_code for e in ended.status.rank_exits] == [0] * RANKS
    assert [e.restart_count for e in ended.status.rank_exits] == [1] * RANKS


def test_frozen_supervisor_is_replaced(plane: ControlPlane) -> None:
    training = started(plane)
    hit(plane, training, {"supervisor"}, signal.SIGSTOP)
    all_lost(plane.until_over(training.name))
    plane.until_released(training.name)
    wait_for(lambda: not plane.left())


def test_frozen_keeper_of_a_killed_supervisor_is_replaced(plane: ControlPlane) -> None:
    training = started(plane)
    hit(plane, training, {"watchdog"}, signal.SIGSTOP)
    hit(plane, training, {"supervisor"}, signal.SIGKILL)
    all_lost(plane.until_over(training.name))
    plane.until_released(training.name)
    wait_for(lambda: not plane.left())


def test_supervisor_that_goes_on_in_time_keeps_its_ranks(
    plane: ControlPlane, tmp_path: Path
) -> None:
    script = f"echo up; while [ ! -e {tmp_path}/end ]; do sleep 0.02; done"
    training = started(plane, script)
    hit(plane, training, {"supervisor"}, signal.SIGSTOP)
    (tmp_path / "end").touch()
    _, supervisor = plane.supervision_pids(training)
    pids = journalled_pids(plane, training)
    wait_for(lambda: not any(processes.is_running(pid, processes.start_ticks(pid)) for pid in pids))
    os.kill(supervisor, signal.SIGCONT)
    ended = plane.until_over(training.name)
    assert [e.exit_code for e in ended.status.rank_exits] == [0] * RANKS


def test_pid_of_another_process_is_never_signalled(plane: ControlPlane) -> None:
    """A journal may name a pid that somebody else has by now: its start time tells."""
    training = started(plane, ALONE)
    hit(plane, training, {"plane", "supervisor", "watchdog"}, signal.SIGKILL)
    bystander = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        path = plane.directory(training) / "journal"
        records = journal_records(path)
        for record in records:
            if record["t"] == "start" and record["rank"] == 0:
                record["pid"] = bystander.pid  # `startTicks` stays that of the rank
        path.write_bytes(encode_batch(1, records))
        plane.start()
        all_lost(plane.until_over(training.name))
        plane.until_released(training.name)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_journal_torn_in_its_last_line_is_read_up_to_there(
    plane: ControlPlane, tmp_path: Path
) -> None:
    script = f"echo up; while [ ! -e {tmp_path}/end ]; do sleep 0.02; done"
    training = started(plane, script, max_restarts=1)
    hit(plane, training, {"plane", "supervisor", "watchdog"}, signal.SIGKILL)
    with (plane.directory(training) / "journal").open("a") as journal:
        journal.write('{"n":3,"r":[{"t":"exit","rank":0,"attempt":0,"co')
    (tmp_path / "end").touch()
    plane.start()
    ended = plane.until_over(training.name)
    assert [e.exit_code for e in ended.status.rank_exits] == [0] * RANKS
    assert [e.restart_count for e in ended.status.rank_exits] == [1] * RANKS


def test_second_control_plane_on_one_state_directory_is_refused(plane: ControlPlane) -> None:
    name = plane.create("exec sleep 1000")
    plane.until_ready(name, 1)
    said = plane.start_refused()
    assert f"in use by process {plane.pid}" in said
    assert "only one control plane per state directory" in said
    assert [r.phase for r in plane.get(name).status.ranks] == ["Running"]


def journalled_pids(plane: ControlPlane, training: Training) -> list[int]:
    records = journal_records(plane.directory(training) / "journal")
    return [record["pid"] for record in records if record["t"] == "start"]
