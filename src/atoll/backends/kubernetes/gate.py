"""The start gate of a gang: it holds pods back until enough ranks can start together. Pure.

A pod waits in an init container of the rank's own image, so a waiting pod has its node and its
image. The Job records the decision to open. Pods created later learn of it from the gang's
ConfigMap. Pods that already wait get an annotation, which the kubelet passes on at once; a changed
ConfigMap takes it a minute.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from atoll.backends.kubernetes.names import GATE, GATE_COUNT, GATE_OPENED, START
from atoll.backends.kubernetes.patch import is_blocked, yielded_at
from atoll.backends.kubernetes.pod import TURNED_AWAY, Pod, when
from atoll.core.spec import may_start
from atoll.core.status import DesiredState, Training

Json = dict[str, Any]

FOLDER = "/atoll/gate"
OPEN = "open"  # the key in the gang's ConfigMap
# Process 1 of a container ignores SIGTERM unless it has a handler; and not every `sleep` takes
# fractions of a second.
WAIT = (
    f"trap 'exit {TURNED_AWAY}' TERM; "
    f'until [ -n "$ATOLL_START" ] || [ -s {FOLDER}/start ]; '
    "do sleep 0.1 || sleep 1 || exit 1; done"
)
# A pod deleted before it could start does not use up a restart of its rank.
TURNED_AWAY_RULE: Json = {
    "action": "Ignore",
    "onExitCodes": {"containerName": GATE, "operator": "In", "values": [TURNED_AWAY]},
}


class StartGate(NamedTuple):
    """The state of the gate in one observation. The defaults describe a gang without one."""

    opened_at: float | None = None
    is_due: bool = False  # the gate must be opened now
    to_start: list[Pod] = []  # waiting pods that must be let through now
    due_in_s: float | None = None  # until the start grace ends, and fewer than all ranks suffice
    message: str = ""
    together: int | None = None  # how many ranks start together, once that is decided


def render_gate(gang: str, rank: Json) -> Json:
    """The init container that runs before the container `rank`.

    It has the same size: a smaller one would change the pod's quality-of-service class.
    """
    limits = (rank.get("resources") or {}).get("limits") or {}
    amounts = {name: value for name, value in limits.items() if name in ("cpu", "memory")}
    started = {"configMapKeyRef": {"name": gang, "key": OPEN, "optional": True}}
    container: Json = {
        "name": GATE,
        "image": rank["image"],
        "command": ["sh", "-c", WAIT],
        "env": [{"name": "ATOLL_START", "valueFrom": started}],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": GATE, "mountPath": FOLDER, "readOnly": True}],
    }
    if amounts:
        container["resources"] = {"requests": amounts, "limits": amounts}
    return container | {f: rank[f] for f in ("imagePullPolicy", "securityContext") if f in rank}


def render_gate_volume() -> Json:
    field = {"fieldPath": f"metadata.annotations['{START}']"}
    return {"name": GATE, "downwardAPI": {"items": [{"path": "start", "fieldRef": field}]}}


def render_opened(now: float, together: int) -> Json:
    """A merge patch of the Job that records the decision to open, for so many ranks."""
    opened = {GATE_OPENED: str(round(now, 3)), GATE_COUNT: str(together)}
    return {"metadata": {"annotations": opened}}


def render_opened_world(*, is_opened: bool = True) -> dict[str, str]:
    """Data for the gang's ConfigMap: whether pods created from now on find the gate open."""
    return {OPEN: "true" if is_opened else ""}


def render_start(together: int | None) -> Json:
    """A merge patch that lets a waiting pod start; its rank learns how many start with it."""
    return {"metadata": {"annotations": {START: str(together or "true")}}}


def render_together() -> Json:
    """Where the variable with that number has its value from; empty for ranks that start later."""
    return {"fieldRef": {"fieldPath": f"metadata.annotations['{START}']"}}


def opened_at(job: Json | None) -> float | None:
    text = ((job or {}).get("metadata", {}).get("annotations") or {}).get(GATE_OPENED)
    return float(text) if text else None


def _together(job: Json) -> int | None:
    text = (job["metadata"].get("annotations") or {}).get(GATE_COUNT)
    return int(text) if text else None


def is_open(job: Json | None) -> bool:
    return opened_at(job) is not None


def is_gated(job: Json) -> bool:
    """Whether this Job has a gate; the executor's options may have changed since it was made."""
    pod = job["spec"].get("template", {}).get("spec", {})
    return any(container["name"] == GATE for container in pod.get("initContainers") or ())


def is_grace_unknown(job: Json) -> bool:
    """Whether the Job must be read again to know when its start grace ends."""
    return is_gated(job) and not is_open(job) and "startTime" not in job.get("status", {})


def read_gate(
    training: Training,
    job: Json | None,
    desired: DesiredState | None,
    newest: Iterable[Pod],
    now: float,
) -> StartGate:
    """`newest` is the last pod of each rank."""
    if job is None or desired is None or not is_gated(job):
        return StartGate()
    world = training.spec.world_size
    candidates = [p for p in newest if p.rank < world.target and not p.is_leaving and not p.is_over]
    waiting = [p for p in candidates if p.is_at_gate]
    unreleased = [p for p in waiting if START not in p.annotations]
    if is_open(job):
        return StartGate(
            opened_at(job),
            to_start=unreleased,
            message="start gate: open, starting",
            together=_together(job),
        )
    able = sum(p.is_at_gate or p.has_passed for p in candidates)
    # Time in a queue does not count: the Job's start time is when it left the queue.
    since = when(job.get("status", {}).get("startTime"))
    left = None if since is None else since + training.spec.start_grace_s - now
    is_grace_over = left is not None and left <= 0
    is_ending = training.is_cancelling or bool(training.status.failing)
    is_due = (
        desired.size > 0
        and not is_ending
        and yielded_at(job) is None
        and not is_blocked(job)
        and may_start(able, world, is_grace_over=is_grace_over)
    )
    return StartGate(
        is_due=is_due,
        to_start=unreleased if is_due else [],
        due_in_s=None if is_grace_over else left,
        message=f"start gate: {able} of {world.target} ranks are ready to start",
        together=able if is_due else None,
    )
