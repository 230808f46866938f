"""Pods that no longer exist: how they ended, from what was seen of them or from the cluster's past.

No pod waits for a controller before it leaves, so a node can be drained while none runs. A watch
brings the last state of every pod that is deleted. Of one that was deleted while nobody watched,
the API server still knows it for some minutes: it lists what there was at an earlier version,
until etcd is compacted (every five minutes, unless set otherwise). After that the exit is unknown.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, NamedTuple

from atoll.core.errors import Gone, Permanent
from atoll.core.status import RankStatus, Training
from atoll.kubernetes.client import Cluster
from atoll.kubernetes.names import UID
from atoll.kubernetes.pod import Pod

Json = dict[str, Any]

FIRST_STEP, STEP_GROWTH, STEPS = 4, 1.25, 100  # in versions before now


class Departed(NamedTuple):
    """The pods of a gang that are gone: as they last were, and by name those nobody knows of."""

    manifests: list[Json] = []
    unread: frozenset[str] = frozenset()


class PodMemory:
    """Pods as they were last seen, by training and name."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._pods: dict[str, dict[str, Json]] = {}
        self._unread: dict[str, set[str]] = {}  # what was looked for in vain, by training

    def see(self, manifest: Json) -> None:
        uid = str((manifest["metadata"].get("labels") or {}).get(UID, ""))
        by_name = self._pods.setdefault(uid, {})
        before = by_name.get(manifest["metadata"]["name"])
        if before is None or _version(before) <= _version(manifest):
            by_name[manifest["metadata"]["name"]] = manifest

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
    """A gang's pods at earlier versions of the cluster."""

    def __init__(self, cluster: Cluster, namespace: str, labels: str) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._labels = labels
        self.there: frozenset[str] = frozenset()  # the pods that exist

    async def last_states(self, names: Collection[str]) -> dict[str, Json]:
        """The last state on record of each of these pods that is gone and on record at all."""
        newest = await self._cluster.list("pods", self._namespace, labels=self._labels)
        self.there = frozenset(item["metadata"]["name"] for item in newest.items)
        states: dict[str, Json] = {}
        missing = set(names) - self.there
        now = above = int(newest.version)
        floor, step = 0, float(FIRST_STEP)  # nothing is known of versions up to `floor`
        for _ in range(STEPS):
            version = now - int(step)
            if version <= floor:
                version = (floor + above) // 2
            if not missing or version <= floor:
                break
            pods = await self._at(version)
            if pods is None:
                floor = version
                continue
            sighted = missing & pods.keys()
            await self._narrow(version, above, sighted, pods, states)
            missing -= sighted
            above, step = version, step * STEP_GROWTH
        return states

    async def _narrow(
        self, low: int, high: int, names: set[str], pods: dict[str, Json], states: dict[str, Json]
    ) -> None:
        """`names` existed at `low`, as `pods` shows them, and not at `high`."""
        states.update({name: pods[name] for name in names})
        names = {name for name in names if not Pod(pods[name]).is_over}  # an end does not change
        if not names or high - low <= 1:
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
        return {item["metadata"]["name"]: item for item in pods.items}


def is_stored(pod: Pod, known: RankStatus | None) -> bool:
    """Whether the stored status has the exit of this pod or of a later one."""
    if known is None or known.attempt < pod.attempt:
        return False
    return known.attempt > pod.attempt or known.exit is not None


def _is_known(manifest: Json | None) -> bool:
    return manifest is not None and (Pod(manifest).is_over or not Pod(manifest).has_run)


def _version(manifest: Json) -> int:
    return int(manifest["metadata"].get("resourceVersion") or 0)
