"""Followups: the changes that an observation makes necessary, as data, and what performs them.

An observation changes nothing. The controller performs its followups after it has written the
status, and only the holder of the lease runs a controller. Every followup may be repeated; an
object that no longer exists counts as success.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from atoll.backends.kubernetes.client import Cluster, gather
from atoll.backends.kubernetes.code import CodeMaps, CodeMissing
from atoll.backends.kubernetes.gate import is_open, render_opened_world, render_start
from atoll.backends.kubernetes.logs import Archive
from atoll.backends.kubernetes.names import PLANE, SELECTOR, UID
from atoll.backends.kubernetes.options import KubernetesOptions
from atoll.backends.kubernetes.patch import DROP_FINALIZER, render_lost, render_stopped
from atoll.backends.kubernetes.pod import Pod
from atoll.backends.kubernetes.render import (
    gang_name,
    owner_of,
    reference_to,
    render_service,
    render_size,
    render_world,
)
from atoll.core.errors import Conflict, NotFound, Permanent
from atoll.core.status import DesiredState, Followup, Training

Json = dict[str, Any]

CODE_S = 60.0  # 16 MiB of code arrive in this time over 2 Mbit/s
AT_ONCE = 20  # requests in flight where every pod needs one
LOG_S = 1.0  # a pod that may be deleted waits no longer for its log to be stored


class KeepLogs(Followup, frozen=True):
    """Archive the logs of pods that were deleted while they ran, before they are lost."""

    pods: tuple[Pod, ...]
    ranks: int


class FailLostPods(Followup, frozen=True):
    """Mark pods on nodes that do not answer as failed, so that the Job replaces them."""

    pods: tuple[Pod, ...]


class DropFinalizer(Followup, frozen=True):
    """Remove the finalizer of pods whose exits are stored, or that have none."""

    pods: tuple[Pod, ...]


class MarkStopped(Followup, frozen=True):
    """Make the end of these pods count as no failure of their ranks."""

    pods: tuple[Pod, ...]


class PatchJob(Followup, frozen=True):
    """A merge patch of the Job. One that names a version is dropped if the Job has changed."""

    why: str
    patch: Json


class OpenGate(Followup, frozen=True):
    """Open the start gate for these pods and for all that are created later."""

    pods: tuple[Pod, ...]
    together: int | None = None  # how many ranks the gate let go; not known of older Jobs


class RestoreObjects(Followup, frozen=True):
    """Create the ConfigMap and the Service of a gang again after somebody deleted them."""

    desired: DesiredState
    job: Json


class GangObjects:
    """The other objects of a gang: the ConfigMap that ranks read, the Service for their names.

    With `is_owner` they belong to the Training object, else to the Job.
    """

    def __init__(self, cluster: Cluster, options: KubernetesOptions, *, is_owner: bool) -> None:
        self._cluster = cluster
        self._options = options
        self._is_owner = is_owner
        self._code = CodeMaps(cluster)

    async def make(
        self, training: Training, desired: DesiredState, job: Json | None = None
    ) -> None:
        """Both objects exist. Called before the Job is created, and when they are missing later."""
        owner = self._owner(training, job)
        if job is None:
            await self._put_code(training)
        world = render_world(training, desired, self._options, owner, is_opened=is_open(job))
        await self._cluster.patch("configmaps", *self._object_key(training), world, type="apply")
        await self._make_service(training, owner)

    async def _put_code(self, training: Training) -> None:
        try:
            await self._code.put(self._object_key(training)[0], training.spec.code)
        except CodeMissing as error:
            # Whoever stores a training with code sends that right after it.
            if time.time() - training.created_at < CODE_S:
                raise
            raise Permanent(str(error)) from error

    async def drop_code(self, training: Training) -> None:
        """Its Job was refused."""
        await self._code.drop_unowned(self._object_key(training)[0], training.spec.code)

    async def tie(self, training: Training, job: Json) -> None:
        """Kubernetes deletes them with the Job, even if no controller is left to do it."""
        if self._is_owner:
            return
        metadata = job["metadata"]
        patch = {"metadata": {"ownerReferences": [_job_as_owner(job)]}}
        for kind in ("configmaps", "services"):
            await self._cluster.patch(kind, metadata["namespace"], metadata["name"], patch)
        await self._code.keep(metadata["namespace"], training.spec.code, _job_as_owner(job))

    async def resize(self, training: Training, desired: DesiredState, job: Json) -> None:
        """Ranks that start from now on read the new size and have DNS names."""
        if desired.size > job["spec"]["completions"]:
            await self._make_service(training, self._owner(training, job))
        patch = {"data": render_size(desired)}
        try:
            await self._cluster.patch("configmaps", *self._object_key(training), patch)
        except NotFound:
            if desired.size > 0:
                await self.make(training, desired, job)

    async def note_opened(self, training: Training) -> None:
        """Pods that are created from now on find the gate open."""
        world = {"data": render_opened_world()}
        with contextlib.suppress(NotFound):  # deleted; it is created again when a pod needs it
            await self._cluster.patch("configmaps", *self._object_key(training), world)

    async def _make_service(self, training: Training, owner: Json | None) -> None:
        service = render_service(training, self._options, owner)
        await self._cluster.patch("services", *self._object_key(training), service, type="apply")

    def _owner(self, training: Training, job: Json | None) -> Json | None:
        if self._is_owner:
            return owner_of(training)
        return None if job is None else _job_as_owner(job)

    def _object_key(self, training: Training) -> tuple[str, str]:
        return self._options.namespace or training.namespace, gang_name(training)


class GangWriter:
    """Removes the finalizers that keep pods until their exit is stored, and patches pods."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def drop_finalizers(self, pods: Iterable[Pod]) -> None:
        await gather(AT_ONCE, [self._drop_finalizer(pod) for pod in pods if pod.has_finalizer])

    async def drop_all_finalizers(self, namespace: str, labels: str) -> None:
        pods = await self._cluster.list("pods", namespace, labels=labels)
        await self.drop_finalizers(map(Pod, pods.items))

    async def sweep(
        self,
        namespace: str | None,
        known: Callable[[], Awaitable[set[str]]],
        plane: str | None = None,
    ) -> None:
        """Pods of trainings that no longer exist lose their finalizer, or they would stay forever.

        Pods of another control plane are left alone: their trainings are not known here.
        """
        own = f"!{PLANE}" if plane is None else f"{PLANE}={plane}"
        protected: list[Pod] = []
        async for page in self._cluster.pages("pods", namespace, labels=f"{SELECTOR},{own}"):
            protected += [pod for pod in map(Pod, page.items) if pod.has_finalizer]
        if protected:
            # Read after the pods, so that the pods of a new training are not taken for strays.
            known_uids = await known()
            await self.drop_finalizers(
                p for p in protected if p.metadata["labels"].get(UID) not in known_uids
            )

    async def fail_lost_pods(self, pods: Iterable[Pod]) -> None:
        """The pods are marked as failed, as the cluster does once their node is removed."""
        await gather(AT_ONCE, [self._patch_status(p, render_lost(p.node)) for p in pods])

    async def mark_stopped(self, pods: Iterable[Pod], now: float) -> None:
        await gather(AT_ONCE, [self._patch_status(p, render_stopped(now)) for p in pods])

    async def start_pods(self, pods: Iterable[Pod], together: int | None) -> None:
        """The pods pass the start gate."""
        await gather(AT_ONCE, [self._start_pod(pod, together) for pod in pods])

    async def _start_pod(self, pod: Pod, together: int | None) -> None:
        patch = render_start(together)
        with contextlib.suppress(NotFound):
            await self._cluster.patch("pods", pod.metadata["namespace"], pod.name, patch)

    async def _drop_finalizer(self, pod: Pod) -> None:
        with contextlib.suppress(NotFound):
            await self._cluster.patch(
                "pods", pod.metadata["namespace"], pod.name, DROP_FINALIZER, type="strategic"
            )

    async def _patch_status(self, pod: Pod, patch: Json) -> None:
        with contextlib.suppress(NotFound):
            await self._cluster.patch(
                "pods", pod.metadata["namespace"], pod.name, patch, type="strategic", part="status"
            )


class GangFollowups:
    """Performs the followups that concern ranks."""

    def __init__(
        self,
        writer: GangWriter,
        objects: GangObjects,
        archive: Archive,
        patch_job: Callable[[Training, Json], Awaitable[None]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._writer = writer
        self._objects = objects
        self._archive = archive
        self._patch_job = patch_job
        self._clock = clock

    async def perform(self, training: Training, followup: Followup) -> None:
        match followup:
            case KeepLogs(pods=pods, ranks=ranks):
                # Reading goes on until the pod has ended; this pass does not wait for it.
                for pod in pods:
                    self._archive.capture(pod, ranks)
            case FailLostPods(pods=pods):
                await self._writer.fail_lost_pods(pods)
            case DropFinalizer(pods=pods):
                await self._archive.settle(pods, LOG_S)
                await self._writer.drop_finalizers(pods)
            case MarkStopped(pods=pods):
                await self._writer.mark_stopped(pods, self._clock())
            case OpenGate(pods=pods, together=together):
                await self._objects.note_opened(training)
                await self._writer.start_pods(pods, together)
            case RestoreObjects(desired=desired, job=job):
                await self._objects.make(training, desired, job)
            case PatchJob(patch=patch):
                # The Job was changed or deleted since it was read: the next observation asks again.
                with contextlib.suppress(Conflict, NotFound):
                    await self._patch_job(training, patch)


def _job_as_owner(job: Json) -> Json:
    return reference_to("batch/v1", "Job", job["metadata"])
