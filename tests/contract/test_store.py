"""What every Store promises. Runs on each one; a new one is added to `STORES`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.core.errors import Conflict, Gone, NotFound
from atoll.core.phase import Phase
from atoll.core.ranks import MAX_ATTEMPTS
from atoll.core.spec import Code, Source, TrainingSpec, WorldSize
from atoll.core.status import AttemptStatus, Event, Status, Training
from atoll.store.sqlite import MemoryStore, SQLiteStore

replace = msgspec.structs.replace


@asynccontextmanager
async def sqlite_store(folder: Path) -> AsyncIterator[Any]:
    store = SQLiteStore(folder / "atoll.db")
    try:
        yield store
    finally:
        store.close()


@asynccontextmanager
async def memory_store(folder: Path) -> AsyncIterator[Any]:
    yield MemoryStore()


STORES = {"memory": memory_store, "sqlite": sqlite_store}


@pytest.fixture(params=sorted(STORES))
def on_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """Runs a test's coroutine on a fresh store."""

    def run(test: Callable[[Any], Awaitable[None]]) -> None:
        async def inside() -> None:
            async with STORES[request.param](tmp_path) as store, asyncio.timeout(30):
                await test(store)

        asyncio.run(inside())

    return run


def training(name: str = "a", namespace: str = "default", **changes: Any) -> Training:
    world = WorldSize(min=1, target=2, max=4)
    spec = TrainingSpec(name=name, command=["true"], world_size=world)
    uid = f"uid-{namespace}-{name}"
    return replace(Training(namespace=namespace, uid=uid, spec=spec, created_at=1.0), **changes)


def scaled(one: Training, target: int) -> Training:
    world = replace(one.spec.world_size, target=target)
    return replace(one, spec=replace(one.spec, world_size=world))


def event(reason: str, at: float = 1.0, message: str = "m") -> Event:
    return Event(type="Normal", reason=reason, message=message, at=at)


def test_a_snapshot_has_all_and_knows_which_are_settled(on_store: Callable[..., None]) -> None:
    ended = Status(phase=Phase.FAILED, is_released=True)

    async def check(store: Any) -> None:
        runs = await store.create(training("runs"))
        over = await store.update_status(await store.create(training("over")), ended)
        snapshot = await store.snapshot()
        assert snapshot.version == await store.version()
        assert [*snapshot.active] == [runs]
        assert [(s.uid, s.key, s.phase) for s in snapshot.settled] == [
            (over.uid, over.key, "failed")
        ]
        assert snapshot.uids == {runs.uid, over.uid}
        await store.update_spec(replace(over, deletion_requested_at=5.0))
        snapshot = await store.snapshot()
        assert [each.name for each in snapshot.active] == ["over", "runs"]
        assert not snapshot.settled

    on_store(check)


def test_what_was_created_is_read_back(on_store: Callable[..., None]) -> None:
    async def check(store: Any) -> None:
        made = await store.create(training())
        assert made.resource_version > 0
        assert await store.get(("default", "a")) == made

    on_store(check)


def test_a_taken_name_is_a_conflict_in_its_namespace_only(on_store: Callable[..., None]) -> None:
    async def check(store: Any) -> None:
        await store.create(training())
        await store.create(training(namespace="other"))
        with pytest.raises(Conflict, match="'a' exists"):
            await store.create(training(uid="another"))

    on_store(check)


def test_a_repeated_key_makes_one_training(on_store: Callable[..., None]) -> None:
    async def check(store: Any) -> None:
        made = await store.create(training(), idempotency_key="k")
        again = await store.create(training(uid="another"), idempotency_key="k")
        assert again == made
        assert len(await store.list("default")) == 1
        with pytest.raises(Conflict):
            await store.create(training("b"), idempotency_key="k")

    on_store(check)


def test_first_events_are_stored_with_a_training_and_not_by_a_repeated_key(
    on_store: Callable[..., None],
) -> None:
    async def check(store: Any) -> None:
        for reason in ("UnsupportedFields", "Again"):
            await store.create(training(), idempotency_key="k", events=[event(reason)])
        with pytest.raises(Conflict):
            await store.create(training(uid="another"), events=[event("Refused")])
        assert [e.reason for e in await store.events(("default", "a"))] == ["UnsupportedFields"]

    on_store(check)


def test_a_namespace_never_sees_another(on_store: Callable[..., None]) -> None:
    async def check(store: Any) -> None:
        await store.create(training("a", "one"))
        await store.create(training("b", "two"))
        assert [t.name for t in await store.list("one")] == ["a"]
        with pytest.raises(NotFound):
            await store.get(("one", "b"))
        assert [t.name for t in await store.list()] == ["a", "b"]

    on_store(check)


def test_lists_by_page_phase_and_prefix(on_store: Callable[..., None]) -> None:
    async def check(store: Any) -> None:
        for name in ("ab", "aa", "b"):
            await store.create(training(name))
        one = await store.get(("default", "b"))
        await store.update_status(one, Status(phase=Phase.READY))
        await store.create(training("aa", "other"))

        async def names(**options: Any) -> list[str]:
            """Of all pages, and never more than asked for on one."""
            after, found = "", []
            while True:
                page = await store.page("default", after=after, **options)
                assert len(page.items) <= options.get("limit", 100)
                assert all(t.namespace == "default" for t in page.items)
                found += [t.name for t in page.items]
                if page.more is None:
                    return found
                after = page.more

        assert await names() == ["aa", "ab", "b"]
        assert [t.name for t in (await store.page("default", limit=2)).items] == ["aa", "ab"]
        for limit in (1, 2, 3):
            assert await names(limit=limit) == ["aa", "ab", "b"]
            assert await names(limit=limit, phase="ready") == ["b"]
            assert await names(limit=limit, prefix="a") == ["aa", "ab"]
            assert await names(limit=limit, prefix="a", phase="ready") == []
        assert await names(prefix="ab") == ["ab"]
        assert await names(prefix="c") == []
        assert [t.namespace for t in await store.list()] == ["default", "other", *["default"] * 2]

    on_store(check)


def test_a_page_is_bounded_in_bytes_and_holds_at_least_one(on_store: Callable[..., None]) -> None:
    async def check(store: Any) -> None:
        for name in "abc":
            one = await store.create(training(name))
            await store.update_status(one, Status(message="x" * 10_000))
        page = await store.page("default", max_bytes=25_000)
        assert [t.name for t in page.items] == ["a", "b"]
        page = await store.page("default", after=page.more, max_bytes=25_000)
        assert ([t.name for t in page.items], page.more) == (["c"], None)
        assert [t.name for t in (await store.page("default", max_bytes=1)).items] == ["a"]

    on_store(check)


def test_a_watch_of_a_namespace_hears_only_of_that(on_store: Callable[..., None]) -> None:
    async def check(store: Any) -> None:
        start = await store.version()
        watch = store.watch(start, ("one", ""))
        await store.create(training("a", "two"))
        await store.create(training("b", "one"))
        assert (await anext(watch)).training.key == ("one", "b")
        await store.create(training("c", "two"))
        await store.create(training("d", "one"))
        assert (await anext(watch)).training.key == ("one", "d")
        await watch.aclose()

    on_store(check)


def test_a_changed_spec_has_a_new_generation_a_status_does_not(
    on_store: Callable[..., None],
) -> None:
    async def check(store: Any) -> None:
        made = await store.create(training())
        wider = await store.update_spec(scaled(made, 3))
        assert wider.generation == made.generation + 1
        seen = await store.update_status(wider, Status(phase=Phase.READY))
        assert seen.generation == wider.generation
        same = await store.update_spec(seen)
        assert same.generation == wider.generation
        assert made.resource_version < wider.resource_version < seen.resource_version

    on_store(check)


@pytest.mark.parametrize("write", ["spec", "status"])
def test_a_write_on_an_old_read_is_refused(on_store: Callable[..., None], write: str) -> None:
    async def check(store: Any) -> None:
        old = await store.create(training())
        await store.update_status(old, Status(phase=Phase.PENDING))
        if write == "spec":
            late = store.update_spec(scaled(old, 3))
        else:
            late = store.update_status(old, Status(phase=Phase.READY))
        with pytest.raises(Conflict, match="read it again"):
            await late
        assert (await store.get(old.key)).status.phase is Phase.PENDING

    on_store(check)


def test_of_two_writers_at_once_one_wins(on_store: Callable[..., None]) -> None:
    async def check(store: Any) -> None:
        made = await store.create(training())
        writes = [store.update_spec(scaled(made, n)) for n in (3, 4)]
        results = await asyncio.gather(*writes, return_exceptions=True)
        assert sorted(isinstance(r, Conflict) for r in results) == [False, True]

    on_store(check)


def test_status_and_events_are_one_write(on_store: Callable[..., None]) -> None:
    async def check(store: Any) -> None:
        old = await store.create(training())
        await store.update_status(old, Status(phase=Phase.PENDING), [event("One")])
        with pytest.raises(Conflict):
            await store.update_status(old, Status(phase=Phase.READY), [event("Two")])
        assert [e.reason for e in await store.events(old.key)] == ["One"]

    on_store(check)


def test_events_are_newest_first_since_is_honoured_and_repeats_are_counted(
    on_store: Callable[..., None],
) -> None:
    async def check(store: Any) -> None:
        made = await store.create(training())
        for reason, at in (("One", 1.0), ("Two", 2.0), ("Two", 3.0)):
            await store.record(made.key, event(reason, at))
        found = await store.events(made.key)
        assert [(e.reason, e.count) for e in found] == [("Two", 2), ("One", 1)]
        assert [e.reason for e in await store.events(made.key, since=1.5)] == ["Two"]

    on_store(check)


def test_removed_is_gone_with_its_events_and_the_name_is_free(
    on_store: Callable[..., None],
) -> None:
    async def check(store: Any) -> None:
        made = await store.create(training())
        await store.record(made.key, event("One"))
        await store.remove(made)
        await store.remove(made)
        with pytest.raises(NotFound):
            await store.get(made.key)
        again = await store.create(training(uid="new"))
        assert await store.events(again.key) == []

    on_store(check)


def test_a_record_with_the_same_name_is_not_removed_for_the_old_one(
    on_store: Callable[..., None],
) -> None:
    async def check(store: Any) -> None:
        old = await store.create(training())
        await store.remove(old)
        new = await store.create(training(uid="new"))
        await store.remove(old)
        assert (await store.get(new.key)).uid == new.uid

    on_store(check)


def test_a_watch_shows_every_change_from_any_version(on_store: Callable[..., None]) -> None:
    async def check(store: Any) -> None:
        start = await store.version()
        versions = []
        one = await store.create(training())
        versions.append(one.resource_version)
        for n in (3, 4, 2):
            one = await store.update_spec(scaled(one, n))
            versions.append(one.resource_version)
        for skip in range(len(versions)):
            after = start if skip == 0 else versions[skip - 1]
            found = await take(store.watch(after), len(versions) - skip)
            assert [c.version for c in found] == versions[skip:]
        assert [c.training.spec.world_size.target for c in found] == [2]

    on_store(check)


def test_a_watch_waits_for_changes_to_come_and_sees_the_removal(
    on_store: Callable[..., None],
) -> None:
    async def check(store: Any) -> None:
        one = await store.create(training())
        watch = asyncio.create_task(take(store.watch(one.resource_version, one.key), 2))
        await asyncio.sleep(0)
        await store.create(training("b"))
        two = await store.update_status(one, Status(phase=Phase.READY))
        await store.remove(two)
        first, last = await watch
        assert first.training.status.phase is Phase.READY
        assert (first.is_removed, last.is_removed) == (False, True)

    on_store(check)


def test_a_watch_from_a_version_that_never_was_is_gone(on_store: Callable[..., None]) -> None:
    async def check(store: Any) -> None:
        with pytest.raises(Gone):
            await take(store.watch(10**12), 1)

    on_store(check)


def test_the_code_of_a_training_can_be_read(
    on_store: Callable[..., None],
) -> None:
    async def check(store: Any) -> None:
        spec = TrainingSpec(
            name="a",
            source=Source(kind="script", content=b"print()", filename="a.py"),
            world_size=WorldSize(min=1, target=2, max=4),
        )
        made = await store.create(training(spec=spec))
        wider = await store.update_spec(scaled(made, 3))
        assert await store.source(wider) == b"print()"

    on_store(check)


def test_the_archive_of_a_training_can_be_read_until_nobody_has_it(
    on_store: Callable[..., None],
) -> None:
    async def check(store: Any) -> None:
        code = Code(content=b"an archive", size=10, unpacked=30, files=2)
        specs = [
            TrainingSpec(
                name=name, command=["x"], code=code, world_size=WorldSize(min=1, target=2, max=4)
            )
            for name in ("a", "b")
        ]
        one, two = [await store.create(training(spec.name, spec=spec)) for spec in specs]
        wider = await store.update_spec(scaled(one, 3))
        assert await store.code(wider) == await store.code(two) == b"an archive"
        await store.remove(wider)
        assert await store.code(two) == b"an archive"

    on_store(check)


async def take(changes: AsyncIterator[Any], count: int) -> list[Any]:
    found = []
    async with contextlib.aclosing(changes):  # type: ignore[type-var]
        async for change in changes:
            found.append(change)
            if len(found) == count:
                break
    return found


def test_attempts_are_stored_with_the_status_and_bounded(on_store: Callable[..., None]) -> None:
    def attempt(number: int, rank: int = 0) -> AttemptStatus:
        return AttemptStatus(rank=rank, attempt=number, started_at=1.0, ended_at=2.0, exit_code=1)

    async def check(store: Any) -> None:
        old = await store.create(training())
        assert list(await store.attempts(("default", "a"))) == []
        now = await store.update_status(old, Status(), [], [attempt(0), attempt(0, rank=2)])
        with pytest.raises(Conflict):
            await store.update_status(old, Status(message="late"), [], [attempt(1)])
        assert list(await store.attempts(("default", "a"))) == [attempt(0), attempt(0, rank=2)]
        for number in range(1, MAX_ATTEMPTS + 3):
            status = Status(message=str(number))
            now = await store.update_status(now, status, [], [attempt(number)])
        kept = await store.attempts(("default", "a"))
        assert [(a.rank, a.attempt) for a in kept] == [
            *((0, number) for number in range(3, MAX_ATTEMPTS + 3)),
            (2, 0),
        ]
        await store.remove(now)
        with pytest.raises(NotFound):
            await store.attempts(("default", "a"))
        await store.create(training(uid="another"))
        assert list(await store.attempts(("default", "a"))) == []

    on_store(check)
