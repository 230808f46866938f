"""Pods that no longer exist: how they ended, from what was seen of them or from the cluster's past.

No pod waits for a controller before it leaves, so a node can be drained while none runs. A watch
brings the last state of every pod that is deleted. Of those that were deleted while nobody watched,
the API server still knows: for a minute or more, a watch that starts at an earlier version brings
them all; until etcd is compacted (every five minutes, unless set otherwise), a list shows what
there was at an earlier version. After that the exit is unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

from atoll.core.errors import Denied, Gone, Permanent
from atoll.core.status import RankStatus, Training
from atoll.kubernetes.client import Cluster
from atoll.kubernetes.names import SELECTOR, UID
from atoll.kubernetes.pod import Pod

Json = dict[str, Any]
log = logging.getLogger(__name__)

FIRST_STEP, STEP_GROWTH, STEPS = 4, 1.25, 100  # in versions before now
WATCHED = 2**20  # versions before now; an API server keeps the last 100,000 changes of pods at most
PODS_READ, LIST_COST = 20_000, 50  # from lists of the past; a list costs as much as so many pods


class Departed(NamedTuple):
    """The pods of a gang that are gone: as they last were, and by name those nobody knows of."""

    manifests: list[Json] = []
    unread: frozenset[str] = frozenset()


class PodMemory:
    """Pods as they were last seen, by training and name. `scope` is the namespace of all."""

    def __init__(self, cluster: Cluster, scope: str | None = None) -> None:
        self._cluster = cluster
        self._scope = scope
        self._read_to = 0  # the version up to which every pod was seen
        self._is_complete = False
        self._recalling = asyncio.Lock()
        self._pods: dict[str, dict[str, Json]] = {}
        self._unread: dict[str, set[str]] = {}  # what was looked for in vain, by training

    def see(self, manifest: Json) -> None:
        uid = str((manifest["metadata"].get("labels") or {}).get(UID, ""))
        by_name = self._pods.setdefault(uid, {})
        before = by_name.get(manifest["metadata"]["name"])
        if before is None or _version(before) <= _version(manifest):
            by_name[manifest["metadata"]["name"]] = manifest

    def note(self, manifest: Json) -> None:
        """A change that the watch brings: it brings every one, in order."""
        self.see(manifest)
        if self._is_complete:
            self._read_to = max(self._read_to, _version(manifest))

    def miss(self) -> None:
        """The watch starts anew, and pods may have left that it did not show."""
        self._is_complete = False

    async def _recall(self) -> None:
        """Sees every pod that left while nobody watched, as far as the cluster remembers."""
        async with self._recalling:
            if self._is_complete:
                return
            self._is_complete = True  # unless something is missed meanwhile
            past = Past(self._cluster, self._scope, SELECTOR)
            try:
                states, self._read_to = await past.everything(self._read_to)
            except (Denied, Permanent) as error:
                log.warning("cannot read how pods ended that are gone: %s", error)
                return
            except BaseException:
                self._is_complete = False
                raise
            for manifest in states.values():
                self.see(manifest)

    def forget(self, uid: str) -> None:
        self._pods.pop(uid, None)
        self._unread.pop(uid, None)

    async def sweep(self, known: Callable[[], Awaitable[set[str]]]) -> None:
        """Trainings that no longer exist are forgotten."""
        uids = set(self._pods)
        if uids:
            for uid in uids - await known():
                self.forget(uid)

    async def departed(self, training: Training, there: Iterable[Json], namespace: str) -> Departed:
        """The pods that are gone, and whose exits are not stored. `there` are those that exist."""
        uid = training.uid
        names = set()
        for manifest in there:
            self.see(manifest)
            names.add(manifest["metadata"]["name"])
        ranks = {r.rank: r for r in (*training.status.ranks, *training.status.retired)}
        if names or training.status.has_run:
            await self._recall()
        by_name = self._pods.get(uid, {})
        gone = {name: Pod(by_name[name]) for name in by_name.keys() - names}
        for name in [name for name, pod in gone.items() if is_stored(pod, ranks.get(pod.rank))]:
            del by_name[name], gone[name]
        running = {r.pod_name for r in ranks.values() if r.is_alive and r.pod_name}
        vague = (running - names - gone.keys()) | {
            name for name, pod in gone.items() if pod.rank >= 0 and not pod.is_over and pod.node
        }
        unread = self._unread.setdefault(uid, set())
        if looked_for := vague - unread:
            past = Past(self._cluster, namespace, f"{UID}={uid}")
            states = await past.last_states(looked_for)
            for name, manifest in states.items():
                by_name[name] = manifest
                gone[name] = Pod(manifest)
            # A name that the newest list has is not gone: the mirror is behind.
            unread |= {n for n in looked_for - past.there if not _is_known(states.get(n))}
            for name in looked_for & past.there:
                gone.pop(name, None)
        known = [pod.manifest for name, pod in gone.items() if name not in unread]
        return Departed(known, frozenset(unread - names))


class Past:
    """Pods at earlier versions of the cluster."""

    def __init__(self, cluster: Cluster, namespace: str | None, labels: str) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._labels = labels
        self._cost = 0.0
        self.there: frozenset[str] = frozenset()  # the pods that exist

    async def last_states(self, names: Collection[str]) -> dict[str, Json]:
        """The last state on record of each of these pods that is gone and on record at all."""
        now = await self._look()
        self._cost = -math.inf  # what is known to be missing is worth any search
        return await self._walk(now, set(names) - self.there, self.there)

    async def everything(self, after: int) -> tuple[dict[str, Json], int]:
        """The last state of every pod that left after that version, and the version of now.

        Those that left too long ago for a watch are here if they lived a quarter as long as
        they are gone, and there were not too many.
        """
        now = await self._look()
        for start in _starts(after, now):
            with contextlib.suppress(Gone):
                watched = await self._replay(start, now)
                break
        else:
            start, watched = now, {}
        if 0 < after == start:
            return watched, now
        return await self._walk(start, None, self.there | watched.keys()) | watched, now

    async def _look(self) -> int:
        newest = await self._cluster.list("pods", self._namespace, labels=self._labels)
        self.there = frozenset(item["metadata"]["name"] for item in newest.items)
        return int(newest.version)

    async def _replay(self, start: int, now: int) -> dict[str, Json]:
        """The last states of the pods that left from `start` to `now`. Raises Gone."""
        states: dict[str, Json] = {}
        before = -1
        while before < start < now:  # until a second passes without a change
            before = start
            events = self._cluster.watch(
                "pods", self._namespace, after=str(start), labels=self._labels, seconds=1
            )
            async with contextlib.aclosing(events):
                async for event in events:
                    start = int(event.object["metadata"]["resourceVersion"])
                    if start > now:
                        break
                    if event.type == "DELETED":
                        states[event.object["metadata"]["name"]] = event.object
        return states

    async def _walk(
        self, top: int, names: set[str] | None, others: Collection[str]
    ) -> dict[str, Json]:
        """The last states of pods that are gone at `top`, from ever earlier lists.

        Of these names, or of all but `others`.
        """
        states: dict[str, Json] = {}
        above, floor, step = top, 0, float(FIRST_STEP)  # nothing is known of versions up to `floor`
        for _ in range(STEPS):
            version = top - int(step)
            if version <= floor:
                version = (floor + above) // 2
            is_done = self._cost > PODS_READ or (names is not None and names <= states.keys())
            if is_done or version <= floor:
                break
            pods = await self._at(version)
            if pods is None:
                floor = version
                continue
            sought = pods.keys() - others if names is None else names & pods.keys()
            await self._narrow(version, above, sought - states.keys(), pods, states)
            above, step = version, step * STEP_GROWTH
        return states

    async def _narrow(
        self, low: int, high: int, names: set[str], pods: dict[str, Json], states: dict[str, Json]
    ) -> None:
        """`names` existed at `low`, as `pods` shows them, and not at `high`."""
        states.update({name: pods[name] for name in names})
        names = {name for name in names if not Pod(pods[name]).is_over}  # an end does not change
        if not names or high - low <= 1 or self._cost > PODS_READ:
            return
        middle = (low + high) // 2
        later = await self._at(middle)
        if later is None:
            return
        alive = names & later.keys()
        await self._narrow(middle, high, alive, later, states)
        await self._narrow(low, middle, names - alive, pods, states)

    async def _at(self, version: int) -> dict[str, Json] | None:
        """The pods at that version; None if it is too long ago."""
        try:
            pods = await self._cluster.list(
                "pods", self._namespace, labels=self._labels, version=str(version)
            )
        except (Gone, Permanent):
            return None
        self._cost += len(pods.items) + LIST_COST
        return {item["metadata"]["name"]: item for item in pods.items}


def _starts(after: int, now: int) -> Iterator[int]:
    """Where a watch of the past may start: at `after`, or else as early as the server allows."""
    if after:
        yield after
    distance = min(WATCHED, now - 1)
    while distance >= 1:
        if now - distance > after:
            yield now - distance
        distance = distance * 3 // 4


def is_stored(pod: Pod, known: RankStatus | None) -> bool:
    """Whether the stored status has the exit of this pod or of a later one."""
    if known is None or known.attempt < pod.attempt:
        return False
    return known.attempt > pod.attempt or known.exit is not None


def _is_known(manifest: Json | None) -> bool:
    return manifest is not None and (Pod(manifest).is_over or not Pod(manifest).has_run)


def _version(manifest: Json) -> int:
    return int(manifest["metadata"].get("resourceVersion") or 0)
