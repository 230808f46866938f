"""What a look at a gang asks for, as data, and the doing of it.

A look changes nothing. The reconciler performs its chores once the status that holds what was seen
is written, and only the holder of the lease has a reconciler. Every chore may be repeated, and an
object that is gone already is success.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from atoll.core.errors import Conflict, NotFound
from atoll.core.status import Chore, Training, Wish
from atoll.kubernetes.archive import Archive
from atoll.kubernetes.client import Cluster, gather
from atoll.kubernetes.gate import is_open, render_opened_world, render_start
from atoll.kubernetes.names import PLANE, SELECTOR, UID
from atoll.kubernetes.options import KubernetesOptions
from atoll.kubernetes.patch import LET_GO, render_lost, render_stopped
from atoll.kubernetes.pod import Pod
from atoll.kubernetes.render import (
    gang_name,
    owner_of,
    reference_to,
    render_service,
    render_size,
    render_world,
)

Json = dict[str, Any]

AT_ONCE = 20  # requests under way at a time where every pod needs one
LOG_S = 1.0  # how long a pod that may go is kept for its log


class KeepLogs(Chore, frozen=True):
    """Of pods that are taken away while they run: their logs go with them."""

    pods: tuple[Pod, ...]
    ranks: int


class GiveUp(Chore, frozen=True):
    """Pods on nodes that do not answer fail on record, and are replaced then."""

    pods: tuple[Pod, ...]


class LetGo(Chore, frozen=True):
    """Pods whose exits are stored, or that have none, may leave."""

    pods: tuple[Pod, ...]


class MarkStopped(Chore, frozen=True):
    """The end of these pods will not count as a failure of their ranks."""

    pods: tuple[Pod, ...]


class PatchJob(Chore, frozen=True):
    """A merge patch of the Job. One that names a version is dropped if the Job has changed."""

    why: str
    patch: Json


class OpenGate(Chore, frozen=True):
    """These pods pass the start gate, and those that are made from now on."""

    pods: tuple[Pod, ...]


class RestoreObjects(Chore, frozen=True):
    """The ConfigMap and the Service of a gang, which somebody has deleted."""

    wish: Wish
    job: Json


class GangObjects:
    """What a gang has beside its Job: the ConfigMap that ranks read, the Service that names them.

    `is_owner`: they belong to the Training, else to the Job.
    """

    def __init__(self, cluster: Cluster, options: KubernetesOptions, *, is_owner: bool) -> None:
        self._cluster = cluster
        self._options = options
        self._is_owner = is_owner

    async def make(self, training: Training, wish: Wish, job: Json | None = None) -> None:
        """Before there is a Job, or again for the one that there is."""
        owner = self._owner(training, job)
        world = render_world(training, wish, self._options, owner, is_opened=is_open(job))
        await self._cluster.patch("configmaps", *self._place(training), world, type="apply")
        await self._make_service(training, owner)

    async def tie(self, job: Json) -> None:
        """They go with the Job, also when nobody is left to clean up."""
        if self._is_owner:
            return
        metadata = job["metadata"]
        patch = {"metadata": {"ownerReferences": [_job_as_owner(job)]}}
        for kind in ("configmaps", "services"):
            await self._cluster.patch(kind, metadata["namespace"], metadata["name"], patch)

    async def resize(self, training: Training, wish: Wish, job: Json) -> None:
        """Ranks that start from now on find the new size, and are found."""
        if wish.size > job["spec"]["completions"]:
            await self._make_service(training, self._owner(training, job))
        patch = {"data": render_size(wish)}
        try:
            await self._cluster.patch("configmaps", *self._place(training), patch)
        except NotFound:
            if wish.size > 0:
                await self.make(training, wish, job)

    async def note_opened(self, training: Training) -> None:
        """Pods made from now on find the gate open."""
        world = {"data": render_opened_world()}
        with contextlib.suppress(NotFound):  # deleted; it is made again when a pod misses it
            await self._cluster.patch("configmaps", *self._place(training), world)

    async def _make_service(self, training: Training, owner: Json | None) -> None:
        service = render_service(training, self._options, owner)
        await self._cluster.patch("services", *self._place(training), service, type="apply")

    def _owner(self, training: Training, job: Json | None) -> Json | None:
        if self._is_owner:
            return owner_of(training)
        return None if job is None else _job_as_owner(job)

    def _place(self, training: Training) -> tuple[str, str]:
        return self._options.namespace or training.namespace, gang_name(training)


class PodKeeper:
    """Keeps pods until their exit is stored, and lets them go after that."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def let_go(self, pods: Iterable[Pod]) -> None:
        await gather(AT_ONCE, [self._let_go(pod) for pod in pods if pod.is_held])

    async def let_all_go(self, namespace: str, labels: str) -> None:
        listed = await self._cluster.list("pods", namespace, labels=labels)
        await self.let_go(map(Pod, listed.items))

    async def sweep(
        self,
        namespace: str | None,
        known: Callable[[], Awaitable[set[str]]],
        plane: str | None = None,
    ) -> None:
        """Pods of trainings that are no more are let go; without this they would never leave.

        Those of another control plane are left to it: their trainings are not known here.
        """
        own = f"!{PLANE}" if plane is None else f"{PLANE}={plane}"
        listed = await self._cluster.list("pods", namespace, labels=f"{SELECTOR},{own}")
        held = [pod for pod in map(Pod, listed.items) if pod.is_held]
        if held:
            # Asked after the pods, so that none of a new training is taken for a stray.
            kept = await known()
            await self.let_go(p for p in held if p.metadata["labels"].get(UID) not in kept)

    async def give_up(self, pods: Iterable[Pod]) -> None:
        """Failed on record, as the cluster does once a node is removed; then they are replaced."""
        await gather(AT_ONCE, [self._patch_status(p, render_lost(p.node)) for p in pods])

    async def mark_stopped(self, pods: Iterable[Pod], now: float) -> None:
        await gather(AT_ONCE, [self._patch_status(p, render_stopped(now)) for p in pods])

    async def let_start(self, pods: Iterable[Pod]) -> None:
        """They pass the start gate."""
        await gather(AT_ONCE, [self._let_start(pod) for pod in pods])

    async def _let_start(self, pod: Pod) -> None:
        with contextlib.suppress(NotFound):
            await self._cluster.patch("pods", pod.metadata["namespace"], pod.name, render_start())

    async def _let_go(self, pod: Pod) -> None:
        with contextlib.suppress(NotFound):
            await self._cluster.patch(
                "pods", pod.metadata["namespace"], pod.name, LET_GO, type="strategic"
            )

    async def _patch_status(self, pod: Pod, patch: Json) -> None:
        with contextlib.suppress(NotFound):
            await self._cluster.patch(
                "pods", pod.metadata["namespace"], pod.name, patch, type="strategic", part="status"
            )


class GangChores:
    """Performs what looks at the ranks ask for."""

    def __init__(
        self,
        keeper: PodKeeper,
        objects: GangObjects,
        archive: Archive,
        patch_job: Callable[[Training, Json], Awaitable[None]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._keeper = keeper
        self._objects = objects
        self._archive = archive
        self._patch_job = patch_job
        self._clock = clock

    async def perform(self, training: Training, chore: Chore) -> None:
        match chore:
            case KeepLogs(pods=pods, ranks=ranks):
                # A log is read until its pod has ended, which no pass waits for.
                for pod in pods:
                    self._archive.capture(pod, ranks)
            case GiveUp(pods=pods):
                await self._keeper.give_up(pods)
            case LetGo(pods=pods):
                await self._archive.settle(pods, LOG_S)
                await self._keeper.let_go(pods)
            case MarkStopped(pods=pods):
                await self._keeper.mark_stopped(pods, self._clock())
            case OpenGate(pods=pods):
                await self._objects.note_opened(training)
                await self._keeper.let_start(pods)
            case RestoreObjects(wish=wish, job=job):
                await self._objects.make(training, wish, job)
            case PatchJob(patch=patch):
                # Changed or deleted since it was read: the next look asks for what is left to do.
                with contextlib.suppress(Conflict, NotFound):
                    await self._patch_job(training, patch)


def _job_as_owner(job: Json) -> Json:
    return reference_to("batch/v1", "Job", job["metadata"])
