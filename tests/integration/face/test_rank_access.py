"""A way into a rank: its process, a command beside it, a signal to it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.integration.face.conftest import Served, until

import atoll
from atoll.core.errors import Conflict, ValidationError

IDLE = ["sh", "-c", "echo up; while :; do sleep 0.05; done"]


@pytest.fixture
def training(client: atoll.Client, tmp_path: Path) -> Any:
    made = client.deploy_distributed(
        name="reach",
        command=IDLE,
        world_size=atoll.WorldSize(min=1, target=2, max=3),
        env={"OWN": "mine"},
        working_dir=str(tmp_path),
        max_restarts=3,
    )
    made.wait_until_target_world(60)
    return made


def test_the_process_of_each_rank_is_in_the_status(training: Any) -> None:
    for rank in training.ranks:
        environ, own = Path(f"/proc/{rank.pid}/environ"), f"ATOLL_RANK={rank.rank}".encode()
        until(lambda environ=environ, own=own: own in environ.read_bytes().split(b"\0"))
        assert rank.node == socket.gethostname()


def test_a_command_has_the_environment_and_the_directory_of_its_rank(
    training: Any, tmp_path: Path
) -> None:
    code = 'cat; echo "$OWN $ATOLL_RANK $PWD"; echo oh >&2; exit 7'
    done = training.exec(["sh", "-c", code], 1, stdin="fed ")
    assert (done.exit_code, done.stdout, done.stderr) == (7, f"fed mine 1 {tmp_path}\n", "oh\n")
    assert asyncio.run(training.exec_async(["true"])).exit_code == 0
    missing = training.exec(["no-such-command"])
    assert (missing.exit_code, missing.stderr) == (
        127,
        "atoll: no-such-command: No such file or directory\n",
    )


def test_a_command_ends_when_its_time_is_up_and_leaves_nothing(training: Any) -> None:
    done = training.exec(["sh", "-c", "echo $$ > pid; sleep 600 & sleep 600"], timeout=0.5)
    assert done.exit_code == 124
    directory = Path(training.spec.working_dir)
    pid = int((directory / "pid").read_text())
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_a_command_ends_with_its_rank(training: Any) -> None:
    rank = training.ranks[1]
    code = f"kill -9 {rank.pid}; while :; do sleep 0.05; done"
    assert training.exec(["sh", "-c", code], 1).exit_code == 128 + signal.SIGKILL


def test_a_killed_rank_is_restarted(training: Any) -> None:
    before = training.ranks[1].pid
    sent = training.kill(1)
    assert (sent.rank, sent.signal, sent.pid) == (1, "SIGKILL", before)
    until(lambda: training.refresh().status.ranks[1].restarts == 1)
    assert training.attempts(1)[0].signal == "SIGKILL"
    training.wait_until_target_world(60)
    assert training.ranks[1].pid != before


def test_a_signal_by_any_name_arrives(training: Any, tmp_path: Path) -> None:
    caught = "trap 'touch caught' USR1; echo up; while :; do sleep 0.05; done"
    other = training._client.deploy_distributed(
        name="traps", command=["sh", "-c", caught], world_size=1, working_dir=str(tmp_path)
    )
    other.wait_until_target_world(60)
    until(lambda: bool(other.logs()))
    assert asyncio.run(other.kill_async(0, "usr1")).signal == "SIGUSR1"
    until((tmp_path / "caught").exists)


@pytest.mark.parametrize(
    ("act", "field"),
    [
        (lambda t: t.kill(0, "SIGNONE"), "signal"),
        (lambda t: t.kill(3), "rank"),
        (lambda t: t.exec([]), "command"),
        (lambda t: t.exec("ls"), "command"),
        (lambda t: t.exec(["ls"], 3), "rank"),
        (lambda t: t.exec(["ls"], timeout=0), "timeout_s"),
    ],
)
def test_what_cannot_be_is_refused_by_name(training: Any, act: Any, field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        act(training)
    assert refused.value.field == field


def test_a_rank_that_does_not_run_has_no_way_in(training: Any) -> None:
    with pytest.raises(Conflict, match="rank 2 of 'reach' does not run"):
        training.exec(["true"], 2)
    training.cancel()
    with pytest.raises(Conflict, match="does not run"):  # also while its exit is being recorded
        until(lambda: not training.kill(0, str(int(signal.SIGCONT))))


def test_an_executor_without_a_way_in_says_so(served: Served) -> None:
    served.create("far")
    with served.sdk() as client:
        far = client.get("far")
        with pytest.raises(Conflict, match="atoll kill: the executor 'local': it has no way into"):
            far.kill(0)
        with pytest.raises(Conflict, match="atoll exec: "):
            far.exec(["true"])


def test_no_process_of_a_command_is_left_when_the_control_plane_is_killed(
    where: Path, tmp_path: Path
) -> None:
    import threading

    from tests.integration.face.conftest import stop

    with atoll.Client() as client:
        made = client.deploy_distributed(
            name="killed", command=IDLE, world_size=1, working_dir=str(tmp_path)
        )
        made.wait_until_target_world(60)
        code = "echo $$ > pid; while :; do sleep 0.05; done"
        asking = threading.Thread(target=lambda: _quietly(made, ["sh", "-c", code]))
        asking.start()
        until(lambda: (tmp_path / "pid").exists() and bool((tmp_path / "pid").read_text()))
        pid = int((tmp_path / "pid").read_text())
        stop(where, signal.SIGKILL)
        until(lambda: not _is_process(pid))
        asking.join()
        made.delete()  # by the next control plane, which this starts


def _quietly(made: Any, command: list[str]) -> None:
    try:
        made.exec(command)
    except atoll.AtollError:
        pass


def _is_process(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_rank_that_has_left_well_has_time_to_end(client: atoll.Client, tmp_path: Path) -> None:
    code = """
import os, signal, sys, time
from atoll.agent.process import mark_left
def leave(*_):
    if os.environ["ATOLL_RANK"] == "2":
        mark_left()
        while not os.path.exists("go"):
            time.sleep(0.02)
        os._exit(0)
signal.signal(signal.SIGTERM, leave)
print("up", flush=True)
while True:
    time.sleep(0.02)
"""
    made = client.deploy_distributed(
        name="leaves",
        command=[sys.executable, "-c", code],
        world_size=atoll.WorldSize(min=1, target=3, max=3),
        working_dir=str(tmp_path),
        stop_grace_s=0.2,
    )
    until(lambda: len(made.logs()) == 3)
    made.scale(1)
    until(lambda: not _lives(made, 1))  # its grace was over, and so was that of rank 2
    assert _lives(made, 2)
    (tmp_path / "go").touch()
    until(lambda: not _lives(made, 2))
    made.cancel()
    until(lambda: made.is_terminal)
    assert [ended.exit_code for ended in made.rank_exits[1:]] == [137, 0]


def _lives(made: Any, rank: int) -> bool:
    return any(one.rank == rank and one.is_alive for one in made.refresh().status.ranks)
