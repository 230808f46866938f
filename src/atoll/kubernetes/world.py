"""What a gang has beside its Job: the ConfigMap that ranks read, the Service that names them.

Somebody may delete them while ranks run. They are put back when ranks come that need them.
"""

from __future__ import annotations

from typing import Any

from atoll.core.errors import NotFound
from atoll.core.status import Training, Wish
from atoll.kubernetes.client import Cluster
from atoll.kubernetes.gate import is_open
from atoll.kubernetes.names import QUEUE
from atoll.kubernetes.options import Options
from atoll.kubernetes.patch import yielded_at
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


class World:
    """Every verb may be repeated. `is_owner`: they belong to the Training, else to the Job."""

    def __init__(self, cluster: Cluster, options: Options, *, is_owner: bool) -> None:
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

    async def mend(self, training: Training, wish: Wish, job: Json, pods: list[Pod]) -> None:
        """For pods that cannot start because the ConfigMap is gone."""
        name = gang_name(training)
        if training.spec.source is None and any(p.misses(name) for p in pods):
            await self.make(training, wish, job)

    async def _make_service(self, training: Training, owner: Json | None) -> None:
        service = render_service(training, self._options, owner)
        await self._cluster.patch("services", *self._place(training), service, type="apply")

    def _owner(self, training: Training, job: Json | None) -> Json | None:
        if self._is_owner:
            return owner_of(training)
        return None if job is None else _job_as_owner(job)

    def _place(self, training: Training) -> tuple[str, str]:
        return self._options.namespace or training.namespace, gang_name(training)


def render_mended(job: Json, wish: Wish) -> Json:
    """A merge patch that gives a Job its size back which somebody has changed; {} if nobody has."""
    if yielded_at(job) is not None or QUEUE in (job["metadata"].get("labels") or {}):
        return {}
    # Completions may never be 0.
    due = {"parallelism": wish.size} | ({"completions": wish.size} if wish.size else {})
    if all(job["spec"].get(field) == size for field, size in due.items()):
        return {}
    version = job["metadata"].get("resourceVersion")
    return {"metadata": {"resourceVersion": version}, "spec": due}


def _job_as_owner(job: Json) -> Json:
    return reference_to("batch/v1", "Job", job["metadata"])
