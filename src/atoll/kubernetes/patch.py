"""What is changed in objects that are there: resizing, giving way, coming back. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from atoll.core.model import encode
from atoll.core.status import Wish
from atoll.kubernetes.names import (
    FINALIZER,
    HELD,
    QUEUE,
    RELEASED,
    SHRINKS,
    STOPPED,
    WISH,
    YIELDED,
)

Json = dict[str, Any]

SHRINKS_KEPT = 16
# A strategic merge patch of a pod: without our finalizer, wherever it is in the list.
LET_GO: Json = {"metadata": {"$deleteFromPrimitiveList/finalizers": [FINALIZER]}}


def render_resize(wish: Wish, before: Json, now: float) -> Json:
    """A merge patch of the Job as it was read; refused if it has changed since.

    Shrinking is noted, to tell stopped ranks from fallen ones.
    """
    annotations = {WISH: encode(wish).decode()}
    if wish.size < before["spec"]["completions"]:
        annotations |= _shrunk(before, wish.size, now)
    # Completions may never be 0, and may change only together with parallelism.
    spec: Json = {"parallelism": wish.size}
    if wish.size > 0:
        spec["completions"] = wish.size
    version = before["metadata"]["resourceVersion"]
    return {"metadata": {"annotations": annotations, "resourceVersion": version}, "spec": spec}


def render_released() -> Json:
    """A merge patch that ends a Job for good, and says that its ranks are no longer asked after."""
    spec = {"parallelism": 0, "activeDeadlineSeconds": 1}
    return {"metadata": {"annotations": {RELEASED: "true"}}, "spec": spec}


def is_released(job: Json | None) -> bool:
    return RELEASED in ((job or {}).get("metadata", {}).get("annotations") or {})


def is_held(job: Json | None) -> bool:
    return HELD in ((job or {}).get("metadata", {}).get("annotations") or {})


def render_unhold(before: Json) -> Json:
    """A merge patch that holds a Job no longer. One in a queue is let go by that."""
    patch: Json = {"metadata": {"annotations": {HELD: None}}}
    if QUEUE not in before["metadata"].get("labels", {}):
        patch["spec"] = {"suspend": False}
    return patch


def render_yield(before: Json, now: float) -> Json:
    """A merge patch that stops half a gang for a while."""
    annotations = {YIELDED: str(now), **_shrunk(before, 0, now)}
    return {"metadata": _as_read(before, annotations), "spec": {"parallelism": 0}}


def render_return(before: Json) -> Json:
    """A merge patch that lets a gang try again."""
    size = before["spec"]["completions"]
    return {"metadata": _as_read(before, {YIELDED: None}), "spec": {"parallelism": size}}


def render_size_restored(before: Json, wish: Wish) -> Json:
    """A merge patch that gives a Job its size back which somebody has changed; {} if nobody has."""
    if yielded_at(before) is not None or QUEUE in (before["metadata"].get("labels") or {}):
        return {}
    # Completions may never be 0.
    due = {"parallelism": wish.size} | ({"completions": wish.size} if wish.size else {})
    if all(before["spec"].get(field) == size for field, size in due.items()):
        return {}
    return {"metadata": _as_read(before), "spec": due}


def render_deadline(before: Json, seconds: int) -> Json:
    """A merge patch: the Job is over then, should nobody be there to say so; {} if it is already.

    The Job counts from when its pods could be made, the training from when its ranks were let go.
    """
    is_later = seconds > before["spec"].get("activeDeadlineSeconds", 0)
    return {"spec": {"activeDeadlineSeconds": seconds}} if is_later else {}


def render_stopped(now: float) -> Json:
    """A strategic merge patch of a pod's status: its end is ours and not the rank's."""
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
    words = f"the node {node} does not answer"
    return {"status": {"phase": "Failed", "reason": "NodeLost", "message": words}}


def _as_read(before: Json, annotations: Json | None = None) -> Json:
    """Metadata of a patch that is refused if the object has changed since."""
    version = before["metadata"].get("resourceVersion")
    return {"resourceVersion": version} | ({"annotations": annotations} if annotations else {})


def _shrunk(before: Json, size: int, now: float) -> dict[str, str]:
    text = (before["metadata"].get("annotations") or {}).get(SHRINKS, "[]")
    shrinks = [*msgspec.json.decode(text), [size, round(now, 3)]][-SHRINKS_KEPT:]
    return {SHRINKS: msgspec.json.encode(shrinks).decode()}
