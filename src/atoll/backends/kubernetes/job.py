"""A Job's manifest, read: its desired state, its start gate, its end; and patches of it. Pure.

A Job is parsed once, when it arrives, as a pod is.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import msgspec

from atoll.backends.kubernetes.names import (
    BLOCKED_BY,
    DESIRED,
    GATE,
    GATE_COUNT,
    GATE_OPENED,
    QUEUE,
    RELEASED,
    SHRINKS,
    YIELDED,
)
from atoll.backends.kubernetes.pod import Pod, when
from atoll.core.model import decode, encode
from atoll.core.status import DesiredState

Json = dict[str, Any]

# Each shrink is 20 bytes of an annotation. An older one matters only to pods that are still ending.
MAX_SHRINKS = 16
# A merge patch that ends a Job for good, and marks that its ranks are no longer reported.
RELEASE: Json = {
    "metadata": {"annotations": {RELEASED: "true"}},
    "spec": {"parallelism": 0, "activeDeadlineSeconds": 1},
}


class Job:
    """A Job's manifest with names for what atoll asks of it."""

    def __init__(self, manifest: Json) -> None:
        self.metadata: Json = manifest["metadata"]
        self.spec: Json = manifest["spec"]
        self.status: Json = manifest.get("status") or {}
        indexes = (self.status.get(f) for f in ("completedIndexes", "failedIndexes"))
        self.has_ended_ranks = any(indexes)
        self.version = int(self.metadata.get("resourceVersion") or 0)
        self.size: int = self.spec.get("completions", 0)
        self.parallelism: int = self.spec.get("parallelism", 0)
        self.is_suspended = bool(self.spec.get("suspend"))
        self.started_at = when(self.status.get("startTime"))
        self._annotations: Json = self.metadata.get("annotations") or {}
        self.is_released = RELEASED in self._annotations
        self.is_blocked = BLOCKED_BY in self._annotations  # by its etcd, which does not answer yet
        self.is_queued = QUEUE in (self.metadata.get("labels") or {})
        self.yielded_at = self._number(YIELDED)
        self.gate_opened_at = self._number(GATE_OPENED)
        together = self._number(GATE_COUNT)
        self.together = None if together is None else int(together)  # let go by the gate at once
        # Whether this Job has a gate; the executor's options may have changed since it was created.
        before = self.spec.get("template", {}).get("spec", {}).get("initContainers") or ()
        self.is_gated = any(container["name"] == GATE for container in before)
        # Why it is over, as it states itself; empty if it is not.
        self.end_reason = ""
        for condition in self.status.get("conditions") or ():
            if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
                self.end_reason = condition.get("reason") or str(condition["type"])

    def _number(self, annotation: str) -> float | None:
        """None also for what is no number: whoever may write the Job may write anything."""
        try:
            return float(self._annotations.get(annotation, ""))
        except ValueError:
            return None

    @functools.cached_property
    def desired(self) -> DesiredState | None:
        """None if it is being deleted or released."""
        text = self._annotations.get(DESIRED)
        if not text or "deletionTimestamp" in self.metadata or self.is_released:
            return None
        return decode(text, DesiredState)

    @functools.cached_property
    def shrinks(self) -> list[tuple[int, float]]:
        """The sizes to which it was shrunk, and when."""
        return [
            (size, at) for size, at in msgspec.json.decode(self._annotations.get(SHRINKS, "[]"))
        ]

    def indexes(self, field: str) -> set[int]:
        """The numbers of a list such as `1,3-5` in its status: 1, 3, 4, 5."""
        numbers: set[int] = set()
        for part in filter(None, (self.status.get(field) or "").split(",")):
            first, _, last = part.partition("-")
            numbers |= set(range(int(first), int(last or first) + 1))
        return numbers

    def is_current(self, pods: Iterable[Pod]) -> bool:
        """Whether it still is as it was read, as its pods show: each rank has exactly one."""
        is_grace_unknown = self.is_gated and self.gate_opened_at is None and self.started_at is None
        if self.desired is None or self.is_suspended or is_grace_unknown:
            return False
        ranks = {p.rank for p in pods if not p.is_leaving and p.rank >= 0}
        return ranks == set(range(self.desired.size))

    def has_suspended(self, pod: Pod, ended_at: float, skew_s: float) -> bool:
        """Whether the pod ended because Kueue, which reclaims quota, or a user suspended it."""
        conditions = self.status.get("conditions") or ()
        suspension: Json = next((c for c in conditions if c["type"] == "Suspended"), {})
        since = when(suspension.get("lastTransitionTime")) or 0.0
        if self.is_suspended:
            return suspension.get("status") != "True" or ended_at >= since - skew_s
        # `since` is when the Job was resumed: the pod is from before the pause.
        return pod.created_at < since

    # Merge patches. With `_as_read`, the server refuses one if the Job has changed since.

    def resize(self, desired: DesiredState, now: float) -> Json:
        """An annotation records each shrink, so that stopped ranks do not count as failed."""
        annotations = {DESIRED: encode(desired).decode()}
        if desired.size < self.size:
            annotations |= self._shrink(desired.size, now)
        return self._as_read(_sizes(desired.size), annotations)

    def unblock(self) -> Json:
        """Stops holding it back. If it is in a queue, the queue starts it."""
        patch: Json = {"metadata": {"annotations": {BLOCKED_BY: None}}}
        return patch if self.is_queued else patch | {"spec": {"suspend": False}}

    def give_way(self, now: float) -> Json:
        """Stops an incomplete gang for a while, so that others get its nodes."""
        return self._as_read({"parallelism": 0}, {YIELDED: str(now), **self._shrink(0, now)})

    def try_again(self) -> Json:
        return self._as_read({"parallelism": self.size}, {YIELDED: None})

    def restore_size(self, desired: DesiredState) -> Json:
        """{} unless somebody else has changed its size."""
        is_right = (self.parallelism, self.size) == (desired.size, desired.size or self.size)
        if is_right or self.is_queued or self.yielded_at is not None:
            return {}
        return self._as_read(_sizes(desired.size))

    def set_deadline(self, seconds: int) -> Json:
        """Moves its own deadline to a later time; {} if it is late enough.

        It ends the Job even if no controller runs. The Job counts from when its pods could be
        created, the training from when its ranks passed the start gate.
        """
        is_later = seconds > self.spec.get("activeDeadlineSeconds", 0)
        return {"spec": {"activeDeadlineSeconds": seconds}} if is_later else {}

    def open_gate(self, now: float, together: int) -> Json:
        """Records the decision to open the start gate, for so many ranks."""
        opened = {GATE_OPENED: str(round(now, 3)), GATE_COUNT: str(together)}
        return {"metadata": {"annotations": opened}}

    def _as_read(self, spec: Json, annotations: Json | None = None) -> Json:
        metadata: Json = {"resourceVersion": self.metadata.get("resourceVersion")}
        if annotations:
            metadata["annotations"] = annotations
        return {"metadata": metadata, "spec": spec}

    def _shrink(self, size: int, now: float) -> dict[str, str]:
        shrinks = [*self.shrinks, (size, round(now, 3))][-MAX_SHRINKS:]
        return {SHRINKS: msgspec.json.encode(shrinks).decode()}


def _sizes(size: int) -> Json:
    """Completions may never be 0, and may change only together with parallelism."""
    return {"parallelism": size} | ({"completions": size} if size else {})
