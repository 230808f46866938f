"""One follower of the store for all: in order, without gaps, and nobody waits for anybody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from msgspec.structs import replace

from atoll.controller.informer import Informer
from atoll.core.errors import Gone
from atoll.core.phase import Phase
from atoll.core.ports import Change, Snapshot, Update
from atoll.core.status import Status, Training
from atoll.store.sqlite import MemoryStore
from tests.contract.test_store import scaled, training

ENDED = Status(phase=Phase.SUCCEEDED, is_released=True)


class GappyStore(MemoryStore):
    """Tells of a gap when asked to; counts lists and watches."""

    def __init__(self) -> None:
        super().__init__()
        self.lists, self.watches = 0, 0
        self.gap = asyncio.Event()
        self.may_list = asyncio.Event()
        self.may_list.set()

    async def snapshot(self) -> Snapshot:
        await self.may_list.wait()
        self.lists += 1
        return await super().snapshot()

    async def watch(self, after: int, key: Any = None) -> AsyncIterator[Change]:
        self.watches += 1
        changes = super().watch(after, key)
        gap = asyncio.ensure_future(self.gap.wait())
        while True:
            change = asyncio.ensure_future(anext(changes))  # type: ignore[arg-type]
            await asyncio.wait({gap, change}, return_when=asyncio.FIRST_COMPLETED)
            if gap.done():
                change.cancel()
                self.gap.clear()
                raise Gone(after, after)
            yield await change


@asynccontextmanager
async def informed(store: MemoryStore) -> AsyncIterator[Informer]:
    informer = Informer(store)
    running = asyncio.create_task(informer.run())
    try:
        async with asyncio.timeout(30):
            yield informer
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def checked(test: Callable[[GappyStore], Coroutine[Any, Any, None]]) -> None:
    async def inside() -> None:
        await test(GappyStore())

    asyncio.run(inside())


def words(update: Update) -> tuple[str, bool]:
    return update.key[1], update.is_removed


def test_a_follower_has_what_is_there_and_then_what_changes_in_order() -> None:
    async def check(store: GappyStore) -> None:
        first = await store.create(training("a"))
        ended = await store.create(training("ended"))
        await store.update_status(ended, ENDED)
        async with informed(store) as informer:
            updates = informer.updates()
            listed = await anext(updates)
            assert words(listed) == ("a", False)
            assert listed.is_listed
            await store.create(training("b"))
            await store.remove(first)
            seen = [await anext(updates), await anext(updates)]
            assert [words(update) for update in seen] == [("b", False), ("a", True)]
            assert not seen[0].is_listed
            assert [each.name for each in informer.active.values()] == ["b"]
            assert [each.key[1] for each in informer.settled.values()] == ["ended"]
        assert (store.lists, store.watches) == (1, 1)

    checked(check)


def test_a_slow_follower_holds_up_nobody_and_has_the_last_of_each_training() -> None:
    async def check(store: GappyStore) -> None:
        one = await store.create(training("a"))
        async with informed(store) as informer:
            slow, quick = informer.updates(), informer.updates()
            await anext(slow)
            await anext(quick)
            for target in (3, 4, 1):
                one = await store.update_spec(scaled(one, target))
                update = await anext(quick)
                assert update.training == one
            assert (await anext(slow)).training == one
            assert store.watches == 1

    checked(check)


def test_what_happened_in_a_gap_is_told() -> None:
    async def check(store: GappyStore) -> None:
        made: dict[str, Training] = {}
        for name in ("gone", "ends", "stays", "settled"):
            made[name] = await store.create(training(name))
        made["settled"] = await store.update_status(made["settled"], ENDED)
        async with informed(store) as informer:
            updates = informer.updates()
            assert [(await anext(updates)).key[1] for _ in range(3)] == ["ends", "gone", "stays"]
            store.may_list.clear()
            store.gap.set()
            while store.gap.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0)
            await store.remove(made["gone"])
            await store.remove(made["settled"])
            await store.update_status(made["ends"], ENDED)
            await store.create(training("new"))
            store.may_list.set()
            told = {update.key[1]: update for update in [await anext(updates) for _ in range(5)]}
            assert told.keys() == {"gone", "settled", "ends", "stays", "new"}
            assert {n for n, update in told.items() if update.is_removed} == {"gone", "settled"}
            end = told["ends"].training
            assert end is not None
            assert end.status.phase is Phase.SUCCEEDED
            assert {each.name for each in informer.active.values()} == {"stays", "new"}
        assert (store.lists, store.watches) == (2, 2)

    checked(check)


def test_a_training_is_not_over_because_the_informer_has_not_heard_of_it_yet() -> None:
    async def check(store: GappyStore) -> None:
        async with informed(store) as informer:
            one = await store.create(training("a"))
            assert not informer.is_over(one)
            await anext(informer.updates())
            assert not informer.is_over(one)
            updates = informer.updates()
            await anext(updates)
            await store.remove(one)
            await anext(updates)
            assert informer.is_over(one)
            assert informer.is_over(replace(one, status=ENDED, resource_version=10**6))

    checked(check)


def test_whoever_begins_while_nothing_is_followed_waits_for_the_next_list() -> None:
    async def check(store: GappyStore) -> None:
        informer = Informer(store)
        running = asyncio.create_task(informer.run())
        assert await informer.uids() == set()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        one = await store.create(training("a"))
        asked = asyncio.create_task(informer.uids())
        running = asyncio.create_task(informer.run())
        assert await asked == {one.uid}
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    checked(check)
