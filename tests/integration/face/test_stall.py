"""A rank that does not move is told of, and taken back when it moves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import atoll

from .conftest import Served, until

# Rank 1 waits, without a trace, for somebody to write to the pipe; rank 0 goes on printing.
SCRIPT = """
if [ $RANK = 1 ] && [ $ATOLL_ATTEMPT = 0 ]; then read word < {pipe}; echo $word; fi
while [ ! -e {end} ]; do echo on; sleep 0.1; done
"""


def reasons(training: atoll.DistributedTraining) -> list[str]:
    return [event.reason for event in training.events() if event.reason.startswith("Rank")][::-1]


def test_a_rank_that_waits_for_ever_is_named_until_it_moves(
    client: atoll.Client, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    script = SCRIPT.format(pipe=tmp_path / "pipe", end=tmp_path / "end")
    training = client.deploy_distributed(
        "a", command=["sh", "-c", script], world_size=2, stall_s=2.0
    )
    words = "rank 1 has reported nothing, printed nothing and used no CPU"
    until(lambda: any(e.message.startswith(words) for e in training.events()))
    (condition,) = [c for c in training.conditions if c.type == "Stalled"]
    assert condition.status == "True"
    (tmp_path / "pipe").write_text("go\n")
    until(lambda: any(e.message == "rank 1 moves again" for e in training.events()))
    until(lambda: any(c.type == "Stalled" and c.status == "False" for c in training.conditions))
    (tmp_path / "end").touch()
    training.result(60)
    assert [a.attempt for a in training.attempts()] == [0, 0], "it is not restarted unless asked"


def test_it_is_started_again_if_that_was_asked(client: atoll.Client, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    script = SCRIPT.format(pipe=tmp_path / "pipe", end=tmp_path / "end")
    training = client.deploy_distributed(
        "a",
        command=["sh", "-c", script],
        world_size=2,
        stall_s=2.0,
        stall_restart=True,
        max_restarts=1,
    )
    until(lambda: len(training.attempts(rank=1)) == 2)
    assert training.attempts(rank=1)[0].signal == "SIGKILL"
    assert "RankStalled" in reasons(training)
    (tmp_path / "end").touch()
    training.result(60)


def test_an_executor_that_starts_no_stalled_rank_again_refuses_that(served: Served) -> None:
    body = {"name": "a", "worldSize": {"min": 1, "target": 1, "max": 1}, "command": ["x"]}
    more = {"stallS": 5, "stallRestart": True, "maxRestarts": 1}
    answer = served.http.post("/v1/trainings", json={**body, **more})
    assert answer.status_code == 400
    assert answer.json()["field"] == "stallRestart"
    assert served.http.post("/v1/trainings", json={**body, "stallS": 5}).status_code == 201


def test_bad_seconds_are_refused_before_anything_is_sent(client: atoll.Client) -> None:
    with pytest.raises(atoll.ValidationError, match="stall_s"):
        client.deploy_distributed("a", command=["true"], world_size=1, stall_s=0)
    with pytest.raises(atoll.ValidationError, match="stall_restart"):
        client.deploy_distributed("a", command=["true"], world_size=1, stall_restart=True)
    assert client.list() == []
