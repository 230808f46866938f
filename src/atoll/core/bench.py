"""The link bench of one training: when it runs, its status, and whether ranks may start. Pure.

The bench never delays or fails a training, unless the user sets a floor (`bench_require_gbps`):
then ranks start only once the measured link reaches it.
"""

from __future__ import annotations

from msgspec.structs import replace

from atoll.core.reasons import PhaseReason
from atoll.core.spec import TrainingSpec
from atoll.core.status import BenchPhase, BenchResult, BenchStatus, Observation, Status, Training

LIMIT_S = 120.0  # from the start of a measurement
DONE: frozenset[BenchPhase] = frozenset({"Succeeded", "Failed", "TimedOut", "Skipped"})


def bench_after(
    training: Training, old: BenchStatus, observation: Observation, now: float, ran_s: float
) -> BenchStatus:
    """The status of the bench after an observation. A phase in `DONE` is final.

    `ran_s`: how long it has run, if it runs; the difference of two dates may say otherwise.
    """
    if training.spec.bench.mode == "off" or old.phase in DONE or observation.fault:
        return old
    observed = observation.bench
    if observed is None:
        why = f"executor {training.executor!r} cannot measure links"
        return replace(old, phase="Skipped", message=why, completed_at=now)
    if observed.result is not None:
        message = describe_result(observed.result)
        return replace(
            old, phase="Succeeded", message=message, result=observed.result, completed_at=now
        )
    if observed.state == "failed":
        return replace(old, phase="Failed", message=observed.message, completed_at=now)
    if old.started_at is not None and ran_s >= LIMIT_S:
        message = f"not measured within {LIMIT_S:g} s of its start"
        return replace(old, phase="TimedOut", message=message, completed_at=now)
    if observed.state == "running":
        started_at = now if old.started_at is None else old.started_at
        return replace(old, phase="Running", message=observed.message, started_at=started_at)
    # Idle after Running: its process was killed, so it is run again within the same limit.
    return replace(old, phase=old.phase or "Pending", message=observed.message)


def bench_over(spec: TrainingSpec, bench: BenchStatus, now: float) -> BenchStatus:
    """The final status of the bench once the training has ended."""
    if spec.bench.mode == "off" or bench.phase in DONE:
        return bench
    why = f"the training ended before the link was measured ({bench.phase or 'Pending'})"
    return replace(bench, phase="Skipped", message=why, completed_at=now)


def must_measure(spec: TrainingSpec, status: Status, observation: Observation) -> bool:
    """Whether to start the bench: beside the ranks, or before them if it holds their start."""
    is_idle = observation.bench is not None and observation.bench.state == "idle"
    if spec.bench.mode == "off" or status.bench.phase in DONE or not is_idle:
        return False
    return status.desired is not None or has_floor(spec)


def holds_start(spec: TrainingSpec, bench: BenchStatus) -> bool:
    """Whether ranks must wait for the bench: with a floor, until the measurement is there."""
    return has_floor(spec) and bench.phase != "Succeeded"


def check_floor(spec: TrainingSpec, status: Status) -> tuple[str, str]:
    """Reason and message if the link is below the floor or could not be measured; else empty."""
    floor, bench = spec.bench.require_gbps, status.bench
    if not has_floor(spec) or bench.phase not in DONE or status.gate_opened_at is not None:
        return "", ""
    desired = f"bench_require_gbps={floor:g}"
    if bench.result is None:
        return (
            PhaseReason.BENCH_NOT_MEASURED,
            f"{desired}, but the link is not known: {bench.message}",
        )
    if _rate(bench.result) < (floor or 0.0):
        return PhaseReason.LINK_TOO_SLOW, f"{desired}, but {bench.message}"
    return "", ""


def has_floor(spec: TrainingSpec) -> bool:
    return spec.bench.mode != "off" and spec.bench.require_gbps is not None


def describe_result(result: BenchResult) -> str:
    """One sentence: the two hosts, the bandwidth, and whether ranks run on both of them."""
    a, b, is_own = result.probe_node_a, result.probe_node_b, result.is_worker_pair
    if a == b:
        shared = "loopback: the ranks share it" if is_own else "loopback: no other host was free"
        return f"{a} with itself ({shared}): {_rate(result):.3g} Gbit/s"
    others = "" if is_own else ", which are not both hosts of this training's ranks"
    return f"{a} <-> {b}{others}: {_rate(result):.3g} Gbit/s"


def _rate(result: BenchResult) -> float:
    return result.busbw_gbps_p50 or 0.0
