from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll.core.errors import Conflict
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Event, Status, Training
from atoll.core.webhooks import MAX_WAITING, Webhook
from atoll.store import feed
from atoll.store.sqlite import SQLiteStore

SPEC = TrainingSpec(name="a", command=["x"], world_size=WorldSize(min=1, target=1, max=1))


def event(reason: str, message: str = "m") -> Event:
    return Event(type="Warning", reason=reason, message=message, at=1.0)


def webhook(id: str, *events: str, namespaces: tuple[str, ...] | None = None) -> Webhook:
    return Webhook(id, f"http://{id}/", events, namespaces, b"k" * 16)


@pytest.fixture
def store(tmp_path: Path) -> SQLiteStore:
    return SQLiteStore(tmp_path / "db")


def made(store: SQLiteStore, namespace: str = "n") -> Training:
    training = Training(namespace=namespace, uid=f"u-{namespace}", spec=SPEC)
    return asyncio.run(store.create(training))


def messages(store: SQLiteStore, webhook: Webhook) -> list[bytes]:
    found = [store.outbox.get(id) for id in store.outbox.waiting(webhook)]
    return [delivery.body for delivery in found if delivery is not None]


def test_an_event_waits_for_each_webhook_that_wants_it(store: SQLiteStore) -> None:
    one, two = webhook("one", "Failed"), webhook("two", "*", namespaces=("n",))
    three = webhook("three", "*", namespaces=("other",))
    store.outbox.configure([one, two, three])
    training, other = made(store), made(store, "other")
    asyncio.run(store.update_status(training, Status(), [event("Failed"), event("Scaled")]))
    asyncio.run(store.record(("n", "a"), event("Scaled")))  # again: counted, and told again
    counts = [len(store.outbox.waiting(each)) for each in (one, two, three)]
    assert counts == [1, 3, 0]
    asyncio.run(store.remove(asyncio.run(store.get(("n", "a")))))
    assert len(store.outbox.waiting(two)) == 3, "they outlive their training"
    assert asyncio.run(store.get(other.key)).uid == "u-other"
    store.close()


def test_nothing_waits_for_a_status_that_was_not_written(store: SQLiteStore) -> None:
    one = webhook("one", "*")
    store.outbox.configure([one])
    training = made(store)
    asyncio.run(store.update_status(training, Status(message="1")))
    with pytest.raises(Conflict):
        asyncio.run(store.update_status(training, Status(message="2"), [event("Failed")]))
    assert store.outbox.waiting(one) == []
    store.close()


def test_what_waits_is_bounded_in_order_and_there_after_a_restart(
    store: SQLiteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "MAX_WAITING", 3)
    assert MAX_WAITING > 3
    one = webhook("one", "*")
    store.outbox.configure([one])
    made(store)
    for number in range(5):
        asyncio.run(store.record(("n", "a"), event("Failed", str(number))))
    store.close()
    again = SQLiteStore(tmp_path / "db")
    again.outbox.configure([one])
    bodies = messages(again, one)
    assert [b'"message":"%d"' % n in body for n, body in zip((2, 3, 4), bodies, strict=True)] == [
        True,
        True,
        True,
    ]
    first, second, _ = again.outbox.waiting(one)
    again.outbox.count_attempt(first)
    again.outbox.remove(second)
    tried = again.outbox.get(first)
    assert tried is not None
    assert tried.attempts == 1
    assert again.outbox.get(second) is None
    assert len(again.outbox.waiting(one)) == 2
    again.close()


def test_messages_to_a_webhook_that_is_not_configured_any_more_are_dropped(
    store: SQLiteStore, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = webhook("one", "*"), webhook("two", "*")
    store.outbox.configure([one, two])
    made(store)
    asyncio.run(store.record(("n", "a"), event("Failed")))
    store.outbox.configure([two])
    assert store.outbox.waiting(one) == []
    assert len(store.outbox.waiting(two)) == 1
    assert "1 messages are dropped" in caplog.text
    store.close()
