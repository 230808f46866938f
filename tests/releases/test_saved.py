"""What the release before has stored is read as it was: a state directory, and a cluster's objects.

None of its code runs here. `save.py` says how the files were made.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

import atoll
from atoll.core.rounds import with_rounds
from atoll.core.status import Event, Seen, Training
from atoll.kubernetes.options import KubernetesOptions
from atoll.kubernetes.read import look, wish_of
from atoll.kubernetes.resource import read_events, to_training
from atoll.server.encoded import shown
from tests.support.release import NEW, NEW_SERVE, Site, cleared

HERE = Path(__file__).parent
SAVED = HERE / "state-0.1"
CASES = [json.loads(line) for line in (HERE / "cluster-0.1.jsonl").read_text().splitlines()]
NOW = 1_800_000_060.0


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(SAVED, tmp_path / "state")
    with cleared(tmp_path / "state"):
        yield tmp_path / "state"


def test_a_state_directory_is_read_as_it_was_and_a_copy_is_kept(state: Path) -> None:
    saved = json.loads((SAVED / "records.json").read_bytes())
    plane = Site(NEW, state).start(*NEW_SERVE)
    with atoll.Client(plane.url, plane.token) as client:
        assert [training.name for training in client.list()] == sorted(saved["records"])
        for name, record in saved["records"].items():
            training = client.get(name)
            known = shown(msgspec.convert(record["training"], Training))
            assert training.last == with_rounds(known, None), name
            assert training.events() == msgspec.convert(record["events"], list[Event])
            lines = [(line.rank, line.text) for line in training.logs()]
            assert lines == [(line.get("rank", 0), line["text"]) for line in record["logs"]]
        cause = client.get("broken").root_cause
        assert cause is not None
        assert (cause.rank, cause.exit_code, cause.log_tail) == (1, 7, ["nan", "nan"])
        spec = saved["records"]["keyed"]["training"]["spec"]
        once = {"Idempotency-Key": "once"}
        headers = once | {"Authorization": f"Bearer {plane.token}"}
        again = httpx2.post(f"{plane.url}/v1/trainings", json=spec, headers=headers)
        assert again.json()["uid"] == client.get("keyed").uid
    with atoll.Client(plane.url, saved["token"]) as other:
        assert other.list() == []
    plane.stop()
    assert dump(state / "atoll.db.v1") == dump(SAVED / "atoll.db")


def dump(path: Path) -> list[str]:
    db = sqlite3.connect(f"file:{path}?immutable=1", uri=True)
    try:
        return [f"version {db.execute('pragma user_version').fetchone()}", *db.iterdump()]
    finally:
        db.close()


@pytest.mark.parametrize(
    "name",
    ["mesh:mesh_wait", "mesh:mesh_status", "allreduce.allreduce:ObjectStoreAllReduce"]
    + ["allreduce:ObjectStoreAllReduce", "diloco:DiLoCo", "torchft_manager:ObjectStoreManager"],
)
def test_shipped_functions_find_what_they_refer_to(name: str) -> None:
    """A pickled function names what it uses by the module that had it then."""
    module, attribute = name.split(":")
    public = atoll if attribute in atoll.__all__ else importlib.import_module("atoll.diloco")
    found = getattr(importlib.import_module(f"atoll.worker.{module}"), attribute)
    assert found is getattr(public, attribute)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_a_resource_is_the_training_it_was(case: dict[str, Any]) -> None:
    assert to_training(case["resource"]) == msgspec.convert(case["training"], Training)
    events = read_events(case["resource"]["status"])
    assert events == msgspec.convert(case["events"], list[Event])


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_jobs_and_pods_are_understood(case: dict[str, Any]) -> None:
    training, job = msgspec.convert(case["training"], Training), case["job"]
    before = msgspec.structs.replace(training, status=type(training.status)())
    options = KubernetesOptions(is_exit_held=True, is_start_gated=True)
    found = look(before, job, case["pods"], options, NOW)
    seen = msgspec.convert(case["seen"], Seen)
    assert found.seen.ranks == seen.ranks
    assert wish_of(job) == found.seen.wish == seen.wish
    gate = found.gate
    assert [gate.opened_at is not None, gate.is_due, len(gate.held)] == case["gate"]
