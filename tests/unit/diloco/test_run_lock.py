"""Whose run it is: one training at a time, whoever was killed, is ending or is restarted."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from itertools import count

import pytest

from atoll.core.errors import ValidationError
from atoll.diloco.group import SingleProcess
from atoll.diloco.run_lock import RunLock, lock_run
from atoll.objectstore import ObjectInfo, ObjectStore


class Store(ObjectStore):
    """Calls `before` each time that somebody looks."""

    before: Callable[[], None] = staticmethod(lambda: None)

    def list(self, prefix: str, after: str | None = None) -> list[ObjectInfo]:
        self.before()
        return super().list(prefix, after)


@pytest.fixture
def store() -> Store:
    opened = Store.open(f"memory://{uuid.uuid4().hex}")
    assert isinstance(opened, Store)
    return opened


def claim(store: ObjectStore, launch: str = "b", rank: int = 0) -> RunLock:
    ticks = count()
    one = RunLock(store, "exp", launch, rank, f"training-{launch}")
    # A second of the clock for each look, and no time in between.
    one.take(beat_s=0.001, ending_s=60, silence_s=10, clock=lambda: float(next(ticks)))
    return one


def marks(store: ObjectStore) -> list[str]:
    return [blob.key for blob in ObjectStore.list(store, "exp/live")]


def test_a_run_that_is_free_is_taken_and_given_back(store: Store) -> None:
    one = claim(store)
    assert marks(store) == ["exp/live/b/00000"]
    one.close()
    assert marks(store) == []


def test_a_run_with_a_living_training_is_refused_by_its_name(store: Store) -> None:
    other = RunLock(store, "exp", "a", 3, "training-a")
    store.before = other.beat
    with pytest.raises(
        ValidationError, match=r"run_id: 'exp' .*'training-a' \(ranks 3\)"
    ) as caught:
        claim(store)
    assert caught.value.field == "run_id"
    assert marks(store) == ["exp/live/a/00003"]


def test_a_training_that_was_killed_is_waited_for_only_until_it_is_silent(store: Store) -> None:
    RunLock(store, "exp", "a", 3).beat()
    looks = count(1)
    last = 0

    def check() -> None:
        nonlocal last
        last = next(looks)

    store.before = check
    claim(store)
    assert last > 5
    assert marks(store) == ["exp/live/b/00000"]


def test_a_training_that_is_ending_is_waited_for(store: Store) -> None:
    other, looks = RunLock(store, "exp", "a", 0), count(1)
    store.before = lambda: other.beat() if next(looks) < 20 else other.close()
    claim(store)
    assert marks(store) == ["exp/live/b/00000"]


def test_ranks_of_the_same_training_and_restarts_are_not_others(store: Store) -> None:
    for rank in (0, 1):
        RunLock(store, "exp", "b", rank).beat()
    looks = count(1)
    store.before = lambda: looks.__next__() and None
    claim(store)
    assert next(looks) == 2


def test_only_a_run_that_was_named_is_claimed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATOLL_UID", raising=False)
    assert lock_run(store, "exp", 0, SingleProcess()) is None
    monkeypatch.setenv("ATOLL_UID", "exp")
    assert lock_run(store, "exp", 0, SingleProcess()) is None
    assert marks(store) == []
    monkeypatch.setenv("ATOLL_UID", "u1")
    one = lock_run(store, "exp", 0, SingleProcess())
    assert one is not None
    one.close()
