"""Pods that no longer exist, against a cluster that remembers its past for a while."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import Gone
from atoll.core.status import RankStatus, Status
from atoll.kubernetes.client import ObjectList, WatchEvent
from atoll.kubernetes.gone import PODS_READ, STEP_GROWTH, Departed, Past, PodMemory
from atoll.kubernetes.names import UID
from tests.unit.kubernetes.kube import MADE, Json, ended, pod, running, training

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

    async def list(
        self, kind: str, namespace: str | None, *, labels: str, version: str = ""
    ) -> ObjectList:
        self.requests += 1
        at = int(version or self.now)
        if at < self.oldest:
            raise Gone(0, 0)
        states = (self._at(name, at) for name in self.past)
        return ObjectList([state for state in states if state is not None], str(at))

    def _at(self, name: str, version: int) -> Json | None:
        written = [at for at in self.past[name] if at <= version]
        return self.past[name][max(written)] if written else None


def manifest(name: str, *, code: int | None = None, version: int = 0) -> Json:
    state, phase = (running(), "Running") if code is None else (ended(code), "Failed")
    made = pod(0, state, phase=phase)
    made["metadata"] |= {
        "name": name,
        "resourceVersion": str(version),
        "labels": {UID: training().uid},
    }
    return made


def live(cluster: Remembering, name: str, made: int, over: int, gone: int, code: int) -> None:
    """Running from `made`, ended at `over`, deleted at `gone`."""
    cluster.write(name, made, manifest(name, version=made))
    cluster.write(name, over, manifest(name, code=code, version=over))
    cluster.write(name, gone, None)


def codes(states: dict[str, Json]) -> dict[str, int | None]:
    return {
        name: (s["status"]["containerStatuses"][0]["state"].get("terminated") or {}).get("exitCode")
        for name, s in states.items()
    }


def search(cluster: Any, *names: str) -> dict[str, Json]:
    return asyncio.run(Past(cluster, SPACE, "").last_states(names))


def test_the_end_of_a_pod_that_is_gone_is_found_in_the_past() -> None:
    cluster = Remembering(now=10_000, oldest=4_000)
    live(cluster, "a", made=500, over=9_000, gone=9_001, code=7)
    live(cluster, "b", made=500, over=6_000, gone=6_003, code=8)
    live(cluster, "c", made=500, over=3_000, gone=3_003, code=9)  # too long ago
    cluster.write("d", 700, manifest("d"))  # it is there
    assert codes(search(cluster, "a", "b", "c", "d", "e")) == {"a": 7, "b": 8}


@given(st.data())
def test_a_pod_is_found_if_it_lived_a_quarter_as_long_as_it_is_gone(data: st.DataObject) -> None:
    now = data.draw(st.integers(100, 10**8))
    cluster = Remembering(now, oldest=data.draw(st.integers(1, now)))
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
    assert cluster.requests <= 100 + 40 * len(expected)


def alive(name: str) -> RankStatus:
    return RankStatus(rank=0, attempt=int(MADE), started_at=MADE + 5, pod_name=name)


def ask(memory: PodMemory, there: list[Json], *ranks: RankStatus) -> Departed:
    given = training(status=Status(ranks=list(ranks)))
    return asyncio.run(memory.departed(given, there, SPACE))


def test_a_pod_that_was_watched_until_its_end_costs_no_request() -> None:
    cluster: Any = Remembering(now=100)
    memory = PodMemory(cluster)
    assert ask(memory, [manifest("a", version=1)], alive("a")) == Departed()
    asked = cluster.requests
    memory.note(manifest("a", code=7, version=3))
    memory.see(manifest("a", version=2))  # from a list that was on its way
    assert codes({"a": ask(memory, [], alive("a")).manifests[0]}) == {"a": 7}
    assert cluster.requests == asked


def test_what_is_stored_is_forgotten() -> None:
    cluster: Any = Remembering(now=100)
    memory = PodMemory(cluster)
    memory.see(manifest("a", code=7))
    stored = RankStatus(rank=0, attempt=int(MADE) + 1, started_at=MADE + 5, pod_name="b")
    there = [manifest("b")]
    assert ask(memory, there, stored) == Departed()
    assert ask(memory, there) == Departed()


def test_a_pod_that_nobody_saw_end_is_looked_for_once() -> None:
    cluster: Any = Remembering(now=100, oldest=90)
    memory = PodMemory(cluster)
    assert ask(memory, [], alive("a")) == Departed([], frozenset({"a"}))
    asked = cluster.requests
    assert ask(memory, [], alive("a")) == Departed([], frozenset({"a"}))
    assert cluster.requests == asked > 0


def test_a_pod_that_the_mirror_does_not_show_yet_is_not_gone() -> None:
    cluster: Any = Remembering(now=100)
    cluster.write("a", 50, manifest("a"))
    memory = PodMemory(cluster)
    assert ask(memory, [], alive("a")) == Departed()


def test_a_pod_last_seen_running_ended_as_the_past_says() -> None:
    cluster: Any = Remembering(now=100)
    live(cluster, "a", made=50, over=90, gone=95, code=7)
    memory = PodMemory(cluster)
    assert ask(memory, [manifest("a", version=50)], alive("a")) == Departed()
    assert codes({"a": ask(memory, [], alive("a")).manifests[0]}) == {"a": 7}


def test_trainings_that_are_gone_are_forgotten() -> None:
    memory = PodMemory(Remembering(now=100))  # type: ignore[arg-type]
    memory.see(manifest("a", code=7))

    async def known() -> set[str]:
        return set()

    asyncio.run(memory.sweep(known))
    assert ask(memory, []) == Departed()


def test_an_operator_that_starts_reads_the_ends_of_pods_that_no_status_names() -> None:
    cluster: Any = Remembering(now=100_000, oldest_watched=60_000)
    live(cluster, "short", made=70_000, over=70_001, gone=70_002, code=7)
    live(cluster, "long", made=30_000, over=59_000, gone=59_001, code=8)  # before what is watched
    cluster.write("b", 99_000, manifest("b", version=99_000))
    memory = PodMemory(cluster)
    departed = ask(memory, [manifest("b", version=99_000)])
    assert codes({m["metadata"]["name"]: m for m in departed.manifests}) == {"short": 7, "long": 8}
    asked = cluster.requests
    assert len(ask(memory, [manifest("b", version=99_000)]).manifests) == 2
    assert cluster.requests == asked


def test_what_happened_while_the_watch_was_interrupted_is_read_from_where_it_stopped() -> None:
    cluster: Any = Remembering(now=1_000)
    cluster.write("b", 900, manifest("b", version=900))
    there = [manifest("b", version=900)]
    memory = PodMemory(cluster)
    assert ask(memory, there) == Departed()
    cluster.now = 2_000
    live(cluster, "a", made=1_100, over=1_101, gone=1_102, code=7)
    memory.miss()
    asked = cluster.requests
    assert codes({"a": ask(memory, there).manifests[0]}) == {"a": 7}
    assert cluster.requests - asked <= 3


def test_the_past_of_a_training_that_has_no_pods_yet_is_not_read() -> None:
    cluster: Any = Remembering(now=1_000)
    assert ask(PodMemory(cluster), []) == Departed()
    assert cluster.requests == 0


def test_a_large_past_is_read_in_part() -> None:
    cluster: Any = Remembering(now=10**9, oldest_watched=10**9)
    for number in range(500):
        cluster.write(str(number), 1, manifest(str(number), version=1))
    memory = PodMemory(cluster)
    assert ask(memory, [manifest("0", version=1)]) == Departed()
    assert cluster.requests <= 60 + PODS_READ / 500
