"""Series of the operator: copied beside the training, read by the next leader, bounded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from atoll.core.status import Training
from atoll.operator import keep
from atoll.operator.keep import SeriesCopies
from atoll.rank.figures import Teller, batch_of
from atoll.series.fold import COUNT
from atoll.series.keep import SeriesKeeper
from atoll.store.memory import MemoryStore
from tests.unit.kubernetes.kube import training as of_cluster
from tests.unit.operator.cluster import Objects


def batch(n: int, life: str = "a") -> bytes:
    return batch_of(Teller(0, 1, 0, life), n, {"loss": [[float(n), n, 0.5]]}, 0)


def points(keeper: SeriesKeeper, uid: str) -> int:
    return int(sum(sum(one.series.columns[COUNT]) for one in keeper.series(uid)))


class Life:
    """One operator, with a file of its own."""

    def __init__(self, cluster: Any, folder: Path, copy_bytes: int = 2**18) -> None:
        self.keeper = SeriesKeeper(folder)
        self.copies = SeriesCopies(cluster, self.keeper, None, copy_bytes)


async def led(life: Life, store: MemoryStore, lines: list[bytes], uid: str) -> None:
    """Leads, takes these, and gives the lead back."""
    await life.copies.restore()
    running = asyncio.create_task(life.copies.run(store))
    async with asyncio.timeout(30):
        while not life.copies._trainings:  # noqa: ASYNC110
            await asyncio.sleep(0)
    life.keeper.take(uid, lines)
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()


async def stored(store: MemoryStore) -> Training:
    return await store.create(of_cluster())


def test_the_next_leader_goes_on_and_what_comes_twice_counts_once(tmp_path: Path) -> None:
    async def story() -> None:
        cluster, store = Objects(), MemoryStore()
        uid = (await stored(store)).uid
        first, second = Life(cluster, tmp_path / "1"), Life(cluster, tmp_path / "2")
        await led(first, store, [batch(1), batch(2)], uid)
        await led(second, store, [batch(2), batch(3)], uid)
        assert points(second.keeper, uid) == 3
        assert second.keeper.missed(uid) == 0

    asyncio.run(story())


def test_what_a_killed_leader_had_not_copied_is_counted(tmp_path: Path) -> None:
    async def story() -> None:
        cluster, store = Objects(), MemoryStore()
        uid = (await stored(store)).uid
        first, second = Life(cluster, tmp_path / "1"), Life(cluster, tmp_path / "2")
        await led(first, store, [batch(1)], uid)
        first.keeper.take(uid, [batch(2), batch(3)])  # and it is gone
        await led(second, store, [batch(4)], uid)
        assert (points(second.keeper, uid), second.keeper.missed(uid)) == (2, 2)
        third = Life(cluster, tmp_path / "3")
        await led(third, store, [batch(5)], uid)
        assert third.keeper.missed(uid) == 2, "and stays counted"

    asyncio.run(story())


def test_a_leader_that_comes_back_keeps_its_file_where_it_is_as_new(tmp_path: Path) -> None:
    async def story() -> None:
        cluster, store = Objects(), MemoryStore()
        uid = (await stored(store)).uid
        first = Life(cluster, tmp_path / "1")
        await led(first, store, [batch(1)], uid)
        first.keeper.take(uid, [batch(2)])  # killed; its container starts again
        again = Life(cluster, tmp_path / "1")
        await led(again, store, [batch(3)], uid)
        assert (points(again.keeper, uid), again.keeper.missed(uid)) == (3, 0)

    asyncio.run(story())


def test_a_copy_belongs_to_its_training_and_fits_an_object(tmp_path: Path) -> None:
    async def story() -> None:
        cluster, store = Objects(), MemoryStore()
        training = await stored(store)
        life = Life(cluster, tmp_path / "1", copy_bytes=4096)
        names = {f"n{at}": [[float(n), n, 0.1 * n] for n in range(500)] for at in range(50)}
        await led(life, store, [batch_of(Teller(0, 1, 0, "a"), 1, names, 0)], training.uid)
        ((key, copy),) = [(k, body) for k, body in cluster.kept.items() if k[0] == "configmaps"]
        assert key[1] == "team-a"
        (owner,) = copy["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == ("Training", training.uid)
        assert len(copy["binaryData"]["series"]) < 4096 * 4 / 3 + 200
        other = Life(cluster, tmp_path / "2")
        await other.copies.restore()
        assert points(other.keeper, training.uid) + other.keeper.skipped(training.uid) == 25_000
        assert other.keeper.skipped(training.uid) > 0

    asyncio.run(story())


def test_nothing_new_is_not_copied_and_a_broken_copy_hides_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        cluster, store = Objects(), MemoryStore()
        training = await stored(store)
        await led(Life(cluster, tmp_path / "1"), store, [batch(1)], training.uid)
        broken = keep.render_copy(training, b"none")
        broken["metadata"] |= {"namespace": "team-a", "name": "another"}
        cluster.put("configmaps", broken)
        second = Life(cluster, tmp_path / "2")
        writes = len(cluster.writes)
        await led(second, store, [], training.uid)
        assert points(second.keeper, training.uid) == 1
        assert len(cluster.writes) == writes
        assert "not a copy" in caplog.text

    asyncio.run(story())


def test_without_room_nothing_is_copied(tmp_path: Path) -> None:
    async def story() -> None:
        cluster, store = Objects(), MemoryStore()
        training = await stored(store)
        life = Life(cluster, tmp_path / "1", copy_bytes=0)
        life.keeper.take(training.uid, [batch(1)])
        await life.copies.run(store)
        await life.copies.restore()
        assert (cluster.writes, points(life.keeper, training.uid)) == ([], 1)

    asyncio.run(story())
