"""How pods ended that no longer exist, from their last observed state or from the cluster's past.

No pod waits for a controller before it is deleted, so a node can be drained while none runs. A
watch brings the last state of every deleted pod. For pods that were deleted while nobody watched,
the API server still has the past: for a minute or more, a watch from an earlier version replays
them; until etcd is compacted (every five minutes by default), a list can be read at an earlier
version. After that the exit is unknown.

The past is read only for a training that misses a pod, in the background: until then, only the rank
of that pod stays as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

from atoll.backends.kubernetes.client import Cluster
from atoll.backends.kubernetes.names import UID
from atoll.backends.kubernetes.pod import Pod
from atoll.core.errors import Denied, Gone, NotFound, Permanent, Temporary
from atoll.core.ports import Key
from atoll.core.status import RankStatus, Training

Json = dict[str, Any]
log = logging.getLogger(__name__)

# Versions before now at which to list: 100 steps of 1.25 reach back 10**10 versions, and a pod that
# lived a quarter as long as it has been deleted is in one of the lists.
FIRST_STEP, STEP_GROWTH, STEPS = 4, 1.25, 100
WATCHED = 2**20  # versions before now; an API server keeps the last 100,000 changes of pods at most
SEARCH_S = 60.0  # for one training: its rank is reported as running for no longer than this
SEARCHES = 4  # at once: after a node was drained, many trainings miss a pod


class DeletedState(NamedTuple):
    """The deleted pods of a gang whose exits are not stored yet."""

    pods: list[Pod] = []  # as they last were
    unknown: frozenset[str] = frozenset()  # names of those whose end is not on record any more
    searching: frozenset[str] = frozenset()  # names of those whose end is being searched for
    searching_ranks: frozenset[int] = frozenset()  # ranks that ended in pods of unknown names


class DeletedPods:
    """Knows how each deleted pod ended, until its exit is stored.

    The last state of a pod comes from the watch (`note`), or from a search through the cluster's
    past that begins when a training misses a pod. `notify` gets the trainings of which more is
    known now.
    """

    def __init__(
        self,
        cluster: Cluster,
        namespace: str | None = None,
        notify: Callable[[Key], None] = lambda key: None,
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace  # of all trainings; None: each has its own
        self._notify = notify
        self._left: dict[str, dict[str, Pod]] = {}  # by training and name
        self._final: set[str] = set()  # uids of pods whose very last state is known
        self._exhausted: dict[str, set[str | int]] = {}  # by training: what no search can find
        self._searching: dict[str, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(SEARCHES)

    def note(self, pod: Pod, *, is_final: bool) -> None:
        """Remembers a pod that was deleted; with `is_final`, this is its very last state."""
        uid = str(pod.labels.get(UID, ""))
        has_run = pod.is_over or pod.has_run or (pod.node is not None and not is_final)
        before = self._left.get(uid, {}).get(pod.name)
        is_older = before is not None and before.version > pod.version
        if pod.rank < 0 or not has_run or is_older:
            return
        self._left.setdefault(uid, {})[pod.name] = pod
        if is_final:
            self._final.add(pod.uid)

    def forget(self, uid: str) -> None:
        for pod in self._left.pop(uid, {}).values():
            self._final.discard(pod.uid)
        self._exhausted.pop(uid, None)
        if task := self._searching.pop(uid, None):
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._searching.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def sweep(self, known: Callable[[], Awaitable[set[str]]]) -> None:
        """Trainings that no longer exist are forgotten."""
        uids = {*self._left, *self._exhausted}
        if uids:
            for uid in uids - await known():
                self.forget(uid)

    def deleted(
        self,
        training: Training,
        there: Iterable[Pod],
        failed: Collection[int] = (),
    ) -> DeletedState:
        """Returns the deleted pods whose exits are not stored; `there` are the pods that exist.

        `failed` are ranks that the Job counts as failed though no pod of theirs shows how.
        """
        uid = training.uid
        names = {pod.name for pod in there}
        ranks = {r.rank: r for r in (*training.status.ranks, *training.status.removed_ranks)}
        left = self._left.get(uid, {})
        left_pods = {name: pod for name, pod in left.items() if name not in names}
        for name in [
            name for name, pod in left_pods.items() if is_stored(pod, ranks.get(pod.rank))
        ]:
            self._final.discard(left.pop(name).uid)
            del left_pods[name]
        unfinished = {name for name, pod in left_pods.items() if not pod.is_over}
        cut_off = {name for name in unfinished if left[name].uid in self._final}
        running = {r.pod_name for r in ranks.values() if r.is_alive and r.pod_name}
        targets: set[str | int] = {*(running - names - left_pods.keys()), *(unfinished - cut_off)}
        targets |= set(failed) - {pod.rank for pod in left_pods.values()}
        exhausted = self._exhausted.get(uid, set()) - (left_pods.keys() - unfinished)
        searching = targets - exhausted
        if searching and uid not in self._searching:
            namespace = self._namespace or training.namespace
            search = Search(self._cluster, namespace, f"{UID}={uid}", searching)
            self._searching[uid] = asyncio.create_task(self._run(training.key, uid, search))
        unknown = {name for name in exhausted if isinstance(name, str)} | cut_off
        return DeletedState(
            [pod for name, pod in left_pods.items() if name not in unknown | searching],
            frozenset(unknown - names),
            frozenset(name for name in searching if isinstance(name, str)),
            frozenset(rank for rank in searching if isinstance(rank, int)),
        )

    async def _run(self, key: Key, uid: str, search: Search) -> None:
        try:
            async with self._slots:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(SEARCH_S):
                        await search.run()
        except Temporary as error:  # the next observation begins it again
            log.info("cannot read how deleted pods ended: %s; trying again", error)
            return
        except (Denied, Permanent, NotFound) as error:
            log.warning("cannot read how deleted pods ended: %s", error)
        finally:
            if self._searching.get(uid) is asyncio.current_task():
                del self._searching[uid]
        for pod in search.states.values():
            self.note(pod, is_final=True)
        self._exhausted.setdefault(uid, set()).update(search.unknown())
        self._notify(key)


class Search:
    """Pods of one training at earlier versions of the cluster.

    `targets` are names of pods, and ranks whose pods have unknown names.
    """

    def __init__(
        self, cluster: Cluster, namespace: str | None, labels: str, targets: Collection[str | int]
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._labels = labels
        self._names = {target for target in targets if isinstance(target, str)}
        self._ranks = {target for target in targets if isinstance(target, int)}
        self._there: frozenset[str] = frozenset()
        self.states: dict[str, Pod] = {}  # deleted pods, as they last were

    async def run(self) -> None:
        """The targets are among `states` if they are on record. Raises Temporary, Denied."""
        now = await self._list_current()
        if self._is_done:
            return
        start = now
        for earlier in _starts(now):
            with contextlib.suppress(Gone):
                await self._replay(earlier, now)
                start = earlier
                break
        await self._walk(start)

    def unknown(self) -> set[str | int]:
        """The targets whose end is not on record. A pod that exists is no target: the
        mirror that misses it is behind."""
        ended = {name for name, pod in self.states.items() if pod.is_over}
        return {*(self._names - self._there - ended), *(self._ranks - self._known_ranks)}

    @property
    def _known_ranks(self) -> set[int]:
        return {pod.rank for pod in self.states.values()}

    @property
    def _is_done(self) -> bool:
        return self._names - self._there <= self.states.keys() and self._ranks <= self._known_ranks

    async def _list_current(self) -> int:
        """Notes the pods that exist; the version of now."""
        names: set[str] = set()
        version = 0
        async for page in self._cluster.pages("pods", self._namespace, labels=self._labels):
            names |= {item["metadata"]["name"] for item in page.items}
            version = int(page.version)
        self._there = frozenset(names)
        return version

    async def _replay(self, start: int, now: int) -> None:
        """Replays the deletions from `start` to `now`. Raises Gone."""
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
                        self.states[event.object["metadata"]["name"]] = Pod(event.object)

    async def _walk(self, top: int) -> None:
        """Searches ever earlier lists for targets that were deleted before `top`."""
        above, floor, step = top, 0, float(FIRST_STEP)  # nothing is known of versions up to `floor`
        for _ in range(STEPS):
            version = top - int(step)
            if version <= floor:
                version = (floor + above) // 2
            if self._is_done or version <= floor:
                break
            pods = await self._at(version)
            if pods is None:
                floor = version
                continue
            await self._narrow(version, above, pods.keys() - self.states.keys(), pods)
            above, step = version, step * STEP_GROWTH

    async def _narrow(self, low: int, high: int, names: set[str], pods: dict[str, Pod]) -> None:
        """`names` existed at `low`, as `pods` shows them, and not at `high`."""
        self.states.update({name: pods[name] for name in names})
        names = {name for name in names if not pods[name].is_over}  # an end does not change
        if not names or high - low <= 1:
            return
        middle = (low + high) // 2
        later = await self._at(middle)
        if later is None:
            return
        alive = names & later.keys()
        await self._narrow(middle, high, alive, later)
        await self._narrow(low, middle, names - alive, pods)

    async def _at(self, version: int) -> dict[str, Pod] | None:
        """The targets among the pods at that version; None if it is too long ago."""
        matches: dict[str, Pod] = {}
        try:
            pages = self._cluster.pages(
                "pods", self._namespace, labels=self._labels, version=str(version)
            )
            async with contextlib.aclosing(pages):
                async for page in pages:
                    targets = filter(self._is_target, map(Pod, page.items))
                    matches |= {pod.name: pod for pod in targets}
        except (Gone, Permanent):
            return None
        return matches

    def _is_target(self, pod: Pod) -> bool:
        is_sought = pod.name in self._names or pod.rank in self._ranks
        return is_sought and pod.name not in self._there


def _starts(now: int) -> Iterator[int]:
    """Where a watch of the past may start: as early as the server allows."""
    distance = min(WATCHED, now - 1)
    while distance >= 1:
        yield now - distance
        distance = distance * 3 // 4


def is_stored(pod: Pod, known: RankStatus | None) -> bool:
    """Whether the stored status has the exit of this pod or of a later one."""
    if known is None or known.attempt < pod.attempt:
        return False
    return known.attempt > pod.attempt or known.exit is not None
