"""What a page and a change cost in SQLite's own steps: the same however much is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from atoll.core.phase import Phase
from atoll.core.status import Status
from atoll.store.sqlite import SQLiteStore
from tests.contract.test_store import scaled, training

FEW, MANY = 10, 1000


@contextmanager
def counted(store: SQLiteStore) -> Iterator[list[int]]:
    """The steps that SQLite's virtual machine takes meanwhile."""
    steps = [0]

    def step() -> None:
        steps[0] += 1

    store._db.set_progress_handler(step, 1)
    try:
        yield steps
    finally:
        store._db.set_progress_handler(None, 1)


async def filled(store: SQLiteStore, count: int) -> None:
    """In two namespaces; one training in ten is ready, the first of them last in the names."""
    store._db.execute("pragma synchronous = off")
    for number in range(count):
        for namespace in ("default", "other"):
            one = await store.create(training(f"t{number:05}", namespace))
            phase = Phase.READY if number % 10 == 9 else Phase.SUCCEEDED
            await store.update_status(one, Status(phase=phase))


async def first_page(store: SQLiteStore, count: int) -> None:
    assert len((await store.page("default", limit=5)).items) == 5


async def last_page(store: SQLiteStore, count: int) -> None:
    before = f"t{count - 2:05}"
    assert len((await store.page("default", after=before, limit=5)).items) == 1


async def by_phase(store: SQLiteStore, count: int) -> None:
    assert len((await store.page("default", limit=1, phase="ready")).items) == 1


async def by_missing_phase(store: SQLiteStore, count: int) -> None:
    assert (await store.page("default", limit=5, phase="failed")).items == []


async def by_prefix(store: SQLiteStore, count: int) -> None:
    assert len((await store.page("default", limit=5, prefix="t00003")).items) == 1


async def by_phase_and_prefix(store: SQLiteStore, count: int) -> None:
    page = await store.page("default", limit=5, prefix="t0000", phase="ready")
    assert [t.name for t in page.items] == ["t00009"]


async def one_change(store: SQLiteStore, count: int) -> None:
    one = await store.get(("default", "t00009"))
    wider = await store.update_spec(scaled(one, 1 if one.spec.world_size.target > 1 else 3))
    await store.update_status(wider, replace(wider.status, message=str(wider.generation)))


WORK: list[Callable[[SQLiteStore, int], Any]] = [
    first_page,
    last_page,
    by_phase,
    by_missing_phase,
    by_prefix,
    by_phase_and_prefix,
    one_change,
]


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SQLiteStore, SQLiteStore]]:
    few, many = (SQLiteStore(tmp_path_factory.mktemp("db") / "a.db") for _ in range(2))
    asyncio.run(filled(few, FEW))
    asyncio.run(filled(many, MANY))
    yield few, many
    few.close()
    many.close()


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_the_cost_does_not_grow_with_what_is_stored(
    stores: tuple[SQLiteStore, SQLiteStore], work: Callable[[SQLiteStore, int], Any]
) -> None:
    taken = []
    for store, count in zip(stores, (FEW, MANY), strict=True):
        with counted(store) as steps:
            asyncio.run(work(store, count))
        taken.append(steps[0])
    few, many = taken
    assert 0 < many <= 1.5 * few


def test_every_page_is_read_by_an_index(stores: tuple[SQLiteStore, SQLiteStore]) -> None:
    seen: list[str] = []
    store = stores[0]
    store._db.set_trace_callback(seen.append)
    for phase in (None, "ready"):
        for prefix in ("", "t"):
            asyncio.run(store.page("default", phase=phase, prefix=prefix, limit=1))
    store._db.set_trace_callback(None)
    queries = [query for query in seen if query.startswith("select version, body")]
    assert len(queries) == 4
    for query in queries:
        plan = " ".join(str(row[3]) for row in store._db.execute(f"explain query plan {query}"))
        assert "USING INDEX" in plan
        assert "SCAN" not in plan
        assert "TEMP B-TREE" not in plan
