"""The totals of `/metrics` follow every change."""

from __future__ import annotations

import asyncio

import pytest

from atoll.core.phase import Phase
from atoll.core.status import RankStatus, Status
from atoll.server.gauges import Gauges
from atoll.store.memory import MemoryStore
from tests.contract.test_store import training


def lines(gauges: Gauges) -> dict[str, float]:
    text = gauges.exposition()[0].decode()
    pairs = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def test_totals_are_right_after_each_change_and_a_removal() -> None:
    async def check() -> None:
        store, gauges = MemoryStore(), Gauges()
        first = await store.create(training("a"))
        following = asyncio.create_task(gauges.follow(store))

        async def until(name: str, value: float) -> None:
            async with asyncio.timeout(30):
                while lines(gauges)[name] != value:  # noqa: ASYNC110
                    await asyncio.sleep(0)

        await until('atoll_trainings{phase="new"}', 1)
        ranks = [RankStatus(rank=rank, phase="Running") for rank in range(3)]
        first = await store.update_status(first, Status(phase=Phase.READY, ranks=ranks))
        await until('atoll_trainings{phase="ready"}', 1)
        assert lines(gauges)['atoll_trainings{phase="new"}'] == 0
        assert lines(gauges)['atoll_ranks{phase="Running"}'] == 3
        second = await store.create(training("b"))
        await store.update_status(second, Status(phase=Phase.READY, ranks=ranks[:1]))
        await until('atoll_ranks{phase="Running"}', 4)
        await store.remove(first)
        await until('atoll_ranks{phase="Running"}', 1)
        assert lines(gauges)['atoll_trainings{phase="ready"}'] == 1
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following

    asyncio.run(check())
