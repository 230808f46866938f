"""Pods that no longer exist, against a cluster that remembers its past for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from atoll.backends.kubernetes.client import ObjectList, WatchEvent
from atoll.backends.kubernetes.deleted_pods import STEP_GROWTH, DeletedPods, DeletedState, Search
from atoll.backends.kubernetes.names import UID
from atoll.backends.kubernetes.pod import Pod
from atoll.core.errors import Gone, Temporary
from atoll.core.ports import Key
from atoll.core.status import RankStatus, Status
from tests.unit.backends.kubernetes.kube import MADE, Json, ended, pod, running, training

SPACE = "team-a"


class Remembering:
    """Every state of every pod, by the version it was written at; None when it was deleted."""

    def __init__(self, now: int, oldest: int = 1, oldest_watched: int = 1) -> None:
        self.now = now
        self.oldest = oldest
        self.oldest_watched = oldest_watched
        self.past: dict[str, dict[int, Json | None]] = {}
        self.requests = 0

    def write(self, name: str, version: int, state: Json | None) -> None:
        self.past.setdefault(name, {})[version] = state

    async def watch(
        self, kind: str, namespace: str | None, *, after: str, labels: str, seconds: int
    ) -> AsyncIterator[WatchEvent]:
        self.requests += 1
        if int(after) < self.oldest_watched:
            raise Gone(0, 0)
        changes = [(at, name) for name, states in self.past.items() for at in states]
        for at, name in sorted(changes):
            if at > int(after):
                state = self.past[name][at]
                if state is not None:
                    yield WatchEvent("MODIFIED", state)
                    continue
                last = self._at(name, at - 1)
                assert last is not None
                metadata = {**last["metadata"], "resourceVersion": str(at)}
                yield WatchEvent("DELETED", {**last, "metadata": metadata})

    async def pages(
        self, kind: str, namespace: str | None, *, labels: str, version: str = ""
    ) -> AsyncIterator[ObjectList]:
        self.requests += 1
        at = int(version or self.now)
        if at < self.oldest:
            raise Gone(0, 0)
        states = [state for name in self.past if (state := self._at(name, at)) is not None]
        for first in range(0, max(len(states), 1), 2):  # a page has two
            yield ObjectList(states[first : first + 2], str(at))

    def _at(self, name: str, version: int) -> Json | None:
        written = [at for at in self.past[name] if at <= version]
        return self.past[name][max(written)] if written else None


def manifest(name: str, *, code: int | None = None, version: int = 0, rank: int = 0) -> Json:
    state, phase = (running(), "Running") if code is None else (ended(code), "Failed")
    made = pod(rank, state, phase=phase)
    made["metadata"] |= {
        "name": name,
        "uid": f"uid-{name}",
        "resourceVersion": str(version),
        "labels": {UID: training().uid},
    }
    return made


def live(cluster: Remembering, name: str, made: int, over: int, gone: int, code: int) -> None:
    """Running from `made`, ended at `over`, deleted at `gone`."""
    cluster.write(name, made, manifest(name, version=made))
    cluster.write(name, over, manifest(name, code=code, version=over))
    cluster.write(name, gone, None)


def codes(states: dict[str, Pod]) -> dict[str, int | None]:
    return {
        name: (pod.state.get("terminated") or {}).get("exitCode") for name, pod in states.items()
    }


def search(cluster: Any, *targets: str | int) -> dict[str, Pod]:
    found = Search(cluster, SPACE, "", targets)
    asyncio.run(found.run())
    return found.states


def test_the_end_of_a_pod_that_is_gone_is_found_in_the_past() -> None:
    cluster = Remembering(now=10_000, oldest=4_000, oldest_watched=10_001)
    live(cluster, "a", made=500, over=9_000, gone=9_001, code=7)
    live(cluster, "b", made=500, over=6_000, gone=6_003, code=8)
    live(cluster, "c", made=500, over=3_000, gone=3_003, code=9)  # too long ago
    cluster.write("d", 700, manifest("d"))  # it is there
    assert codes(search(cluster, "a", "b", "c", "d", "e")) == {"a": 7, "b": 8}


def test_what_a_watch_of_the_past_brings_needs_no_lists_of_it() -> None:
    cluster = Remembering(now=10_000, oldest_watched=9_990)
    live(cluster, "a", made=9_991, over=9_992, gone=9_993, code=7)
    assert codes(search(cluster, "a")) == {"a": 7}
    before = cluster.requests
    cluster.oldest = 10_000  # no list is left
    assert codes(search(cluster, "a")) == {"a": 7}
    assert cluster.requests == 2 * before


@given(st.data())
def test_a_pod_is_found_if_it_lived_a_quarter_as_long_as_it_is_gone(data: st.DataObject) -> None:
    now = data.draw(st.integers(100, 10**8))
    cluster = Remembering(now, data.draw(st.integers(1, now)), oldest_watched=now + 1)
    expected = {}
    for number in range(data.draw(st.integers(1, 4))):
        made = data.draw(st.integers(1, now - 8))
        gone = data.draw(st.integers(made + 2, now))
        over = data.draw(st.integers(made + 1, gone - 1))
        lived, away = gone - made, now - gone + 8
        is_long = lived > away * (STEP_GROWTH - 1) + 2 or made <= cluster.oldest
        if over >= cluster.oldest and is_long:
            live(cluster, str(number), made, over, gone, code=number)
            expected[str(number)] = number
    assert codes(search(cluster, *expected)) == expected
    assert cluster.requests <= 160 + 40 * len(expected)


def alive(name: str) -> RankStatus:
    return RankStatus(rank=0, attempt=int(MADE), started_at=MADE + 5, pod_name=name)


class Looking:
    """Looks at one training, and again when the past was read."""

    def __init__(self, cluster: Any) -> None:
        self.news: asyncio.Queue[Key] = asyncio.Queue()
        self.pods = DeletedPods(cluster, SPACE, self.news.put_nowait)

    def look(
        self, there: Collection[Json], *ranks: RankStatus, failed: Collection[int] = ()
    ) -> DeletedState:
        given = training(status=Status(ranks=list(ranks)))
        return self.pods.deleted(given, map(Pod, there), failed)

    async def told(self) -> None:
        async with asyncio.timeout(30):
            assert await self.news.get() == training().key


def test_a_pod_that_was_watched_until_its_end_costs_no_request() -> None:
    async def test() -> None:
        cluster = Remembering(now=100)
        looking = Looking(cluster)
        assert looking.look([manifest("a", version=1)], alive("a")) == DeletedState()
        looking.pods.note(Pod(manifest("a", code=7, version=3)), is_final=True)
        assert codes({"a": looking.look([], alive("a")).pods[0]}) == {"a": 7}
        looking.pods.note(Pod(manifest("a", version=2)), is_final=False)  # from an older list
        assert codes({"a": looking.look([], alive("a")).pods[0]}) == {"a": 7}
        assert cluster.requests == 0

    asyncio.run(test())


def test_a_pod_that_was_cut_off_while_it_ran_is_not_looked_for() -> None:
    async def test() -> None:
        cluster = Remembering(now=100)
        looking = Looking(cluster)
        looking.pods.note(Pod(manifest("a", version=3)), is_final=True)
        assert looking.look([], alive("a")) == DeletedState(unknown=frozenset({"a"}))
        assert cluster.requests == 0

    asyncio.run(test())


def test_what_is_stored_is_forgotten() -> None:
    async def test() -> None:
        looking = Looking(Remembering(now=100))
        looking.pods.note(Pod(manifest("a", code=7)), is_final=True)
        stored = RankStatus(rank=0, attempt=int(MADE) + 1, started_at=MADE + 5, pod_name="b")
        there = [manifest("b")]
        assert looking.look(there, stored) == DeletedState()
        assert looking.look(there) == DeletedState()

    asyncio.run(test())


def test_nothing_waits_for_the_past_and_what_it_does_not_tell_is_looked_for_once() -> None:
    async def test() -> None:
        cluster = Remembering(now=100, oldest=90)
        looking = Looking(cluster)
        assert looking.look([], alive("a")) == DeletedState(searching=frozenset({"a"}))
        assert looking.look([], alive("a")) == DeletedState(searching=frozenset({"a"}))
        await looking.told()
        asked = cluster.requests
        assert looking.look([], alive("a")) == DeletedState(unknown=frozenset({"a"}))
        assert cluster.requests == asked > 0

    asyncio.run(test())


def test_the_past_of_a_training_whose_pods_are_there_is_not_read() -> None:
    """However large the cluster is, an operator that starts has nothing to wait for."""

    async def test() -> None:
        cluster = Remembering(now=1_000)
        looking = Looking(cluster)
        assert looking.look([]) == DeletedState()
        assert looking.look([manifest("a", version=3)], alive("a")) == DeletedState()
        assert cluster.requests == 0

    asyncio.run(test())


def test_a_pod_that_the_mirror_does_not_show_yet_is_not_gone() -> None:
    async def test() -> None:
        cluster = Remembering(now=100)
        cluster.write("a", 50, manifest("a"))
        looking = Looking(cluster)
        for _ in range(2):
            assert looking.look([], alive("a")) == DeletedState(searching=frozenset({"a"}))
            await looking.told()

    asyncio.run(test())


def test_a_pod_last_seen_running_ended_as_the_past_says() -> None:
    async def test() -> None:
        cluster = Remembering(now=100)
        live(cluster, "a", made=50, over=90, gone=95, code=7)
        looking = Looking(cluster)
        looking.pods.note(Pod(manifest("a", version=50)), is_final=False)  # a later list lacks it
        assert looking.look([], alive("a")) == DeletedState(searching=frozenset({"a"}))
        await looking.told()
        assert codes({"a": looking.look([], alive("a")).pods[0]}) == {"a": 7}

    asyncio.run(test())


def test_attempts_that_no_status_names_are_read_with_the_one_before_them() -> None:
    async def test() -> None:
        cluster = Remembering(now=1_000, oldest_watched=500)
        live(cluster, "a", made=600, over=700, gone=701, code=7)
        live(cluster, "b", made=710, over=800, gone=801, code=8)
        cluster.write("c", 900, manifest("c", version=900))
        looking = Looking(cluster)
        there = [manifest("c", version=900)]
        assert looking.look(there, alive("a")) == DeletedState(searching=frozenset({"a"}))
        await looking.told()
        found = looking.look(there, alive("a")).pods
        assert codes({pod.name: pod for pod in found}) == {"a": 7, "b": 8}

    asyncio.run(test())


def test_how_a_rank_failed_that_only_the_job_knows_of_is_read() -> None:
    """As for a process that attaches to a launch whose pods are gone."""

    async def test() -> None:
        cluster = Remembering(now=1_000, oldest_watched=990)
        cluster.write("a", 700, manifest("a", code=7, version=700, rank=1))
        cluster.write("a", 900, None)
        looking = Looking(cluster)
        assert looking.look([], failed={1, 2}) == DeletedState(searching_ranks=frozenset({1, 2}))
        await looking.told()
        deleted = looking.look([], failed={1, 2})
        assert codes({pod.name: pod for pod in deleted.pods}) == {"a": 7}
        assert deleted.searching_ranks == frozenset()

    asyncio.run(test())


def test_a_past_that_could_not_be_read_is_read_again() -> None:
    class Flaky(Remembering):
        async def pages(self, *words: Any, **more: Any) -> AsyncIterator[ObjectList]:
            if self.requests == 0:
                self.requests += 1
                raise Temporary("the API server is away")
            async for page in super().pages(*words, **more):
                yield page

    async def test() -> None:
        cluster = Flaky(now=100)
        live(cluster, "a", made=50, over=90, gone=95, code=7)
        looking = Looking(cluster)
        async with asyncio.timeout(30):
            while looking.news.empty():
                assert looking.look([], alive("a")).searching == {"a"}
                await asyncio.sleep(0)
        assert codes({"a": looking.look([], alive("a")).pods[0]}) == {"a": 7}

    asyncio.run(test())


def test_trainings_that_are_gone_are_forgotten() -> None:
    async def known() -> set[str]:
        return set()

    async def test() -> None:
        looking = Looking(Remembering(now=100))
        looking.pods.note(Pod(manifest("a", code=7)), is_final=True)
        await looking.pods.sweep(known)
        assert looking.look([]) == DeletedState()

    asyncio.run(test())
