from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll.core.errors import Conflict, NotFound
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Event, Status, Training
from atoll.core.webhooks import MOST_OF_NAMESPACE, MOST_WAITING, new_secret
from atoll.store.sqlite import SQLiteStore

SPEC = TrainingSpec(name="a", command=["x"], world_size=WorldSize(min=1, target=1, max=1))


def event(reason: str, message: str = "m") -> Event:
    return Event(type="Warning", reason=reason, message=message, at=1.0)


@pytest.fixture
def store(tmp_path: Path) -> SQLiteStore:
    return SQLiteStore(tmp_path / "db")


def made(store: SQLiteStore, namespace: str = "n") -> Training:
    training = Training(namespace=namespace, uid=f"u-{namespace}", spec=SPEC)
    return asyncio.run(store.create(training))


def test_an_event_waits_for_each_webhook_of_its_namespace_that_wants_it(
    store: SQLiteStore,
) -> None:
    training, other = made(store), made(store, "other")
    store.outbox.add("n", "http://one/", ["Failed"], new_secret(), 1.0)
    store.outbox.add("n", "http://two/", ["*"], new_secret(), 2.0)
    store.outbox.add("other", "http://three/", ["*"], new_secret(), 3.0)
    asyncio.run(store.update_status(training, Status(), [event("Failed"), event("Scaled")]))
    asyncio.run(store.record(("n", "a"), event("Scaled")))  # again: counted, and told again
    urls = [delivery.url for delivery in store.outbox.due(1e12)]
    assert sorted(urls) == ["http://one/", *["http://two/"] * 3]
    assert len({delivery.id for delivery in store.outbox.due(1e12)}) == 4
    asyncio.run(store.remove(asyncio.run(store.get(("n", "a")))))
    assert len(store.outbox.due(1e12)) == 4, "it outlives its training"
    assert asyncio.run(store.get(other.key)).uid == "u-other"
    store.close()


def test_nothing_waits_for_a_status_that_was_not_written(store: SQLiteStore) -> None:
    training = made(store)
    store.outbox.add("n", "http://one/", ["*"], new_secret(), 1.0)
    asyncio.run(store.update_status(training, Status(message="1")))
    with pytest.raises(Conflict):
        asyncio.run(store.update_status(training, Status(message="2"), [event("Failed")]))
    assert store.outbox.due(1e12) == []
    store.close()


def test_what_waits_is_bounded(store: SQLiteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.store.outbox.MOST_WAITING", 3)
    assert MOST_WAITING > 3
    made(store)
    id = store.outbox.add("n", "http://one/", ["*"], new_secret(), 1.0)
    for number in range(5):
        asyncio.run(store.record(("n", "a"), event("Failed", str(number))))
    (hook,) = store.outbox.all("n")
    assert (hook.waiting, hook.dropped) == (3, 2)
    due = store.outbox.due(1e12)
    assert [b'"message":"%d"' % n in d.body for n, d in zip((2, 3, 4), due, strict=True)] == [
        True,
        True,
        True,
    ]
    store.outbox.postponed(due[0], "no", 5.0, 1e13)
    store.outbox.delivered(due[1], 6.0)
    store.outbox.given_up(due[2], "never", 7.0)
    (hook,) = store.outbox.all("n")
    assert (hook.waiting, hook.delivered, hook.dropped, hook.last_error) == (1, 1, 3, "never")
    assert store.outbox.due(1e12) == []
    assert store.outbox.next_due() == 1e13
    store.outbox.remove("n", id)
    assert store.outbox.next_due() is None
    store.close()


def test_a_namespace_sees_and_removes_only_its_own(store: SQLiteStore) -> None:
    id = store.outbox.add("n", "http://one/", [], new_secret(), 1.0)
    assert store.outbox.all("other") == []
    for attempt in (store.outbox.get, store.outbox.remove):
        with pytest.raises(NotFound):
            attempt("other", id)
    for _ in range(MOST_OF_NAMESPACE - 1):
        store.outbox.add("n", "http://one/", [], new_secret(), 1.0)
    with pytest.raises(Conflict, match="remove one first"):
        store.outbox.add("n", "http://one/", [], new_secret(), 1.0)
    store.close()
