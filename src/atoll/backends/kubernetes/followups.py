"""Followups: the changes that an observation makes necessary, as data, and what performs them.

An observation changes nothing. The controller performs its followups after it has written the
status, and only the holder of the lease runs a controller. Every followup may be repeated; an
object that no longer exists counts as success.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from typing import Any

from atoll.backends.kubernetes.client import Cluster, gather
from atoll.backends.kubernetes.code import CodeMaps, CodeMissing
from atoll.backends.kubernetes.job import Job
from atoll.backends.kubernetes.logs import Archive
from atoll.backends.kubernetes.names import FINALIZER, PLANE, SELECTOR, START, STOPPED, UID
from atoll.backends.kubernetes.options import KubernetesOptions
from atoll.backends.kubernetes.pod import Pod
from atoll.backends.kubernetes.render import (
    gang_name,
    owner_in,
    reference_to,
    render_opened_world,
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
# A strategic merge patch of a pod that removes atoll's finalizer, wherever it is in the list.
DROP_FINALIZER: Json = {"metadata": {"$deleteFromPrimitiveList/finalizers": [FINALIZER]}}


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
    together: int | None = None  # how many ranks the gate let go; unknown if somebody removed it


class RestoreObjects(Followup, frozen=True):
    """Create the ConfigMap and the Service of a gang again after somebody deleted them."""

    desired: DesiredState
    job: Job


class GangWriter:
    """Writes the objects of a gang beside its Job: the ConfigMap that ranks read, the Service for
    their names, and its pods. Performs the followups that concern ranks.

    With `is_owner` the objects belong to the Training object, else to the Job. `patch_job` patches
    the Job.
    """

    def __init__(
        self,
        cluster: Cluster,
        options: KubernetesOptions,
        archive: Archive,
        patch_job: Callable[[Training, Json], Awaitable[None]],
        *,
        is_owner: bool,
    ) -> None:
        self._cluster = cluster
        self._options = options
        self._archive = archive
        self._patch_job = patch_job
        self._is_owner = is_owner
        self._code = CodeMaps(cluster)

    async def perform(self, training: Training, followup: Followup) -> None:
        match followup:
            case KeepLogs(pods=pods, ranks=ranks):
                # Reading goes on until the pod has ended; this pass does not wait for it.
                for pod in pods:
                    self._archive.capture(pod, ranks)
            case FailLostPods(pods=pods):
                await self.patch_pods(pods, _render_lost, type="strategic", part="status")
            case DropFinalizer(pods=pods):
                await self._archive.settle(pods, LOG_S)
                await self._drop_finalizers(pods)
            case MarkStopped(pods=pods):
                stopped = _render_stopped(self._cluster.time())
                await self.patch_pods(pods, lambda _: stopped, type="strategic", part="status")
            case OpenGate(pods=pods, together=together):
                await self._note_opened(training)
                # Its rank learns how many start with it.
                start = {"metadata": {"annotations": {START: str(together or "true")}}}
                await self.patch_pods(pods, lambda _: start)
            case RestoreObjects(desired=desired, job=job):
                await self.make(training, desired, job)
            case PatchJob(patch=patch):
                # The Job was changed or deleted since it was read: the next observation asks again.
                with contextlib.suppress(Conflict, NotFound):
                    await self._patch_job(training, patch)

    async def make(self, training: Training, desired: DesiredState, job: Job | None = None) -> None:
        """ConfigMap and Service exist. For a new Job, and when one of them is missing."""
        owner = owner_in(training, job, is_owner=self._is_owner)
        if job is None:
            await self._put_code(training)
        is_opened = job is not None and job.gate_opened_at is not None
        world = render_world(training, desired, self._options, owner, is_opened=is_opened)
        await self._cluster.patch("configmaps", *self.object_key(training), world, type="apply")
        await self._make_service(training, owner)

    async def _put_code(self, training: Training) -> None:
        try:
            await self._code.put(self.object_key(training)[0], training.spec.code)
        except CodeMissing as error:
            # Whoever stores a training with code sends that right after it.
            if time.time() - training.created_at < CODE_S:
                raise
            raise Permanent(str(error)) from error

    async def drop_code(self, training: Training) -> None:
        """Its Job was refused."""
        await self._code.drop_unowned(self.object_key(training)[0], training.spec.code)

    async def tie(self, training: Training, job: Job) -> None:
        """Kubernetes deletes them with the Job, even if no controller is left to do it."""
        if self._is_owner:
            return
        namespace, name = self.object_key(training)
        owner = reference_to("batch/v1", "Job", job.metadata)
        patch = {"metadata": {"ownerReferences": [owner]}}
        for kind in ("configmaps", "services"):
            await self._cluster.patch(kind, namespace, name, patch)
        await self._code.keep(namespace, training.spec.code, owner)

    async def resize(self, training: Training, desired: DesiredState, job: Job) -> None:
        """Ranks that start from now on read the new size and have DNS names."""
        if desired.size > job.size:
            owner = owner_in(training, job, is_owner=self._is_owner)
            await self._make_service(training, owner)
        patch = {"data": render_size(desired)}
        try:
            await self._cluster.patch("configmaps", *self.object_key(training), patch)
        except NotFound:
            if desired.size > 0:
                await self.make(training, desired, job)

    async def drop_all_finalizers(self, namespace: str, labels: str) -> None:
        pods = await self._cluster.list("pods", namespace, labels=labels)
        await self._drop_finalizers(map(Pod, pods.items))

    async def sweep(self, known: Callable[[], Awaitable[set[str]]]) -> None:
        """Pods of trainings that no longer exist lose their finalizer, or they would stay forever.

        Pods of another control plane are left alone: their trainings are not known here.
        """
        plane = self._options.labels.get(PLANE)
        labels = f"{SELECTOR},!{PLANE}" if plane is None else f"{SELECTOR},{PLANE}={plane}"
        protected: list[Pod] = []
        async for page in self._cluster.pages("pods", self._options.namespace, labels=labels):
            protected += [pod for pod in map(Pod, page.items) if pod.has_finalizer]
        if protected:
            # Read after the pods, so that the pods of a new training are not taken for strays.
            known_uids = await known()
            await self._drop_finalizers(p for p in protected if p.labels.get(UID) not in known_uids)

    async def _drop_finalizers(self, pods: Iterable[Pod]) -> None:
        held = [pod for pod in pods if pod.has_finalizer]
        await self.patch_pods(held, lambda _: DROP_FINALIZER, type="strategic")

    async def _note_opened(self, training: Training) -> None:
        """Pods that are created from now on find the gate open."""
        world = {"data": render_opened_world()}
        with contextlib.suppress(NotFound):  # deleted; it is created again when a pod needs it
            await self._cluster.patch("configmaps", *self.object_key(training), world)

    async def patch_pods(
        self, pods: Iterable[Pod], render: Callable[[Pod], Json], **options: Any
    ) -> None:
        async def patch(pod: Pod) -> None:
            with contextlib.suppress(NotFound):
                await self._cluster.patch("pods", pod.namespace, pod.name, render(pod), **options)

        await gather(AT_ONCE, [patch(pod) for pod in pods])

    async def _make_service(self, training: Training, owner: Json | None) -> None:
        service = render_service(training, self._options, owner)
        await self._cluster.patch("services", *self.object_key(training), service, type="apply")

    def object_key(self, training: Training) -> tuple[str, str]:
        """The namespace of all objects of a gang, and their name."""
        return self._options.namespace or training.namespace, gang_name(training)


def _render_lost(pod: Pod) -> Json:
    """A pod's status as the cluster writes it once the pod's node is removed."""
    message = f"the node {pod.node} does not answer"
    return {"status": {"phase": "Failed", "reason": "NodeLost", "message": message}}


def _render_stopped(now: float) -> Json:
    """A pod's status: atoll stops the pod, its rank does not fail."""
    condition = {
        "type": STOPPED,
        "status": "True",
        "reason": "GaveWay",
        "message": "too few ranks fit: releasing their nodes",
        "lastTransitionTime": datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    return {"status": {"conditions": [condition]}}
