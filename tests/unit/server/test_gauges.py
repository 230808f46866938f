"""The totals of `/metrics` follow every change."""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import Any

import pytest

from atoll.controller.informer import Informer
from atoll.core.phase import Phase
from atoll.core.ports import Change
from atoll.core.status import RankStatus, Status
from atoll.server.gauges import Gauges
from atoll.store.sqlite import MemoryStore
from tests.contract.test_store import training


def lines(gauges: Gauges, *words: Any) -> dict[str, float]:
    text = gauges.exposition(*words)[0].decode()
    pairs = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def test_totals_are_right_after_each_change_and_a_removal() -> None:
    async def check() -> None:
        store = MemoryStore()
        informer = Informer(store)
        gauges = Gauges(informer)
        first = await store.create(training("a"))
        following = asyncio.gather(informer.run(), gauges.follow())

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


def test_a_namespace_has_gauges_of_its_trainings_and_no_more_than_so_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("atoll.server.gauges.MAX_TRAININGS", 2)

    async def check() -> None:
        store = MemoryStore()
        informer = Informer(store)
        gauges = Gauges(informer)
        ranks = [RankStatus(rank=0, phase="Running", restarts=3)]
        for number, name in enumerate(["old", "over", "new", "newer"]):
            one = await store.create(training(name, created_at=float(number)))
            phase = Phase.FAILED if name == "over" else Phase.READY
            status = Status(phase=phase, ranks=ranks, stalled={0: 1.0} if name == "new" else {})
            await store.update_status(one, status)
        await store.create(training("secret", namespace="other"))
        following = asyncio.gather(informer.run(), gauges.follow())
        async with asyncio.timeout(30):
            while lines(gauges)['atoll_trainings{phase="ready"}'] != 3:  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert not [name for name in lines(gauges) if name.startswith("atoll_training_")]
        losses = {"uid-default-new": {"loss": float("nan")}, "uid-default-newer": {"loss": 2.5}}
        own = lines(gauges, "default", lambda uid: losses.get(uid, {}), 10.0)
        assert not [name for name in own if "secret" in name or '"over"' in name]
        assert own["atoll_trainings_without_gauges"] == 1
        labels = '{namespace="default",training="new"}'
        assert own[f"atoll_training_ready{labels}"] == 1
        assert own[f"atoll_training_ranks_stalled{labels}"] == 1
        assert own[f"atoll_training_restarts{labels}"] == 3
        assert own[f"atoll_training_age_seconds{labels}"] == 8
        assert str(own[f"atoll_training_loss{labels}"]) == "nan"
        assert own['atoll_training_loss{namespace="default",training="newer"}'] == 2.5
        assert not [name for name in own if name.startswith("atoll_training_round{")]
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following

    asyncio.run(check())


def test_restarts_are_counted_since_the_start_and_ended_trainings_by_their_phase() -> None:
    def restarted(times: int, **more: Any) -> Status:
        return Status(ranks=[RankStatus(rank=0, restarts=times, phase="Running")], **more)

    async def check() -> None:
        store = MemoryStore()
        informer = Informer(store)
        gauges = Gauges(informer)
        one = await store.update_status(await store.create(training("a")), restarted(5))
        old = await store.create(training("old"))
        await store.update_status(old, restarted(9, phase=Phase.FAILED, is_released=True))
        following = asyncio.gather(informer.run(), gauges.follow())

        async def until(name: str, value: float) -> None:
            async with asyncio.timeout(30):
                while lines(gauges)[name] != value:  # noqa: ASYNC110
                    await asyncio.sleep(0)

        await until('atoll_trainings{phase="new"}', 1)
        assert lines(gauges)["atoll_rank_restarts_total"] == 0
        assert lines(gauges)['atoll_trainings{phase="failed"}'] == 1
        one = await store.update_status(one, restarted(7))
        await until("atoll_rank_restarts_total", 2)
        await store.update_status(one, restarted(8, phase=Phase.FAILED, is_released=True))
        await until('atoll_trainings{phase="failed"}', 2)
        await until("atoll_rank_restarts_total", 3)
        assert lines(gauges)['atoll_ranks{phase="Running"}'] == 0
        await store.remove(await store.get(old.key))
        await until('atoll_trainings{phase="failed"}', 1)
        assert lines(gauges)["atoll_rank_restarts_total"] == 3
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(check())


def test_trainings_come_and_go_while_a_thread_writes_the_gauges() -> None:
    """A scrape is written in a thread, and the counts are kept by the event loop."""
    informer, trouble = Informer(MemoryStore()), list[BaseException]()
    gauges = Gauges(informer)
    own = [training(f"t{n}") for n in range(300)]
    for each in own:
        informer._note(Change(version=1, training=each))
    is_over = threading.Event()

    def scrape() -> None:
        try:
            while not is_over.is_set():
                gauges.exposition(own[0].namespace)
        except BaseException as error:
            trouble.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=scrape)
    try:
        thread.start()
        for n in range(3000):
            informer._note(Change(version=n, training=own[n % 300], is_removed=n % 2 == 0))
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not trouble
