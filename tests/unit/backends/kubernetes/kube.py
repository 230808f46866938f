"""Trainings, Jobs and pods as the cluster would show them, for tests that need no cluster."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from atoll.backends.kubernetes import read
from atoll.backends.kubernetes.deleted_pods import DeletedState
from atoll.backends.kubernetes.job import Job
from atoll.backends.kubernetes.names import DESIRED, FAILURES, FINALIZER, INDEX
from atoll.backends.kubernetes.options import KubernetesOptions as Options
from atoll.backends.kubernetes.pod import Pod
from atoll.backends.kubernetes.read import GangView
from atoll.core.model import encode
from atoll.core.spec import Resources, Source, TrainingSpec, WorldSize
from atoll.core.status import DesiredState, ObservedRank, RankStatus, Status, Training

Json = dict[str, Any]
NOW = 1_800_000_000.0
MADE = NOW - 100

__all__ = ["MADE", "NOW", "Json", "Options", "Resources", "Source", "job", "pod", "training"]

NO_ROOM = {
    "PodScheduled": {
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/2 nodes are available: 2 Insufficient nvidia.com/gpu. preemption: 0/2 nodes "
        "are available: 2 No preemption victims found for incoming pod.",
    }
}
TAINTED = {
    "DisruptionTarget": {
        "status": "True",
        "reason": "DeletionByTaintManager",
        "message": "Taint manager: deleting due to NoExecute taint",
    },
    "Ready": {"status": "False"},
}


def training(*, status: Status | None = None, **spec: Any) -> Training:
    given = {
        "name": "tiny-gpt",
        "world_size": WorldSize(min=2, target=3, max=8),
        "command": ["python", "train.py"],
        "image": "ghcr.io/acme/train:1",
        "executor": "kubernetes",
    } | spec
    return Training(
        namespace="team-a",
        uid="5f1c3b1e-0000-4000-8000-000000000001",
        spec=TrainingSpec(**given),
        status=status or Status(),
        created_at=MADE,
    )


def stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def job(size: int = 3, *, annotations: Json | None = None, **spec: Any) -> Json:
    return {
        "metadata": {
            "name": "tiny-gpt-0",
            "namespace": "team-a",
            "annotations": {
                DESIRED: encode(DesiredState(version=1, size=size)).decode(),
                **(annotations or {}),
            },
        },
        "spec": {"completions": size, "parallelism": size, **spec},
        "status": {},
    }


def pod(
    rank: int,
    state: Json | None = None,
    *,
    phase: str = "Running",
    restarts: int = 0,
    made_at: float = MADE,
    deleted_at: float | None = None,
    node: str | None = "node-1",
    conditions: dict[str, Json] | None = None,
    reason: str = "",
    message: str = "",
    has_finalizer: bool = False,
    gate: Json | None = None,
    annotations: Json | None = None,
) -> Json:
    """`state` is the container's: `{"running": {...}}`, `{"terminated": {...}}`, …

    `gate` is that of the start gate before it.
    """
    metadata: Json = {
        "name": f"tiny-gpt-0-{rank}-{int(made_at) % 100000}",
        "namespace": "team-a",
        "creationTimestamp": stamp(made_at),
        "annotations": {INDEX: str(rank), FAILURES: str(restarts), **(annotations or {})},
        "ownerReferences": [{"kind": "Job", "name": "tiny-gpt-0"}],
        "finalizers": [FINALIZER] if has_finalizer else [],
    }
    if deleted_at is not None:
        metadata |= {"deletionTimestamp": stamp(deleted_at + 10), "deletionGracePeriodSeconds": 10}
    status: Json = {"phase": phase}
    if state is not None:
        status["containerStatuses"] = [{"name": "rank", "state": state}]
    if gate is not None:
        status["initContainerStatuses"] = [{"name": "start-gate", "state": gate}]
    status["conditions"] = [{"type": kind, **rest} for kind, rest in (conditions or {}).items()]
    if reason:
        status |= {"reason": reason, "message": message}
    spec: Json = {"containers": [{"image": "ghcr.io/acme/train:1"}]}
    if node is not None:
        spec["nodeName"] = node
    return {"metadata": metadata, "spec": spec, "status": status}


def running(since: float = MADE + 5) -> Json:
    return {"running": {"startedAt": stamp(since)}}


def ended(code: int, reason: str = "Error", message: str = "", at: float = NOW - 10) -> Json:
    return {
        "terminated": {
            "exitCode": code,
            "reason": reason,
            "message": message,
            "startedAt": stamp(MADE + 5),
            "finishedAt": stamp(at),
        }
    }


def observe_gang(
    subject: Training, gang: Json | None, pods: Any, *rest: Any, **more: Any
) -> GangView:
    """One observation of these manifests."""
    if "deleted" in more:
        deleted: DeletedState = more.pop("deleted")
        more["deleted"] = deleted._replace(pods=[Pod(manifest) for manifest in deleted.pods])
    parsed = None if gang is None else Job(gang)
    return read.observe_gang(subject, parsed, [Pod(manifest) for manifest in pods], *rest, **more)


def known(rank: int, *, attempt: int, **rest: Any) -> RankStatus:
    return RankStatus(rank=rank, attempt=attempt, **rest)


def observation(*pods: Json, gang: Json | None = None, **options: Any) -> GangView:
    return observe_gang(training(), gang or job(), pods, Options(**options), NOW)


def only(found: GangView) -> ObservedRank:
    """The one rank that has a pod."""
    (rank,) = [r for r in found.observation.ranks if r.pod_name]
    return rank
