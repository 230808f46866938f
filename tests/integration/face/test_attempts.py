"""Every attempt of a rank is listed, also those that nobody watched."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import atoll

from .conftest import Served, stop, until

# Fails with the number of its attempt until that is 4, and in attempt 1 it waits.
SCRIPT = """
echo $ATOLL_ATTEMPT >> {folder}/said
[ $ATOLL_ATTEMPT != 1 ] || while [ ! -e {folder}/go ]; do sleep 0.02; done
[ $ATOLL_ATTEMPT != 4 ] || exit 0
exit $((ATOLL_ATTEMPT + 10))
"""


def test_attempts_while_the_control_plane_was_dead_are_listed(where: Path, tmp_path: Path) -> None:
    said = tmp_path / "said"
    command = ["sh", "-c", SCRIPT.format(folder=tmp_path)]
    with atoll.Client() as client:
        training = client.deploy_distributed("a", command=command, world_size=1, max_restarts=9)
        until(lambda: said.exists() and said.read_text().split() == ["0", "1"])
        until(lambda: len(training.attempts()) == 2)
        stop(where, signal.SIGKILL)
        (tmp_path / "go").touch()
        until(lambda: said.read_text().split() == ["0", "1", "2", "3", "4"])
    with atoll.Client() as client:
        training = client.get("a")
        training.result(60)
        attempts = training.attempts()
        assert [(a.attempt, a.exit_code) for a in attempts] == [
            (0, 10),
            (1, 11),
            (2, 12),
            (3, 13),
            (4, 0),
        ]
        assert all(a.started_at and a.ended_at and a.reason and a.host for a in attempts)
        for rank in (-1, 7):
            with pytest.raises(atoll.ValidationError, match=f"rank: {rank} is not valid"):
                training.attempts(rank=rank)
    told = [sys.executable, "-m", "atoll.cli", "status", "a", "--attempts"]
    text = subprocess.run(told, capture_output=True, text=True, check=True).stdout
    lines = text.splitlines()
    assert lines[0].split() == ["RANK", "ATTEMPT", "STARTED", "RAN", "HOST", "END"]
    assert len(lines) == 6
    assert "exited with code 12" in lines[3]


def test_attempts_of_another_namespace_are_not_shown(served: Served) -> None:
    served.create("a")
    assert served.http.get("/v1/trainings/a/attempts").json() == {"items": []}
    with served.client("two") as other:
        assert other.get("/v1/trainings/a/attempts").status_code == 404
    assert served.http.get("/v1/trainings/a/attempts?rank=x").status_code == 400
