"""`atoll run --executor cloud` on Modal, as a user meets it: the client is Modal's own, the service
is the stand-in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.allreduce.s3server import S3Server
from tests.support.modal_stand_in import ModalStandIn

from .conftest import Shell, until

CONFIG = """
[executors.cloud]
kind = "modal"
store = "s3://runs/all"
image = "ghcr.io/me/train:1"
python = "python"
secrets = ["store"]
gpu = "H100"
poll_s = 0.2

[defaults]
topology_spread = "pack"
"""


@pytest.fixture
def modal(lone_atoll: Shell) -> Iterator[ModalStandIn]:
    server, s3 = ModalStandIn(), S3Server()
    s3.make_bucket("runs")
    server.secrets["store"] = s3.environment
    lone_atoll.env |= {**server.environment, **s3.environment}
    lone_atoll.configure(CONFIG)
    yield server
    if names := [each["name"] for each in lone_atoll.json("ps")]:
        assert lone_atoll("rm", "-f", *names).returncode == 0
    server.close()
    s3.stop()


def test_a_project_runs_on_modal_by_the_name_of_the_executor(
    lone_atoll: Shell, modal: ModalStandIn
) -> None:
    (lone_atoll.cwd / "helper.py").write_text("WORD = 'from the project'")
    (lone_atoll.cwd / "train.py").write_text(
        "import os, helper; print(helper.WORD, 'on', os.environ['MODAL_REGION'])"
    )
    done = lone_atoll("run", "-n", "2", "--executor", "cloud", "--", "python", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cloud does not support topology_spread pack: Modal places") == 1
    assert sorted(done.stdout.splitlines()) == [
        "[0] from the project on us-east-1",
        "[1] from the project on us-east-1",
    ]
    executors = {each["name"]: each for each in lone_atoll.json("executors")["items"]}
    assert (executors["cloud"]["kind"], executors["cloud"]["isReachable"]) == ("modal", True)
    failed = lone_atoll("run", "--executor", "cloud", "--name", "bad", "--", "sh", "-c", "exit 7")
    assert failed.returncode == 1
    assert "rank 0 failed first: it exited with code 7" in failed.stderr
    assert modal.running() == []
    refused = lone_atoll("run", "--executor", "cloud", "--gpus", "9", "--", "true")
    assert refused.returncode == 2
    assert "at most 8 H100" in refused.stderr


def test_without_credentials_it_says_what_to_do(lone_atoll: Shell, modal: ModalStandIn) -> None:
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        del lone_atoll.env[name]
    refused = lone_atoll("run", "--executor", "cloud", "--", "true")
    assert refused.returncode == 2
    assert "'modal token new' writes them, or set MODAL_TOKEN_ID" in refused.stderr
    assert modal.calls == {}


HUNG = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def hang():
    # On one line: whoever has seen the output finds the rank there, however slow the machine is.
    while True: print("up", flush=True); time.sleep(1000)
hang()
"""


def test_stacks_and_signals_reach_sandboxes_and_a_kill_leaves_its_stack(
    lone_atoll: Shell, modal: ModalStandIn
) -> None:
    (lone_atoll.cwd / "hung.py").write_text(HUNG)
    more = ("--stop-grace", "1s", "--min", "1", "--", "python", "hung.py")
    made = lone_atoll(
        "run",
        "-d",
        "--name",
        "hung",
        "-n",
        "2",
        "--rendezvous",
        "none",
        "--executor",
        "cloud",
        *more,
    )
    assert made.returncode == 0, made.stderr
    until(lambda: lone_atoll("logs", "hung").stdout.count("up") == 2)
    # Output may be there before the control plane has observed the rank, and asks it.
    assert lone_atoll("wait", "hung", "--for", "target").returncode == 0
    assert "2 ranks (0-1) in hung.py:6 in hang" in lone_atoll("stacks", "hung").stdout
    assert "modal container exec" in lone_atoll("exec", "hung", "--", "true").stderr
    assert "sent SIGUSR1 to rank 1" in lone_atoll("kill", "hung", "1", "-s", "USR1").stdout
    assert lone_atoll("cancel", "hung").returncode == 0
    lone_atoll("wait", "hung", "--timeout", "60")
    ended = {end["rank"]: end for end in lone_atoll.json("status", "hung")["rankExits"]}
    assert ended[1]["signal"] == "SIGUSR1"
    assert "hung.py:6 in hang" in ended[0]["stack"][0]
    kept = lone_atoll("stacks", "hung", "--stored").stdout
    assert "taken because it did not end within its grace period (rank 0)" in kept


REPORTING = """
import os, atoll, numpy as np
from atoll.diloco.allreduce import ObjectStoreAllReduce
rank = int(os.environ["ATOLL_RANK"])
with ObjectStoreAllReduce(
    os.environ["ATOLL_RENDEZVOUS_URI"], rank, 2, run_id=os.environ["ATOLL_UID"], grace_s=60.0
) as reduce:
    for step in range(1, 4):
        reduce.allreduce([np.full(8, rank, np.float32)], weight=1.0)
        atoll.report(step=step, loss=1 / step + rank)
"""


def test_what_ranks_report_comes_through_the_object_store(
    lone_atoll: Shell, modal: ModalStandIn
) -> None:
    (lone_atoll.cwd / "train.py").write_text(REPORTING)
    words = ("run", "-n", "2", "--executor", "cloud", "--name", "told", "--rendezvous", "none")
    done = lone_atoll(*words, "--", "python", "train.py")
    assert done.returncode == 0, done.stderr
    expected = {(rank, step): 1 / step + rank for rank in range(2) for step in range(1, 4)}
    until(lambda: len(lone_atoll.json("metrics", "told", "loss")["step"]) == len(expected))
    told = lone_atoll.json("metrics", "told", "loss")
    pairs = zip(told["rank"], told["step"], strict=True)
    assert dict(zip(pairs, told["value"], strict=True)) == expected
    until(lambda: len(lone_atoll.json("rounds", "told")["round"]) == 3)
    rounds = lone_atoll.json("rounds", "told")
    assert rounds["members"] == [[0, 1]] * 3
    assert set(rounds["source"]) == {"store"}
