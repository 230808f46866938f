"""What ranks may do to themselves, on real processes: the verdict is right and nothing is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.support.control_plane import ControlPlane, journal_records, wait_for

from atoll.agent.records import Due
from atoll.backends.local.rank_process import become_rank
from atoll.core.describe import describe_end
from atoll.core.status import Training

FOREVER = "exec sleep 1000"


def only(training: Training) -> tuple[int | None, str, str | None]:
    (ended,) = training.status.rank_exits
    return ended.exit_code, ended.termination_reason, ended.signal


def nothing_is_left(plane: ControlPlane, name: str) -> bool:
    plane.until_released(name)
    uid = plane.get(name).uid
    wait_for(lambda: not plane.left_of(uid))
    return True


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("exit 0", (0, "Completed", None)),
        ("exit 3", (3, "Error", None)),
        ("exit 255", (255, "Error", None)),
        ("kill -9 $$", (137, "Signal", "SIGKILL")),
        ("kill -SEGV $$", (139, "Signal", "SIGSEGV")),
        ("kill -TERM $$", (143, "Signal", "SIGTERM")),
        ("kill -35 $$", (163, "Signal", "SIGRTMIN+1")),
    ],
)
def test_exit_code_and_signal_are_the_real_ones(
    shared_plane: ControlPlane, script: str, expected: tuple[int, str, str | None]
) -> None:
    training = shared_plane.until_over(shared_plane.create(script))
    assert only(training) == expected
    assert training.status.phase == ("succeeded" if expected[0] == 0 else "failed")


@pytest.mark.parametrize(
    ("command", "code", "reason", "told"),
    [
        (["nonesuch"], 127, "CommandNotFound", "nonesuch: No such file or directory"),
        (["/tmp"], 126, "CannotRun", "/tmp: Permission denied"),
        (["no\nsuch\nthing"], 127, "CommandNotFound", "No such file or directory"),
        (["x" * 5000], 126, "CannotRun", "File name too long"),
    ],
)
def test_command_that_cannot_be_run_says_so(
    shared_plane: ControlPlane, command: list[str], code: int, reason: str, told: str
) -> None:
    training = shared_plane.until_over(shared_plane.create(command))
    root = training.status.root_cause
    assert root is not None
    assert (root.exit_code, root.termination_reason) == (code, reason)
    assert told in root.message


def test_the_environment_names_the_directory_the_rank_is_in(
    shared_plane: ControlPlane, tmp_path: Path
) -> None:
    name = shared_plane.create(["env"], working_dir=str(tmp_path))
    shared_plane.until_over(name)
    assert f"PWD={tmp_path}" in [line.text for line in shared_plane.log_lines(name)]


def test_missing_working_directory_is_named(shared_plane: ControlPlane) -> None:
    training = shared_plane.until_over(shared_plane.create("exit 0", working_dir="/nonesuch/dir"))
    root = training.status.root_cause
    assert root is not None
    assert (root.exit_code, root.termination_reason) == (126, "CannotRun")
    assert "/nonesuch/dir: No such file or directory" in root.message


def test_root_cause_carries_the_last_lines_of_its_log(shared_plane: ControlPlane) -> None:
    name = shared_plane.create("for i in 1 2 3; do echo line $i; done; echo bad >&2; exit 9")
    root = shared_plane.until_over(name).status.root_cause
    assert root is not None
    assert root.log_tail == ["line 1", "line 2", "line 3", "bad"]


def test_a_progress_bar_does_not_hide_what_the_rank_printed_before(
    shared_plane: ControlPlane,
) -> None:
    steps = "for i in $(seq 2000); do printf '\\r %d/2000 it/s' $i; done"
    name = shared_plane.create(f"echo loading; {steps}; exit 9")
    root = shared_plane.until_over(name).status.root_cause
    assert root is not None
    assert root.log_tail == ["loading", " 2000/2000 it/s"]


def test_rank_that_ignores_sigterm_is_killed_after_the_grace(shared_plane: ControlPlane) -> None:
    script = "trap '' TERM; echo up; while :; do sleep 0.05; done"
    name = shared_plane.create(script, stop_grace_s=0.3)
    wait_for(lambda: shared_plane.log_lines(name))
    asked_at = time.time()
    shared_plane.ask(name, cancel=True)
    training = shared_plane.until_over(name)
    assert training.status.phase == "cancelled"
    assert only(training) == (137, "Stopped", "SIGKILL")
    (ended,) = training.status.rank_exits
    assert ended.ended_at is not None
    assert ended.ended_at - asked_at >= 0.3
    assert not ended.collateral
    assert nothing_is_left(shared_plane, name)


def test_rank_that_ends_in_its_grace_keeps_its_own_exit_code(shared_plane: ControlPlane) -> None:
    script = "trap 'exit 7' TERM; echo up; while :; do sleep 0.02; done"
    name = shared_plane.create(script, stop_grace_s=30)
    wait_for(lambda: shared_plane.log_lines(name))
    shared_plane.ask(name, cancel=True)
    assert only(shared_plane.until_over(name)) == (7, "Stopped", None)


# Each says in a file that it is up, and only then does its rank go on.
DAEMONS = {
    "a child": "(touch $UP; exec sleep 1000) &",
    "one in its own session": "setsid sh -c 'touch $UP; exec sleep 1000' &",
    "a double-forked daemon": "(setsid sh -c 'sleep 1000 & touch $UP; exec sleep 1000' &)",
    "one with no environment": "env -i UP=$UP setsid /bin/sh -c 'touch $UP; exec sleep 1000' &",
    "one whose rank is not a number": "ATOLL_RANK=x setsid sh -c 'touch $UP; exec sleep 1000' &",
    "one that stays stopped": "setsid sh -c 'touch $UP; kill -STOP $$' &",
}


def with_daemon(kind: str, folder: Path) -> str:
    return f"""export UP={folder}/up.$RANK.$ATOLL_ATTEMPT
        {DAEMONS[kind]}
        until [ -e $UP ]; do sleep 0.01; done"""


@pytest.mark.parametrize("kind", DAEMONS)
def test_what_a_rank_leaves_behind_is_gone_when_it_is_over(
    shared_plane: ControlPlane, tmp_path: Path, kind: str
) -> None:
    name = shared_plane.create(f"{with_daemon(kind, tmp_path)}\nexit 0", 2)
    training = shared_plane.until_over(name)
    assert training.status.phase == "succeeded"
    assert [e.exit_code for e in training.status.rank_exits] == [0, 0]
    assert nothing_is_left(shared_plane, training.name)


def test_daemon_that_lies_about_its_rank_harms_nobody(
    shared_plane: ControlPlane, tmp_path: Path
) -> None:
    script = f"""if [ $RANK = 0 ]; then
            {with_daemon("one whose rank is not a number", tmp_path)}
            exit 0
        fi
        until [ -e {tmp_path}/end ]; do sleep 0.02; done"""
    name = shared_plane.create(script, 2)
    shared_plane.until(name, lambda t: any(r.phase == "Succeeded" for r in t.status.ranks))
    (tmp_path / "end").touch()
    training = shared_plane.until_over(name)
    assert [e.exit_code for e in training.status.rank_exits] == [0, 0]
    assert nothing_is_left(shared_plane, name)


def test_daemon_of_an_ended_rank_goes_while_the_others_run_on(
    shared_plane: ControlPlane, tmp_path: Path
) -> None:
    script = f"""if [ $RANK = 0 ]; then
            {with_daemon("one in its own session", tmp_path)}
            echo $! > {tmp_path}/daemon; exit 0
        fi
        {FOREVER}"""
    name = shared_plane.create(script, 2)
    shared_plane.until(name, lambda t: any(r.phase == "Succeeded" for r in t.status.ranks))
    daemon = int((tmp_path / "daemon").read_text())
    wait_for(lambda: not Path(f"/proc/{daemon}").exists())
    training = shared_plane.get(name)
    assert [r.phase for r in training.status.ranks] == ["Succeeded", "Running"]
    shared_plane.ask(name, cancel=True)
    shared_plane.until_over(name)


def test_restarted_rank_does_not_meet_what_its_last_attempt_left(
    shared_plane: ControlPlane, tmp_path: Path
) -> None:
    script = f"""if [ $ATOLL_ATTEMPT = 0 ]; then
            {with_daemon("one in its own session", tmp_path)}
            echo $! > {tmp_path}/daemon; exit 1
        fi
        [ -d /proc/$(cat {tmp_path}/daemon) ] && exit 99 || exit 0"""
    training = shared_plane.until_over(shared_plane.create(script, max_restarts=1))
    assert only(training) == (0, "Completed", None)
    assert training.status.rank_exits[0].restart_count == 1


def test_supervisor_sleeps_while_a_rank_has_closed_its_output(shared_plane: ControlPlane) -> None:
    name = shared_plane.create("exec >&- 2>&- ; exec sleep 1000")
    training = shared_plane.until_ready(name, 1)
    _, supervisor = shared_plane.supervision_pids(training)
    wait_for(lambda: _state(supervisor) == "S")
    seen = [(_state(supervisor), time.sleep(0.01)) for _ in range(40)]
    assert sum(state == "S" for state, _ in seen) > 20  # one that spins never sleeps
    shared_plane.ask(name, cancel=True)
    shared_plane.until_over(name)


def test_a_gigabyte_of_output_is_bounded_and_holds_nobody_up(shared_plane: ControlPlane) -> None:
    name = shared_plane.create("head -c 1G /dev/zero | tr '\\0' x; echo; echo the end")
    answered = 0
    while not shared_plane.get(name).status.phase.is_terminal:
        assert shared_plane.until_over(shared_plane.create("exit 0")).status.phase == "succeeded"
        answered += 1
    training = shared_plane.get(name)
    assert training.status.phase == "succeeded"
    assert answered > 0
    folder = shared_plane.directory(training) / "logs" / "0"
    assert sum(f.stat().st_size for f in folder.iterdir()) < 80 * 2**20
    assert shared_plane.log_lines(name, tail=1)[-1].text == "the end"


def test_a_log_without_line_ends_comes_in_pieces(shared_plane: ControlPlane) -> None:
    name = shared_plane.create("head -c 40M /dev/zero | tr '\\0' x")
    shared_plane.until_over(name)
    lines = shared_plane.log_lines(name)
    assert sum(len(line.text) for line in lines) == 40 * 2**20
    assert max(len(line.text) for line in lines) <= 17 * 2**20


def test_two_hundred_ranks_run_at_once_and_each_exit_is_known(
    shared_plane: ControlPlane, tmp_path: Path
) -> None:
    script = f"echo $RANK >> {tmp_path}/ran; exit $((RANK % 2))"
    name = shared_plane.create(script, 200, min=100)
    training = shared_plane.until_over(name)
    assert [e.exit_code for e in training.status.rank_exits] == [r % 2 for r in range(200)]
    ran = sorted(map(int, (tmp_path / "ran").read_text().split()))
    assert ran == list(range(200))
    assert training.status.phase == "succeeded"  # 100 of them exited 0, which is the minimum
    assert nothing_is_left(shared_plane, name)


def test_frozen_rank_is_noticed_and_replaced(shared_plane: ControlPlane) -> None:
    script = "[ $ATOLL_ATTEMPT = 1 ] && exit 0; exec sleep 1000"
    name = shared_plane.create(script, max_restarts=1)
    shared_plane.until_ready(name, 1)
    os.kill(_pid(shared_plane, name), signal.SIGSTOP)
    stopped_at = time.time()
    training = shared_plane.until_over(name)
    assert only(training) == (0, "Completed", None)
    frozen = next(e for e in shared_plane.events(name) if "Frozen" in e.message)
    assert frozen.reason == "RankRestarting"
    assert frozen.at - stopped_at < 5.0  # the promise of the contract, not a measurement


def test_rank_that_goes_on_in_time_is_not_taken_for_frozen(shared_plane: ControlPlane) -> None:
    name = shared_plane.create("exec sleep 1000")
    shared_plane.until_ready(name, 1)
    pid = _pid(shared_plane, name)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.5)
    os.kill(pid, signal.SIGCONT)
    time.sleep(3.2)  # longer than a frozen rank is given
    assert [r.phase for r in shared_plane.get(name).status.ranks] == ["Running"]
    shared_plane.ask(name, cancel=True)
    shared_plane.until_over(name)


def test_rank_starved_of_cpu_is_not_taken_for_dead(shared_plane: ControlPlane) -> None:
    busy = "nice -n 19 sh -c 'i=0; while [ $i -lt 400000 ]; do i=$((i+1)); done'; exit 0"
    name = shared_plane.create(busy, 8)
    training = shared_plane.until_over(name)
    assert [e.exit_code for e in training.status.rank_exits] == [0] * 8
    assert [e.restart_count for e in training.status.rank_exits] == [0] * 8


def test_first_to_fall_is_named_though_its_peer_reports_whole_seconds(
    shared_plane: ControlPlane,
) -> None:
    """torch's @record rounds the time of failure down, by up to a second."""
    report = '{"message": {"message": "lost a peer", "extraInfo": {"timestamp": "%s"}}}'
    script = f"""journal=$(dirname $(dirname $TORCHELASTIC_ERROR_FILE))/journal
        [ $RANK = 1 ] && kill -9 $$
        until grep -q SIGKILL $journal; do sleep 0.01; done
        second=$(sed -n 's/.*SIGKILL.*"at":\\([0-9]*\\).*/\\1/p' $journal)
        printf '{report}' $second > $TORCHELASTIC_ERROR_FILE
        exit 1"""
    # With a minimum of 1 the loss of rank 1 alone stops nobody: rank 0 ends by itself.
    training = shared_plane.until_over(shared_plane.create(script, 2, min=1))
    root = training.status.root_cause
    assert root is not None
    assert (root.rank, root.signal) == (1, "SIGKILL")
    assert [e.collateral for e in training.status.rank_exits] == [True, False]


def test_a_rank_that_failed_before_it_was_told_to_stop_is_not_called_stopped(
    shared_plane: ControlPlane,
) -> None:
    """It still unwinds when atoll stops it because of the failure of another."""
    report = '{"message": {"message": "ValueError: oops", "extraInfo": {"timestamp": "%s"}}}'
    script = f"""trap 'exit 1' TERM
        printf '{report}' $(date +%s.%N) > $TORCHELASTIC_ERROR_FILE
        [ $RANK = 1 ] && exit 1
        while :; do sleep 0.02; done"""
    training = shared_plane.until_over(shared_plane.create(script, 2))
    assert [e.termination_reason for e in training.status.rank_exits] == ["Error", "Error"]
    assert "both ranks failed the same way: ValueError: oops" in describe_end(training)


@pytest.mark.parametrize(
    ("message", "timestamp", "told"),
    [
        ("no file \\udcff", "1.5", "no file \\udcff"),
        ("a\\u2028b", "1.5", "a\u2028b"),
        ("E: many\\nlines\\n", "1.5", "E: many"),
        ("P:\\nTraceback (most recent call last):\\n  x()\\nE: why\\n", "1.5", "E: why"),
        ("", "1.5", ""),
        ("no time", "nan", ""),
    ],
)
def test_whatever_a_rank_says_of_its_failure_the_training_ends(
    shared_plane: ControlPlane, message: str, timestamp: str, told: str
) -> None:
    said = f'{{"message": {{"message": "{message}", "extraInfo": {{"timestamp": "{timestamp}"}}}}}}'
    script = f"cat > $TORCHELASTIC_ERROR_FILE <<'END'\n{said}\nEND\nexit 3"
    training = shared_plane.until_over(shared_plane.create(script))
    assert only(training) == (3, "Error", None)
    assert training.status.root_cause is not None
    assert training.status.root_cause.message == told


def test_child_that_was_never_told_to_run_does_not_end_with_success(tmp_path: Path) -> None:
    """Its supervisor was killed before it said go: an exit code of 0 would be a lie."""
    go, go_in = os.pipe()
    supervisor = os.getpid()
    child = os.fork()
    if child == 0:
        try:  # an error must not go on in a second process of the suite
            os.close(go_in)
            gang = {"working_dir": None, "command": ["true"], "env": {}, "rank_variables": []}
            become_rank(
                tmp_path, gang, Due(0, 0, 0, None, 0.0), supervisor, (1024, 1024),
                umask=0o022, go=go, output=1, failures=2,
            )  # fmt: skip
        finally:
            os._exit(99)
    os.close(go)
    os.close(go_in)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _pid(plane: ControlPlane, name: str) -> int:
    records = journal_records(plane.directory(plane.get(name)) / "journal")
    return int([r["pid"] for r in records if r["t"] == "start"][-1])
