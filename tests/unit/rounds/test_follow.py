"""The store of a training is looked at while it runs and once after it, if that is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from atoll.core.phase import Phase
from atoll.core.spec import RendezvousSpec, TrainingSpec, WorldSize
from atoll.core.status import Status, Training
from atoll.metrics.store import MetricStore
from atoll.objectstore import ObjectStore
from atoll.rounds import follow
from atoll.rounds.follow import FollowedTraining, RoundFollower, StoreAccess
from tests.unit.rounds.test_manifests import decide, upload


def training(
    uri: str | None = None, namespace: str = "default", run_id: str | None = None
) -> Training:
    spec = TrainingSpec(
        name="t",
        command=["true"],
        world_size=WorldSize(min=1, target=2, max=2),
        rendezvous=RendezvousSpec(uri=uri),
        run_id=run_id,
    )
    return Training(namespace=namespace, uid="u", spec=spec, status=Status(phase=Phase.READY))


def round_in(folder: Path, number: int) -> None:
    blobs = ObjectStore.open(folder)
    decide(blobs, number, {0: upload(blobs, number, 0)}, [])


def follower(tmp_path: Path, access: StoreAccess) -> RoundFollower:
    return RoundFollower(MetricStore(tmp_path / "db").rounds, lambda training: access)


def looked(it: RoundFollower, of: Training) -> FollowedTraining:
    it.note(of)
    followed = it._followed[of.uid]
    followed.training = of
    it.observe(followed)
    return followed


def test_what_is_new_is_kept_and_an_ended_training_is_looked_at_once_more(tmp_path: Path) -> None:
    store = tmp_path / "store"
    it = follower(tmp_path, StoreAccess("local", store.as_uri()))
    looked(it, training())
    assert not store.exists(), "a look makes nothing"
    round_in(store, 0)
    looked(it, training())
    assert it._table.runs("u") == ["run"]
    round_in(store, 1)
    ended = replace(training(), status=Status(phase=Phase.SUCCEEDED))
    looked(it, ended)
    assert len(it._table.rounds("u", "run")) == 2
    it.note(ended)
    assert it._followed == {}, "it was read to its end"
    summary = it._table.summary("u")
    assert summary is not None
    assert (summary.rounds, summary.source) == (2, "store")


def test_a_store_that_is_not_allowed_is_not_opened_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "secret"
    round_in(store, 0)

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("it was opened")

    monkeypatch.setattr(ObjectStore, "open", never)
    it = follower(tmp_path, StoreAccess("local", ""))
    looked(it, training(store.as_uri(), namespace="team-b"))
    assert it._table.runs("u") == []
    observation = it._table.observation("u")
    assert observation is not None
    assert "own user" in observation.problem


def test_in_a_store_that_trainings_share_only_its_own_run_is_read(tmp_path: Path) -> None:
    store = tmp_path / "runs"
    round_in(store, 0)  # the run is called "run"
    it = follower(tmp_path, StoreAccess("local", store.as_uri(), is_exclusive=False))
    looked(it, training(run_id="another"))
    assert it._table.runs("u") == []
    it = follower(tmp_path, StoreAccess("local", store.as_uri(), is_exclusive=False))
    looked(it, training(run_id="run"))
    assert it._table.runs("u") == ["run"]


def test_a_store_that_cannot_be_read_is_told_of_and_asked_again_later(tmp_path: Path) -> None:
    store = tmp_path / "store"
    round_in(store, 0)
    (store / "run" / "manifest" / "00000000").write_bytes(b"rubbish")
    it = follower(tmp_path, StoreAccess("local", store.as_uri()))
    followed = looked(it, training())
    it.observe(followed)
    observation = it._table.observation("u")
    assert observation is not None
    assert "the store cannot be read" in observation.problem
    assert followed.pause_s > follow.FILES_EVERY_S


def test_another_control_plane_goes_on_where_this_one_was(tmp_path: Path) -> None:
    store = tmp_path / "store"
    for number in range(3):
        round_in(store, number)
    looked(follower(tmp_path, StoreAccess("local", store.as_uri())), training())
    round_in(store, 3)
    again = follower(tmp_path, StoreAccess("local", store.as_uri()))
    followed = looked(again, training())
    assert followed.readers["run"].following == 4
    assert len(again._table.rounds("u", "run")) == 4
