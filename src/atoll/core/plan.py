"""Decides what to do next with one training: `plan(training, observation, now)`. Pure.

Restarts, lost ranks, quorum, scaling, cancelling, deadlines and the end are decided here and
nowhere else. The status is written first, then the actions are performed; all of them may be
repeated, so the controller may die between any two steps.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from atoll.core.attempts import superseded_attempts
from atoll.core.bench import LIMIT_S as BENCH_LIMIT_S
from atoll.core.bench import bench_after, bench_over, check_floor, holds_start, must_measure
from atoll.core.clock import STEP_S, Now
from atoll.core.conditions import set_condition
from atoll.core.describe import describe_status, events_between
from atoll.core.errors import UDTerminalState
from atoll.core.mesh import MeshState
from atoll.core.phase import Phase, Tally, advance
from atoll.core.rank_ranges import limited_spans
from atoll.core.ranks import (
    classify,
    final_exits,
    is_discardable,
    is_lost,
    merge_ranks,
    root_cause_of,
    waiting_message,
    with_bounded_ends,
    with_bounded_messages,
    with_texts_of,
)
from atoll.core.reasons import PhaseReason
from atoll.core.spec import WorldSize, may_start
from atoll.core.stall import STALLED, stall_condition, stalled_ranks
from atoll.core.status import (
    AttemptStatus,
    Condition,
    DesiredState,
    Event,
    Observation,
    RankStatus,
    Resize,
    Status,
    Training,
    WorldPoint,
    WorldStatus,
)
from atoll.core.warnings import CONDITION, WARNED, find_warnings, merge_warnings

# How late an observation may be: Kubernetes' watch caches and a busy shared file system lag by one
# or two seconds. Until then an executor that shows nothing may just not have been asked yet.
STALE_S = 3.0
MAX_HISTORY = 100  # changes of the world size in a status: a chart, about 5 kB


class Apply(NamedTuple):
    desired: DesiredState


class Stop(NamedTuple):
    pass


class Measure(NamedTuple):
    """The link between two hosts, beside the ranks."""


class Delete(NamedTuple):
    """Removes the logs and the record as well."""


Action = Apply | Measure | Stop | Delete


class Plan(NamedTuple):
    status: Status
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_after_s: float | None = None
    attempts: tuple[AttemptStatus, ...] = ()  # that have a successor since the status before


def plan(training: Training, observation: Observation, time: Now) -> Plan:
    """The next status, the actions to perform after it is written, and when to observe again."""
    now = _now(training.status, observation, time)
    if training.status.phase.is_terminal:
        return _plan_after_end(training, observation, now)
    original, training = training, _with_reachable_target(training, observation)
    status = _merge_observation(training, observation, now)
    status, actions = _decide(training, status, observation, now)
    status = _conclude(training, status, observation, now)
    if must_measure(training.spec, status, observation):
        actions = (*actions, Measure())
    if status.phase.is_terminal:
        actions = ()
    events = events_between(training.status, status, now.wall)
    if status.phase.is_terminal and training is not original:
        events = (*events, _refusal(original, status.phase, now))
    return Plan(
        status,
        actions,
        events,
        _requeue_after_s(training, status, observation, now),
        superseded_attempts(training.status, status, observation),
    )


def _now(status: Status, observation: Observation, time: Now) -> Now:
    executor = time.monotonic + status.clock_skew if observation.at is None else observation.at
    return time._replace(executor=executor)


def _started_monotonic(status: Status, what: str, wall: float) -> float:
    """The monotonic time of what the wall clock dated `wall`."""
    return status.started_monotonic.get(what, wall)


def _with_monotonic(status: Status, what: str, now: Now) -> dict[str, float]:
    """With the monotonic time of an event of now, where it differs from the wall's."""
    if now.monotonic == now.wall:
        return status.started_monotonic
    return {**status.started_monotonic, what: now.monotonic}


def _merge_observation(training: Training, observation: Observation, now: Now) -> Status:
    """The status with its ranks as observed, merged with what was known of them."""
    old, world = training.status, training.spec.world_size
    merged = with_bounded_ends(
        merge_ranks(
            [*old.ranks, *old.removed_ranks], observation, training.spec, now.executor
        ).values()
    )
    discarded_attempts = dict(old.discarded_attempts)
    ranks, removed_ranks = [], []
    for number in sorted({*merged, *range(world.target)}):
        rank = merged.get(number) or RankStatus(rank=number)
        if number < world.target or rank.is_alive or rank.is_stopping:
            ranks.append(rank)
        else:
            removed_ranks.append(rank)
            discarded_attempts[number] = rank.attempt
    is_stopping = bool(old.failing) or training.is_cancelling
    for rank in ranks:
        if rank.exit is not None and is_discardable(rank.exit) and not is_stopping:
            discarded_attempts[rank.rank] = rank.attempt
    target = world.target
    started = [r.started_at for r in (*ranks, *removed_ranks) if r.started_at is not None]
    skew = now.executor - now.monotonic
    bench_from = _started_monotonic(old, "bench", old.bench.started_at or now.monotonic)
    bench = bench_after(training, old.bench, observation, now.wall, now.monotonic - bench_from)
    if old.phase is Phase.NONE:
        old = replace(old, started_monotonic=_with_monotonic(old, "created", now))
    if bench.started_at is not None and old.bench.started_at is None:
        old = replace(old, started_monotonic=_with_monotonic(old, "bench", now))
    status = replace(
        old,
        ranks=[
            classify(r, training.spec, is_discarded=_is_discarded(r, discarded_attempts, target))
            for r in ranks
        ],
        removed_ranks=[classify(r, training.spec) for r in removed_ranks],
        discarded_attempts=discarded_attempts,
        started_at=old.started_at if old.started_at is not None else min(started, default=None),
        rendezvous_endpoint=observation.rendezvous_endpoint or old.rendezvous_endpoint,
        mesh=observation.mesh or old.mesh,
        gate_opened_at=observation.gate_opened_at
        if old.gate_opened_at is None
        else old.gate_opened_at,
        bench=bench,
        stalled=stalled_ranks(training, ranks, observation, now.wall),
        warnings=merge_warnings(old.warnings, find_warnings(training, ranks, observation.rounds)),
        clock_skew=old.clock_skew if abs(skew - old.clock_skew) <= STEP_S else round(skew, 3),
    )
    is_first = _released_at(old, observation) is None
    let_go_at = _released_at(status, observation)
    if is_first and let_go_at is not None and abs(skew) > STEP_S:
        counted = {**status.started_monotonic, "let go": let_go_at - skew}
        status = replace(status, started_monotonic=counted)
    return status


def _decide(
    training: Training, status: Status, observation: Observation, now: Now
) -> tuple[Status, tuple[Action, ...]]:
    """Decides to stop, start or resize, and whether the training must fail."""
    world = training.spec.world_size
    is_cancelling = training.is_cancelling
    if not status.failing and (not is_cancelling or _has_failed_by_itself(status, world)):
        reason, message = _reason_to_fail(training, status, observation, now)
        status = replace(status, failing=reason, failing_message=message)
    if is_cancelling or status.failing:
        is_launched = observation.desired is not None and _alive(status, observation, now) > 0
        return _request(status, observation, 0, now) if is_launched else (status, ())
    if status.gate_opened_at is None and not _may_start(training, status, observation, now):
        return status, ()
    if status.gate_opened_at is None and not observation.has_gate:
        status = replace(status, gate_opened_at=now.wall)
    if observation.desired is None and status.has_run:
        return status, ()  # late or lost; applying it again would start ranks twice
    size = world.target if observation.capacity is None else min(world.target, observation.capacity)
    return _request(status, observation, size, now) if size else (status, ())


def _has_failed_by_itself(status: Status, world: WorldSize) -> bool:
    """Whether all ranks ended by themselves and too many failed: there is nothing to cancel."""
    if status.desired is not None and status.desired.size == 0:
        return False  # they were stopped before
    ranks = status.ranks[: world.target]
    ended = [r for r in ranks if r.phase in ("Succeeded", "Failed")]
    return len(ended) == len(ranks) and sum(map(is_lost, ended)) > world.target - world.min


def _request(
    status: Status, observation: Observation, size: int, now: Now
) -> tuple[Status, tuple[Action, ...]]:
    """Records that `size` ranks are desired, and applies it unless the executor has it."""
    discarded_attempts = {
        rank: attempt for rank, attempt in status.discarded_attempts.items() if rank < size
    }
    desired = status.desired
    if desired is None or (desired.size, desired.discarded_attempts) != (size, discarded_attempts):
        desired = DesiredState(
            version=desired.version + 1 if desired else 1,
            size=size,
            discarded_attempts=discarded_attempts,
        )
    status = replace(
        status,
        desired=desired,
        desired_at=now.monotonic if observation.desired is None else status.desired_at,
    )
    is_work_left = any(r.phase == "Pending" for r in status.ranks[:size])
    is_applied = observation.desired == desired and (observation.is_supervised or not is_work_left)
    return status, () if is_applied else (Apply(desired),)


def _conclude(training: Training, status: Status, observation: Observation, now: Now) -> Status:
    """The status with phase, world, messages and conditions; with the exits at the end."""
    old, world = training.status, training.spec.world_size
    wanted = [r for r in status.ranks if r.rank < world.target and not is_lost(r)]
    ready = sum(r.is_ready for r in wanted)
    tally = Tally(
        min=world.min,
        wanted=len(wanted),
        ready=ready,
        succeeded=sum(r.phase == "Succeeded" for r in wanted),
        alive=_alive(status, observation, now),
        is_failing=bool(status.failing),
        is_cancelling=training.is_cancelling,
        is_gate_open=status.gate_opened_at is not None,
    )
    verdict = advance(old.phase, tally)
    assert verdict is not None
    status = replace(
        status,
        phase=verdict.phase,
        reason=status.failing or verdict.reason,
        observed_generation=training.generation,
        world=WorldStatus.of(ready, world),
        ranks=with_bounded_messages(
            waiting_message(r, status, observation, world) for r in status.ranks
        ),
    )
    if verdict.phase.is_terminal:
        root = root_cause_of(status, world) if verdict.phase is Phase.FAILED else None
        if root is not None:
            root = with_texts_of(root, observation)
            ranks = [root if r.rank == root.rank else r for r in status.ranks]
            status = replace(status, ranks=ranks)
        exits = final_exits(status, root)
        status = replace(
            status,
            stalled={},
            ended_at=now.wall,
            started_monotonic=_with_monotonic(status, "ended", now),
            bench=bench_over(training.spec, status.bench, now.wall),
            rank_exits=exits,
            root_cause=next((e for e in exits if root and e.rank == root.rank), None),
        )
    status = replace(status, message=describe_status(status))
    status = replace(status, conditions=_conditions(old, status, now.wall))
    return _with_history(old, status, now.wall)


def _plan_after_end(training: Training, observation: Observation, now: Now) -> Plan:
    """Releases what the training holds, then removes the record in time. Its phase stays."""
    status, spec = training.status, training.spec
    # The last reports of ranks come after their ends.
    warnings = merge_warnings(status.warnings, find_warnings(training, (), observation.rounds))
    if warnings != status.warnings:
        warned = replace(status, warnings=warnings)
        warned = replace(warned, conditions=_conditions(status, warned, now.wall))
        return Plan(warned, events=events_between(status, warned, now.wall), requeue_after_s=0.0)
    if training.generation != status.observed_generation:
        is_edited = training.deletion_requested_at is None
        return Plan(
            replace(status, observed_generation=training.generation),
            events=(_refusal(training, status.phase, now),) if is_edited else (),
            requeue_after_s=0.0,
        )
    if not status.is_released:
        is_measuring = observation.bench is not None and observation.bench.state == "running"
        if (
            observation.desired is not None
            or observation.ranks
            or observation.is_supervised
            or is_measuring
        ):
            return Plan(status, (Stop(),), requeue_after_s=0.0)
        return Plan(replace(status, is_released=True), requeue_after_s=0.0)
    if training.deletion_requested_at is not None:
        return Plan(status, (Delete(),))
    if spec.ttl_seconds is None:
        return Plan(status)
    ended_at = _started_monotonic(status, "ended", status.ended_at or 0.0)
    left = ended_at + spec.ttl_seconds - now.monotonic
    return Plan(status, (Delete(),)) if left <= 0 else Plan(status, requeue_after_s=left)


def _with_reachable_target(training: Training, observation: Observation) -> Training:
    """The training with a target it can reach: a scale-up may arrive after all ranks have ended."""
    world = training.spec.world_size
    if (
        not observation.is_closed
        or observation.desired is None
        or not world.min <= observation.desired.size < world.target
    ):
        return training
    world = replace(world, target=observation.desired.size)
    return replace(training, spec=replace(training.spec, world_size=world))


def _refusal(training: Training, phase: Phase, now: Now) -> Event:
    """The event for a spec that was changed after the end, where the store cannot refuse that."""
    refused = UDTerminalState(phase, training.spec.world_size.target)
    return Event(type="Warning", reason="UDTerminalState", message=str(refused), at=now.wall)


def _reason_to_fail(
    training: Training, status: Status, observation: Observation, now: Now
) -> tuple[str, str]:
    spec, world = training.spec, training.spec.world_size
    if observation.fault:
        return PhaseReason.EXECUTOR_REFUSED, observation.fault
    has_no_record = observation.desired is None and not observation.is_supervised
    if has_no_record and status.has_run and not _may_be_late(status, now):
        message = f"the {training.executor} executor has lost all record of the ranks"
        return PhaseReason.EXECUTOR_LOST, message
    lost = [r for r in status.ranks if r.rank < world.target and is_lost(r)]
    if lost and world.target - len(lost) < world.min:
        return PhaseReason.RANK_FAILED, ""
    left = _deadline_in_s(training, status, observation, now)
    if left is not None and left <= 0:
        message = f"still running {spec.deadline_s:g} s after the start"
        return PhaseReason.DEADLINE_EXCEEDED, message
    return check_floor(spec, status)


def _released_at(status: Status, observation: Observation) -> float | None:
    """When ranks were allowed to run, by the executor's clock: its gate opened, or they started."""
    return status.gate_opened_at if observation.has_gate else status.started_at


def _deadline_in_s(
    training: Training, status: Status, observation: Observation, now: Now
) -> float | None:
    """Seconds left, by whichever clock shows more: neither a clock that was set counts, nor a
    machine that was off."""
    let_go_at, deadline_s = _released_at(status, observation), training.spec.deadline_s
    if let_go_at is None or deadline_s is None:
        return None
    monotonic = _started_monotonic(status, "let go", let_go_at)
    return deadline_s - min(now.executor - let_go_at, now.monotonic - monotonic)


def _may_start(training: Training, status: Status, observation: Observation, now: Now) -> bool:
    """Whether the executor may be asked for ranks. Without a gate it starts them at once."""
    if holds_start(training.spec, status.bench):
        return False
    is_grace_over = now.monotonic >= _grace_end(training, status)
    return observation.capacity is None or may_start(
        observation.capacity, training.spec.world_size, is_grace_over=is_grace_over
    )


def _grace_end(training: Training, status: Status) -> float:
    created_at = _started_monotonic(status, "created", training.created_at)
    return created_at + training.spec.start_grace_s


def _is_discarded(rank: RankStatus, discarded_attempts: dict[int, int], target: int) -> bool:
    return rank.rank < target and rank.attempt <= discarded_attempts.get(rank.rank, -1)


def _may_be_late(status: Status, now: Now) -> bool:
    """Whether an observation without ranks may date from before the executor was asked."""
    return status.desired_at is not None and now.monotonic < status.desired_at + STALE_S


def _alive(status: Status, observation: Observation, now: Now) -> int:
    """The number of ranks that are alive, or that the executor may still start."""
    ranks = (*status.ranks, *status.removed_ranks)
    alive = sum(r.is_alive for r in ranks)
    if observation.desired is None:
        return alive + (observation.is_supervised or _may_be_late(status, now))
    if observation.desired != status.desired:
        return alive + 1  # the executor does not have the newest desired state yet
    unsettled = observation.desired.size - sum(_is_settled(r, observation.desired) for r in ranks)
    return alive + unsettled + observation.unsettled


def _is_settled(rank: RankStatus, desired: DesiredState) -> bool:
    """Whether an executor with this desired state will leave the rank, or its end, as it is."""
    is_discarded = rank.attempt <= desired.discarded_attempts.get(rank.rank, -1)
    return rank.rank < desired.size and rank.phase != "Pending" and not is_discarded


def _conditions(old: Status, status: Status, now: float) -> list[Condition]:
    """The conditions of the training. Each keeps its time of change until its status changes."""
    lost = [r.rank for r in status.ranks if is_lost(r)]
    phase, why, message = status.phase, status.reason, status.message
    wanted: list[tuple[str, bool, str, str]] = [
        ("Ready", phase is Phase.READY, why, message),
        ("Complete", phase is Phase.SUCCEEDED, why, message),
        ("Succeeded", phase is Phase.SUCCEEDED, why, message),
        ("Failed", phase is Phase.FAILED, why, message),
        ("Cancelled", phase is Phase.CANCELLED, why, message),
        ("Admitted", status.gate_opened_at is not None, "StartGate", ""),
        ("BelowMinimum", status.world.below_minimum, "RanksReady", _ready_text(status)),
    ]
    if status.stalled or any(c.type == STALLED for c in old.conditions):
        wanted.append((STALLED, *stall_condition(status.stalled)))
    if status.warnings:
        wanted.append((CONDITION, True, WARNED, "; ".join(status.warnings)))
    if lost:
        message = f"lost for good: {limited_spans(lost)}"
        wanted.append(("RanksLost", True, PhaseReason.RANK_FAILED, message))
    ranks = (*status.ranks, *status.removed_ranks)
    if silent := [r.rank for r in ranks if r.exit is not None and r.exit.is_from_backend]:
        message = f"the executor reported the exits of {limited_spans(silent)}: they left no record"
        wanted.append(("ExitsFromBackend", True, "NoRecord", message))
    if status.mesh is not None:
        state, message = status.mesh.state, status.mesh.message
        is_degraded = state is MeshState.DEGRADED
        wanted += [
            ("MeshCapable", state is MeshState.READY, f"Mesh{state}", message),
            ("DegradedMesh", is_degraded, f"Mesh{state}", message),
        ]
    conditions = old.conditions
    for kind, is_true, reason, message in wanted:
        conditions = set_condition(conditions, kind, reason, message, now, is_true=is_true)
    return conditions


def _ready_text(status: Status) -> str:
    return f"{status.world.ready} of {status.world.target} ranks ready"


def _with_history(old: Status, status: Status, now: float) -> Status:
    was, world = old.world, status.world
    if (was.target, was.ready) != (world.target, world.ready):
        point = WorldPoint(at=now, target=world.target, ready=world.ready)
        history = [*status.world_size_history, point][-MAX_HISTORY:]
        status = replace(status, world_size_history=history)
    if was.target and was.target != world.target:
        resize = Resize(from_target=was.target, to_target=world.target, at=now)
        status = replace(status, last_resize=resize)
    return status


def _requeue_after_s(
    training: Training, status: Status, observation: Observation, now: Now
) -> float | None:
    if status.phase.is_terminal:
        return 0.0
    times = []  # seconds from now
    deadline_in_s = _deadline_in_s(training, status, observation, now)
    if status.gate_opened_at is None:
        times.append(_grace_end(training, status) - now.monotonic)
    if deadline_in_s is not None and not status.failing:
        times.append(deadline_in_s)
    if status.bench.phase == "Running" and status.bench.started_at is not None:
        started_at = _started_monotonic(status, "bench", status.bench.started_at)
        times.append(started_at + BENCH_LIMIT_S - now.monotonic)
    if status.desired_at is not None:
        times.append(status.desired_at + STALE_S - now.monotonic)
    lost = [r.missing_since + STALE_S for r in status.ranks if r.missing_since is not None]
    times += [at - now.executor for at in lost]
    return min((t for t in times if t > 0), default=None)
