"""A training as the basilica-sdk client reads it. Pure.

The client decodes strictly: a required field may be neither missing nor null, and an optional
field may be missing but not null.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from msgspec.structs import replace

from atoll.core.describe import describe_phase
from atoll.core.phase import Phase
from atoll.core.status import BenchStatus, Event, RankStatus, Status, Training, WorldStatus

Json = dict[str, Any]

UNKNOWN_EXIT = -1  # the client accepts only integers, and 0 would mean success
GBIT_PER_GBYTE = 8.0

STATES: dict[Phase, str] = {
    Phase.NONE: "Pending",
    Phase.PENDING: "Pending",
    Phase.READY: "Active",
    Phase.SUCCEEDED: "Succeeded",
    Phase.FAILED: "Failed",
    Phase.CANCELLED: "Cancelled",
}
RANK_PHASES = {"Stopped": "Failed"}  # the client does not know this phase
CONTAINER_STATES = {"Pending": "waiting", "Running": "running"}
DEFAULT_PORTS = {"etcd-v2": 2379, "c10d": 29_400, "static": 29_400, "none": 29_400}
OUTCOMES = {"Succeeded": "success", "Failed": "error", "TimedOut": "timeout", "Skipped": "skipped"}


def deployment(training: Training) -> Json:
    """The answer of create, get, scale and restart."""
    status = training.status
    ranks = status.ranks
    answer = {
        **list_item(training),
        "userId": training.namespace,
        "namespace": training.namespace,
        "phase": phase_of(training),
        "message": _message(status) or "accepted",
        "pods": [_pod(training, rank) for rank in ranks],
        "containerStatuses": [_container(training, rank) for rank in ranks],
        "distributed": distributed(training),
    }
    if training.spec.image is not None:
        answer["image"] = training.spec.image
    if status.ended_at is not None:
        answer["updatedAt"] = timestamp(status.ended_at)
    return answer


def _message(status: Status) -> str:
    """The status message; a failure begins with its reason, which has no field here."""
    if status.phase is Phase.FAILED and status.reason:
        return f"{status.reason}: {describe_phase(status)}"
    return status.message


def list_item(training: Training) -> Json:
    """One item of the list."""
    world = world_of(training)
    is_leaving = training.deletion_requested_at is not None
    return {
        "instanceName": training.name,
        "friendlyName": training.name,
        "state": "Terminating" if is_leaving else STATES[training.status.phase],
        "url": "",
        "replicas": {"desired": world["target"], "ready": world["ready"]},
        "createdAt": timestamp(training.created_at),
        "public": False,
        "publicMetadata": False,
    }


def phase_of(training: Training) -> str:
    phase = training.status.phase
    is_stopped = phase is Phase.CANCELLED and not training.spec.cancel  # by being deleted
    if training.deletion_requested_at is not None and (is_stopped or not phase.is_terminal):
        return "terminating"
    return phase.value or "pending"


def world_of(training: Training) -> Json:
    """The newest target, and a `ready` that makes the client's waits end correctly.

    The client compares `ready` with `min` and `target` and looks at nothing else. So a resize in
    progress always shows fewer ranks than its target. A training that is over shows the ranks that
    had started, so that one that ends before the first poll is not waited for. A failed training
    shows its target only where the target equals the minimum.
    """
    size, status = training.spec.world_size, training.status
    world = training.world
    if status.phase.is_terminal:
        ran = sum(r.rank < size.target and r.started_at is not None for r in status.ranks)
        world = WorldStatus.of(ran, size)
    ready = world.ready
    if status.phase in (Phase.FAILED, Phase.CANCELLED):
        ready = min(ready, max(size.min, size.target - 1))
    if not status.phase.is_terminal and _has_resize(training):
        ready = min(ready, size.target - 1)
    return {
        "ready": ready,
        "target": world.target,
        "min": world.min,
        "max": world.max,
        "belowMinimum": world.below_minimum,
    }


def is_settled(training: Training) -> bool:
    """Whether the client's waits would return."""
    world = world_of(training)
    is_there: bool = world["ready"] >= world["target"]
    return training.status.phase.is_terminal or is_there


def _has_resize(training: Training) -> bool:
    is_observed = training.status.observed_generation == training.generation
    return not is_observed or training.has_surplus


def distributed(training: Training) -> Json:
    spec, status = training.spec, training.status
    backend = spec.rendezvous.backend
    _, _, port = status.rendezvous_endpoint.rpartition(":")
    is_degraded = any(c.type == "DegradedMesh" and c.status == "True" for c in status.conditions)
    answer: Json = {
        "worldSize": world_of(training),
        "transport": "hub-relay" if is_degraded else "direct-mesh",
        "ranks": [_rank(training, rank) for rank in status.ranks],
        "conditions": [
            {
                "type": condition.type,
                "status": condition.status,
                "reason": condition.reason,
                "message": condition.message,
                "lastTransitionTime": timestamp(condition.last_transition_at),
            }
            for condition in status.conditions
        ],
        "rendezvous": {
            "backend": backend,
            "port": int(port) if port.isdigit() else DEFAULT_PORTS[backend],
        },
        "worldSizeHistory": [
            {"timestamp": timestamp(point.at), "target": point.target, "ready": point.ready}
            for point in status.world_size_history
        ],
        "milestones": [
            {"name": name, "timestamp": timestamp(at)}
            for name, at in _milestones(training)
            if at is not None
        ],
        "bench": _bench(spec.bench.mode, _final(training)),
        "rankExits": [
            {
                "rank": ended.rank,
                "exitCode": UNKNOWN_EXIT if ended.exit_code is None else ended.exit_code,
                "restartCount": ended.restart_count,
                "terminationReason": ended.termination_reason,
            }
            for ended in status.rank_exits
        ],
    }
    if (resize := status.last_resize) is not None:
        answer["lastResize"] = {
            "fromTarget": resize.from_target,
            "toTarget": resize.to_target,
            "timestamp": timestamp(resize.at),
            "reason": "ScaleRequested",
        }
    return answer


def _milestones(training: Training) -> list[tuple[str, float | None]]:
    status = training.status
    return [
        ("Created", training.created_at),
        ("Admitted", status.gate_opened_at),
        ("FirstRankStarted", status.started_at),
        ("Ended", status.ended_at),
    ]


def _rank(training: Training, rank: RankStatus) -> Json:
    return {
        "rank": rank.rank,
        "podName": _pod_name(training, rank),
        "phase": RANK_PHASES.get(rank.phase, rank.phase),
        "restarts": rank.restarts,
        "nodeName": rank.node,
        "provider": rank.provider,
        "region": rank.region,
    }


def _pod(training: Training, rank: RankStatus) -> Json:
    return {"name": _pod_name(training, rank), "status": rank.phase, "node": rank.node}


def _container(training: Training, rank: RankStatus) -> Json:
    ended = rank.exit
    return {
        "podName": _pod_name(training, rank),
        "containerName": "rank",
        "state": CONTAINER_STATES.get(rank.phase, "terminated"),
        "restartCount": rank.restarts,
        "reason": ended.reason if ended else None,
        "message": rank.message or None,
    }


def _pod_name(training: Training, rank: RankStatus) -> str:
    return rank.pod_name or f"{training.name}-{rank.rank}"


def _final(training: Training) -> BenchStatus:
    """The bench status; a bench that was unfinished when the training ended counts as skipped."""
    bench = training.status.bench
    if not training.status.phase.is_terminal or bench.phase in OUTCOMES:
        return bench
    message = bench.message or "the training ended before its link was measured"
    return replace(bench, phase="Skipped", message=message)


def _bench(mode: str, bench: BenchStatus) -> Json:
    if mode == "off":
        return {"mode": mode}
    answer: Json = {
        "mode": mode,
        "phase": bench.phase or "Pending",
        "message": bench.message or None,
        "startedAt": None if bench.started_at is None else timestamp(bench.started_at),
        "completedAt": None if bench.completed_at is None else timestamp(bench.completed_at),
    }
    if bench.phase in OUTCOMES:
        answer["lastAttemptOutcome"] = OUTCOMES[bench.phase]
        answer["lastAttemptAt"] = answer["completedAt"] or answer["startedAt"]
    if (result := bench.result) is not None:
        answer["result"] = {
            "measuredAt": timestamp(result.measured_at),
            "probeNodeA": result.probe_node_a,
            "probeNodeB": result.probe_node_b,
            "sizeBytesSwept": result.size_bytes_swept,
            "busbwGbpsP10": _gbytes(result.busbw_gbps_p10),
            "busbwGbpsP50": _gbytes(result.busbw_gbps_p50),
            "busbwGbpsP90": _gbytes(result.busbw_gbps_p90),
            "algbwGbpsP50": _gbytes(result.algbw_gbps_p50),
            "latencyUsAt1mib": result.latency_us_at_1mib,
        }
    return answer


def _gbytes(gbits: float | None) -> float | None:
    """Gbit/s as GB/s, which the client means where its field names say Gbps."""
    return None if gbits is None else gbits / GBIT_PER_GBYTE


def event_item(event: Event) -> Json:
    return {
        "type": event.type,
        "reason": event.reason,
        "message": event.message,
        "count": event.count,
        "last_timestamp": timestamp(event.at),
    }


def timestamp(at: float) -> str:
    """A UTC time in ISO 8601, with three digits: Python 3.10 reads only 0, 3 or 6 of them."""
    text = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")
