"""Patches of existing Jobs and pods: resize, stop for a while, start again, end. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from atoll.backends.kubernetes.names import (
    BLOCKED_BY,
    DESIRED,
    FINALIZER,
    QUEUE,
    RELEASED,
    SHRINKS,
    STOPPED,
    YIELDED,
)
from atoll.core.model import encode
from atoll.core.status import DesiredState

Json = dict[str, Any]

MAX_SHRINKS = 16
# A strategic merge patch of a pod that removes atoll's finalizer, wherever it is in the list.
DROP_FINALIZER: Json = {"metadata": {"$deleteFromPrimitiveList/finalizers": [FINALIZER]}}


def render_resize(desired: DesiredState, job: Json, now: float) -> Json:
    """A merge patch that resizes the Job; the server refuses it if the Job has changed since.

    An annotation records each shrink, so that ranks that were stopped do not count as failed.
    """
    annotations = {DESIRED: encode(desired).decode()}
    if desired.size < job["spec"]["completions"]:
        annotations |= _shrunk(job, desired.size, now)
    # Completions may never be 0, and may change only together with parallelism.
    spec: Json = {"parallelism": desired.size}
    if desired.size > 0:
        spec["completions"] = desired.size
    version = job["metadata"]["resourceVersion"]
    return {"metadata": {"annotations": annotations, "resourceVersion": version}, "spec": spec}


def render_released() -> Json:
    """A merge patch that ends a Job for good, and marks that its ranks are no longer reported."""
    spec = {"parallelism": 0, "activeDeadlineSeconds": 1}
    return {"metadata": {"annotations": {RELEASED: "true"}}, "spec": spec}


def is_released(job: Json | None) -> bool:
    return RELEASED in ((job or {}).get("metadata", {}).get("annotations") or {})


def is_blocked(job: Json | None) -> bool:
    return BLOCKED_BY in ((job or {}).get("metadata", {}).get("annotations") or {})


def render_unblock(job: Json) -> Json:
    """A merge patch that no longer holds a Job back. If it is in a queue, the queue starts it."""
    patch: Json = {"metadata": {"annotations": {BLOCKED_BY: None}}}
    if QUEUE not in job["metadata"].get("labels", {}):
        patch["spec"] = {"suspend": False}
    return patch


def render_yield(job: Json, now: float) -> Json:
    """A merge patch that stops an incomplete gang for a while, so that others get its nodes."""
    annotations = {YIELDED: str(now), **_shrunk(job, 0, now)}
    return {"metadata": _as_read(job, annotations), "spec": {"parallelism": 0}}


def render_return(job: Json) -> Json:
    """A merge patch that starts a gang again that was stopped for a while."""
    size = job["spec"]["completions"]
    return {"metadata": _as_read(job, {YIELDED: None}), "spec": {"parallelism": size}}


def render_size_restored(job: Json, desired: DesiredState) -> Json:
    """A merge patch that restores the Job's size if somebody else has changed it; else {}."""
    if yielded_at(job) is not None or QUEUE in (job["metadata"].get("labels") or {}):
        return {}
    # Completions may never be 0.
    due = {"parallelism": desired.size} | ({"completions": desired.size} if desired.size else {})
    if all(job["spec"].get(field) == size for field, size in due.items()):
        return {}
    return {"metadata": _as_read(job), "spec": due}


def render_deadline(job: Json, seconds: int) -> Json:
    """A merge patch that moves the Job's own deadline to a later time; {} if it is late enough.

    It ends the Job even if no controller runs. The Job counts from when its pods could be created,
    the training from when its ranks passed the start gate.
    """
    is_later = seconds > job["spec"].get("activeDeadlineSeconds", 0)
    return {"spec": {"activeDeadlineSeconds": seconds}} if is_later else {}


def render_stopped(now: float) -> Json:
    """A strategic merge patch of a pod's status: atoll stops the pod, its rank does not fail."""
    at = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {
        "type": STOPPED,
        "status": "True",
        "reason": "GaveWay",
        "message": "half a gang gives its room back",
        "lastTransitionTime": at,
    }
    return {"status": {"conditions": [condition]}}


def yielded_at(job: Json) -> float | None:
    text = (job["metadata"].get("annotations") or {}).get(YIELDED)
    return float(text) if text else None


def render_lost(node: str | None) -> Json:
    message = f"the node {node} does not answer"
    return {"status": {"phase": "Failed", "reason": "NodeLost", "message": message}}


def _as_read(job: Json, annotations: Json | None = None) -> Json:
    """Metadata of a patch that the server refuses if the object has changed since."""
    version = job["metadata"].get("resourceVersion")
    return {"resourceVersion": version} | ({"annotations": annotations} if annotations else {})


def _shrunk(job: Json, size: int, now: float) -> dict[str, str]:
    text = (job["metadata"].get("annotations") or {}).get(SHRINKS, "[]")
    shrinks = [*msgspec.json.decode(text), [size, round(now, 3)]][-MAX_SHRINKS:]
    return {SHRINKS: msgspec.json.encode(shrinks).decode()}
