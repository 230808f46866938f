"""Changes as bytes: each encoded once, and what is kept of them bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from msgspec.structs import replace

from atoll.core.ports import Change
from atoll.core.status import Status, Training
from atoll.server.handlers.trainings import _changes
from atoll.server.http.operations import EncodedChanges
from atoll.store.sqlite import MemoryStore
from tests.contract.test_store import training


def change(version: int, size: int = 1000) -> Change:
    return Change(version=version, training=replace(training(), status=Status(message="x" * size)))


def test_the_same_change_has_the_same_bytes() -> None:
    encoded = EncodedChanges()
    assert encoded.of(change(1)) is encoded.of(change(1))


def test_the_present_state_is_encoded_once_for_all_who_begin_to_watch() -> None:
    store, encoded = MemoryStore(), EncodedChanges()

    async def first(one: Training) -> bytes:
        async def present() -> AsyncIterator[Training]:
            yield one

        rest = store.watch(one.resource_version, one.key)
        changes = _changes(present(), rest, lambda change: True, encoded)
        await anext(changes)  # a beat
        return await anext(changes)

    async def check() -> None:
        one = await store.create(training())
        assert await first(one) is await first(one)

    asyncio.run(check())


def test_what_is_kept_is_bounded_in_bytes() -> None:
    encoded = EncodedChanges(max_bytes=10_000)
    for version in range(100):
        encoded.of(change(version))
    assert sum(map(len, encoded._by_version.values())) == encoded._bytes <= 10_000
    assert encoded.of(change(200, 50_000)) is encoded.of(change(200))
