"""Launches from scripts, which several processes may follow: what their Job says of them. Pure.

A Job carries all that another process needs to follow it: its spec and its desired state. When its
gang is over, the Job ends but stays for its logs; its time to live or its launcher removes it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from atoll.backends.kubernetes.job import Job
from atoll.backends.kubernetes.names import LAUNCH, NAMESPACE, REPLICA, STOP_CAUSE, UID
from atoll.backends.kubernetes.pod import when
from atoll.backends.kubernetes.render import gang_name
from atoll.core.checks import RESULTS_VARIABLE
from atoll.core.errors import Permanent, ValidationError
from atoll.core.model import decode, encode
from atoll.core.phase import PhaseReason
from atoll.core.ports import StopCause
from atoll.core.spec import TrainingSpec
from atoll.core.status import DesiredState, Status, Training

Json = dict[str, Any]


def as_launch(job: Json, spec: TrainingSpec) -> Json:
    """Makes it the Job of a launch: its container is called `replica`, and it carries its spec."""
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
        status=Status(
            desired=desired,
            discarded_attempts=dict(desired.discarded_attempts),
            failing=cause.reason,
            failing_message=cause.message,
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
