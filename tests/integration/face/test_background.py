"""What runs beside the controller: trouble with it is seen, passes, and touches no training."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.integration.face.conftest import Plane, until

import atoll
from atoll.sdk import flows

TELLS = """
import time, atoll
for step in range(100_000):
    atoll.report(step=step, loss=1 / (step + 1))
    time.sleep(0.05)
"""


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Plane]:
    found = Plane(tmp_path)
    yield found
    found.process.stop()


def readiness(plane: Plane) -> dict[str, Any]:
    answer = httpx2.get(f"{plane.url}/readyz", timeout=30)
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


def points(training: atoll.DistributedTraining) -> int:
    return sum(training.metrics(["loss"])["count"])


def test_metrics_go_on_after_their_file_was_locked_while_trainings_ended_and_were_removed(
    own: Plane,
) -> None:
    with own.client() as client:
        runs = client.deploy_distributed("runs", command=["python", "-c", TELLS], world_size=1)
        over = client.deploy_distributed("over", command=["true"], world_size=1)
        ends = client.deploy_distributed("ends", command=["sleep", "1000"], world_size=1)
        over.wait_until_complete(60)
        until(lambda: points(runs) > 0)
        assert readiness(own) == {"status": "ok"}
        other = sqlite3.connect(own.where / "series.db", isolation_level=None)
        other.execute("begin immediate")
        over.delete()
        ends.cancel()
        until(lambda: ends.phase == "cancelled")
        until(lambda: readiness(own)["status"] == "degraded")
        (failure,) = readiness(own)["failing"]
        assert failure["name"] == "metrics"
        assert "database is locked" in failure["error"]
        other.close()
        until(lambda: readiness(own) == {"status": "ok"})
        before = points(runs)
        until(lambda: points(runs) > before)


def test_a_damaged_file_of_metrics_does_not_keep_a_control_plane_from_starting(
    tmp_path: Path,
) -> None:
    where = tmp_path / "state"
    where.mkdir(mode=0o700)
    (where / "series.db").write_bytes(b"no database at all" * 1000)
    plane = Plane(where)
    try:
        with plane.client() as client:
            runs = client.deploy_distributed("runs", command=["python", "-c", TELLS], world_size=1)
            until(lambda: points(runs) > 0)
            (aside,) = where.glob("series.db.damaged-*")
            assert str(aside) in client.run(flows.executors()).message  # which `doctor` shows
        assert aside.read_bytes().startswith(b"no database at all")
    finally:
        plane.process.stop()
