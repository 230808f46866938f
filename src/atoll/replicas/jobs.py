"""The Jobs of launches from scripts, which several processes may follow.

A Job carries all that another process needs to follow it: its spec and its desired state. When its
gang is over, the Job ends but stays for its logs; its time to live or its launcher removes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from atoll.backends.kubernetes.executor import DRY_RUN_UID, KubernetesBackend
from atoll.backends.kubernetes.job import Job
from atoll.backends.kubernetes.names import LAUNCH, NAMESPACE, REPLICA, STOP_CAUSE, UID
from atoll.backends.kubernetes.pod import when
from atoll.backends.kubernetes.render import gang_name
from atoll.backends.kubernetes.results import result_in_log, without_results
from atoll.core.checks import RESULTS_VARIABLE
from atoll.core.errors import Conflict, NotFound, Permanent, Temporary, ValidationError
from atoll.core.model import decode, encode
from atoll.core.phase import PhaseReason
from atoll.core.ports import StopCause
from atoll.core.spec import TrainingSpec
from atoll.core.status import DesiredState, LogLine, Observation, Status, Training, sooner
from atoll.replicas.plane import with_cause

Json = dict[str, Any]

POLL_S = 2.0  # how often a gang is observed while its pods cannot be watched


def as_launch(job: Json, spec: TrainingSpec) -> Json:
    """The Job of a launch: its container is called `replica`, and it carries its spec."""
    first = job["spec"]["template"]["spec"]["containers"][0]
    first["name"] = REPLICA
    annotations = job["metadata"].setdefault("annotations", {})
    annotations[LAUNCH] = encode(as_record(spec)).decode()
    return job


def as_record(spec: TrainingSpec) -> TrainingSpec:
    """What of the spec another process needs; what runs is in the Job and its ConfigMap."""
    source = spec.source and spec.source.by_digest()
    return replace(
        spec,
        command=None if source else [REPLICA],
        source=source,
        code=spec.code and spec.code.by_digest(),
        args=[],
        env={name: value for name, value in spec.env.items() if name == RESULTS_VARIABLE},
    )


def training_of(job: Job) -> Training | None:
    """The training of a launch, from its Job; None if it is none, or is being deleted.

    Raises Permanent if it cannot be read: another release may have launched it.
    """
    metadata, desired = job.metadata, job.desired
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    if desired is None or LAUNCH not in annotations or not {UID, NAMESPACE} <= set(labels):
        return None
    try:
        spec = decode(annotations[LAUNCH].encode(), TrainingSpec)
    except ValidationError as error:
        raise Permanent(f"the Job {metadata['name']} cannot be followed: {error}") from error
    cause = cause_of(job, spec, desired)
    is_cancelled = desired.size == 0 and not cause.reason
    training = Training(
        namespace=labels[NAMESPACE],
        uid=labels[UID],
        spec=replace(spec, cancel=is_cancelled),
        status=with_cause(
            Status(desired=desired, discarded_attempts=dict(desired.discarded_attempts)), cause
        ),
        created_at=when(metadata.get("creationTimestamp")) or 0.0,
    )
    return training if gang_name(training) == metadata["name"] else None


def cause_of(job: Job, spec: TrainingSpec, desired: DesiredState) -> StopCause:
    """Why it was stopped, if it was not cancelled: from who stopped it, or from its deadline."""
    text = (job.metadata.get("annotations") or {}).get(STOP_CAUSE)
    if text:
        return StopCause(*msgspec.json.decode(text))
    if desired.size and job.end_reason == PhaseReason.DEADLINE_EXCEEDED:
        message = f"still running {spec.deadline_s or 0:g} s after the start"
        return StopCause(PhaseReason.DEADLINE_EXCEEDED, message)
    return StopCause()


class ScriptJobs(KubernetesBackend):
    """The backend of launches from scripts."""

    is_shared = True

    async def find(self, job_name: str, uid: str | None) -> Training | None:
        try:
            manifest = await self.cluster.get("jobs", self.options.namespace, job_name)
        except NotFound:
            return None
        training = training_of(Job(manifest))
        if training is None or uid not in (None, training.uid):
            return None
        training = replace(training, spec=replace(training.spec, executor=self.name))
        self._note_job(training, manifest)
        return training

    async def stop_cause(self, training: Training) -> StopCause:
        job = await self._job(training)
        if job is None or job.desired is None:
            return StopCause()
        return cause_of(job, training.spec, job.desired)

    async def observe(self, training: Training) -> Observation:
        observation = await super().observe(training)
        if self._jobs.is_live and self._pods.is_live:
            return observation
        return replace(observation, again_in_s=sooner(observation.again_in_s, POLL_S))

    async def apply(self, training: Training, desired: DesiredState) -> None:
        status = training.status
        if desired.size == 0 and status.failing:
            cause = msgspec.json.encode([status.failing, status.failing_message]).decode()
            with contextlib.suppress(NotFound):
                await self._patch_job(training, {"metadata": {"annotations": {STOP_CAUSE: cause}}})
        await super().apply(training, desired)

    async def result(self, training: Training, rank: int) -> tuple[str, bytes] | None:
        found = await super().result(training, rank)
        if found is not None:
            return found

        async def read(last: int | None) -> AsyncIterator[LogLine]:
            lines = await self._archived(training, rank)
            for text in lines if last is None else lines[max(len(lines) - last, 0) :]:
                yield LogLine(rank=rank, text=text)

        return await result_in_log(read, training.uid)

    async def _archived(self, training: Training, rank: int) -> list[str]:
        return await self._archive.lines(self._object_key(training)[0], training.uid, rank)

    async def logs(
        self,
        training: Training,
        *,
        ranks: Sequence[int] | None = None,
        tail: int | None = None,
        follow: Callable[[], bool] | None = None,
    ) -> AsyncIterator[LogLine]:
        """Of pods that were deleted before this process knew them, what others have archived."""
        ranks_read: set[int] = set()
        async for line in super().logs(training, ranks=ranks, tail=tail, follow=follow):
            ranks_read.add(line.rank)
            yield line
        for rank in sorted(set(ranks or ()) - ranks_read):
            lines = without_results(await self._archived(training, rank))
            for text in lines if tail is None else lines[max(len(lines) - tail, 0) :]:
                yield LogLine(rank=rank, text=text)

    async def release(self, training: Training) -> None:
        """Ends a Job that was stopped, as it would not end by itself. Nothing is removed."""
        namespace, name = self._object_key(training)
        try:
            job = Job(await self.cluster.get("jobs", namespace, name))
        except NotFound:
            return
        if job.desired is None or job.desired.size or job.end_reason:
            return
        _, pods = await self._job_and_pods(training)
        if any(pod.is_ending(self._clock()) for pod in pods):
            # The Job would count it as running, and delete it with its log.
            raise Temporary("the last pods are about to end", retry_after_s=0.2)
        with contextlib.suppress(NotFound, Conflict):
            if job.is_suspended:  # it never ran
                await self.cluster.delete("jobs", namespace, name)
            else:
                patch = {"spec": {"parallelism": 0, "activeDeadlineSeconds": 1}}
                await self._patch_job(training, patch)

    async def purge(self, training: Training) -> None:
        await super().release(training)
        await super().purge(training)

    async def dry_run(self, spec: TrainingSpec, namespace: str = "default") -> None:
        """Raises whatever the cluster refuses a launch for, so that nothing is left behind."""
        await self.rehearse(Training(namespace=namespace, uid=DRY_RUN_UID, spec=spec))

    def render_job(self, training: Training, desired: DesiredState, owner: Json | None) -> Json:
        return as_launch(super().render_job(training, desired, owner), training.spec)
