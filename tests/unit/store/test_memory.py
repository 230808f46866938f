"""What is particular to the store in memory: its bounds."""

from __future__ import annotations

import asyncio

import pytest

from atoll.core.errors import Gone
from atoll.core.status import Event, Status
from atoll.store import memory
from atoll.store.memory import MemoryStore
from tests.contract.test_store import take, training


def test_the_change_log_is_bounded_and_older_versions_are_gone() -> None:
    async def check() -> None:
        store = MemoryStore(log_changes=3)
        one = await store.create(training())
        for n in range(4):
            one = await store.update_status(one, Status(message=str(n)))
        recent = await take(store.watch(2), 3)
        assert [change.version for change in recent] == [3, 4, 5]
        with pytest.raises(Gone):
            await take(store.watch(1), 1)

    asyncio.run(check())


def test_a_watcher_that_falls_behind_the_log_is_told_so() -> None:
    async def check() -> None:
        store = MemoryStore(log_changes=2)
        one = await store.create(training())
        first = asyncio.ensure_future(anext(store.watch(one.resource_version)))
        await asyncio.sleep(0)
        for n in range(1200):
            one = await store.update_status(one, Status(message=str(n)))
        with pytest.raises(Gone):
            await first

    asyncio.run(check())


def test_events_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "EVENTS_KEPT", 2)

    async def check() -> None:
        store = MemoryStore()
        one = await store.create(training())
        for n in range(3):
            event = Event(type="Normal", reason=f"R{n}", message="", at=float(n))
            await store.record(one.key, event)
        assert [event.reason for event in await store.events(one.key)] == ["R2", "R1"]

    asyncio.run(check())
