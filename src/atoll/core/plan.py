"""Decides what to do next with one training: `plan(training, observation, now)`. Pure.

Restarts, lost ranks, quorum, scaling, cancelling, deadlines and the end are decided here and
nowhere else. The status is written first, then the actions are performed; all of them may be
repeated, so the controller may die between any two steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from atoll.core.clock import STEP_S, Now
from atoll.core.describe import describe_ranks, describe_status, events_between
from atoll.core.errors import UDTerminalState
from atoll.core.mesh import MeshState
from atoll.core.phase import ConditionType, Phase, PhaseReason, Tally, advance
from atoll.core.ranks import (
    WARNED,
    classify,
    final_exits,
    find_warnings,
    is_discardable,
    is_lost,
    merge_ranks,
    merge_warnings,
    root_cause_of,
    superseded_attempts,
    waiting_message,
    with_bounded_ends,
    with_bounded_messages,
    with_texts_of,
)
from atoll.core.spec import TrainingSpec, WorldSize, may_start
from atoll.core.status import (
    BENCH_DONE,
    BENCH_LIMIT_S,
    AttemptStatus,
    BenchResult,
    BenchStatus,
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
    in_ms,
    set_condition,
    sooner,
)
from atoll.core.text import limited_spans

# How late an observation may be: Kubernetes' watch caches and a busy shared file system lag by one
# or two seconds. Until then an executor that shows nothing may not have the desired state yet.
STALE_S = 3.0
MAX_HISTORY = 100  # changes of the world size in a status: a chart, about 5 kB


class Apply(NamedTuple):
    desired: DesiredState


class Stop(NamedTuple):
    pass


class Measure(NamedTuple):
    """Measure the link between two hosts while the ranks run."""


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
        settings=training.settings_with(observation.settings),
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
    rule = advance(old.phase, tally)
    assert rule is not None
    status = replace(
        status,
        phase=rule.phase,
        reason=status.failing or rule.reason,
        observed_generation=training.generation,
        world=WorldStatus.of(ready, world),
        ranks=with_bounded_messages(
            waiting_message(r, status, observation, world) for r in status.ranks
        ),
    )
    if rule.phase.is_terminal:
        root = root_cause_of(status, world) if rule.phase is Phase.FAILED else None
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
    settings = training.settings_with(observation.settings)
    if warnings != status.warnings or settings != status.settings:
        warned = replace(status, warnings=warnings, settings=settings)
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
    """Whether the executor may get a desired state. Without a gate it starts ranks at once."""
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
    """Whether an observation without ranks may date from before the desired state."""
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
    ready_text = f"{status.world.ready} of {status.world.target} ranks ready"
    wanted: list[tuple[ConditionType, bool, str, str]] = [
        (ConditionType.READY, phase is Phase.READY, why, message),
        (ConditionType.COMPLETE, phase is Phase.SUCCEEDED, why, message),
        (ConditionType.SUCCEEDED, phase is Phase.SUCCEEDED, why, message),
        (ConditionType.FAILED, phase is Phase.FAILED, why, message),
        (ConditionType.CANCELLED, phase is Phase.CANCELLED, why, message),
        (ConditionType.ADMITTED, status.gate_opened_at is not None, "StartGate", ""),
        (ConditionType.BELOW_MINIMUM, status.world.below_minimum, "RanksReady", ready_text),
    ]
    if status.stalled or any(c.type == ConditionType.STALLED for c in old.conditions):
        wanted.append((ConditionType.STALLED, *stall_condition(status.stalled)))
    if status.warnings:
        wanted.append((ConditionType.WARNINGS, True, WARNED, "; ".join(status.warnings)))
    if lost:
        message = f"lost for good: {limited_spans(lost)}"
        wanted.append((ConditionType.RANKS_LOST, True, PhaseReason.RANK_FAILED, message))
    ranks = (*status.ranks, *status.removed_ranks)
    if silent := [r.rank for r in ranks if r.exit is not None and r.exit.is_from_backend]:
        message = f"the executor reported the exits of {limited_spans(silent)}: they left no record"
        wanted.append((ConditionType.EXITS_FROM_BACKEND, True, "NoRecord", message))
    if status.mesh is not None:
        state, message = status.mesh.state, status.mesh.message
        is_degraded = state is MeshState.DEGRADED
        wanted += [
            (ConditionType.MESH_CAPABLE, state is MeshState.READY, f"Mesh{state}", message),
            (ConditionType.DEGRADED_MESH, is_degraded, f"Mesh{state}", message),
        ]
    conditions = old.conditions
    for kind, is_true, reason, message in wanted:
        conditions = set_condition(conditions, kind, reason, message, now, is_true=is_true)
    return conditions


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


# Stalled ranks: which have been idle for longer than the spec allows, and since when. Pure.

CHECKS_PER_LIMIT = 4  # so a stall is reported at most a quarter of the limit late
MIN_STALL_CHECK_S, MAX_STALL_CHECK_S = (
    0.25,
    30.0,
)  # between two checks: neither busy nor late by more than a person waits


def stalled_ranks(
    training: Training, ranks: Iterable[RankStatus], observation: Observation, now: float
) -> dict[int, float]:
    """Ranks that run and have not moved for `stall_s`, and since when."""
    limit_s = training.spec.stall_s
    if limit_s is None:
        return {}
    known, idle_times = (
        training.status.stalled,
        {observed_rank.rank: observed_rank.idle_s for observed_rank in observation.ranks},
    )
    stalled = {}
    for rank in ranks:
        idle_s = idle_times.get(rank.rank)
        if rank.is_alive and not rank.is_stopping and idle_s is not None and idle_s >= limit_s:
            stalled[rank.rank] = known.get(rank.rank, in_ms(now - idle_s))
    return stalled


def with_idle_times(
    training: Training, observation: Observation, idle_times: Mapping[int, float]
) -> Observation:
    """The observation, with idle times for ranks of which the executor has none."""
    limit_s = training.spec.stall_s
    if limit_s is None or training.status.phase.is_terminal:
        return observation
    ranks = [
        replace(observed_rank, idle_s=idle_times.get(observed_rank.rank))
        if observed_rank.idle_s is None
        else observed_rank
        for observed_rank in observation.ranks
    ]
    return replace(
        observation, ranks=ranks, again_in_s=sooner(observation.again_in_s, check_again_s(limit_s))
    )


def stall_condition(stalled: dict[int, float]) -> tuple[bool, str, str]:
    """Whether there are any, the reason, and a message."""
    if not stalled:
        return False, "RanksMove", ""
    ranks = describe_ranks(sorted(stalled))
    return True, "RankStalled", f"{ranks} idle for longer than the stall timeout"


def check_again_s(limit_s: float) -> float:
    """Seconds until the next check of ranks that count as stalled after `limit_s`."""
    return min(max(limit_s / CHECKS_PER_LIMIT, MIN_STALL_CHECK_S), MAX_STALL_CHECK_S)


# The link bench of one training: when it runs, its status, and whether ranks may start. Pure.
#
# The bench never delays or fails a training, unless the user sets a floor (`bench_require_gbps`):
# then ranks start only once the measured link reaches it.


def bench_after(
    training: Training, old: BenchStatus, observation: Observation, now: float, ran_s: float
) -> BenchStatus:
    """The status of the bench after an observation. A phase in `BENCH_DONE` is final.

    `ran_s`: how long it has run, if it runs; the difference of two dates may say otherwise.
    """
    if training.spec.bench.mode == "off" or old.phase in BENCH_DONE or observation.fault:
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
    if old.started_at is not None and ran_s >= BENCH_LIMIT_S:
        message = f"not measured within {BENCH_LIMIT_S:g} s of its start"
        return replace(old, phase="TimedOut", message=message, completed_at=now)
    if observed.state == "running":
        started_at = now if old.started_at is None else old.started_at
        return replace(old, phase="Running", message=observed.message, started_at=started_at)
    # Idle after Running: its process was killed, so it is run again within the same limit.
    return replace(old, phase=old.phase or "Pending", message=observed.message)


def bench_over(spec: TrainingSpec, bench: BenchStatus, now: float) -> BenchStatus:
    """The final status of the bench once the training has ended."""
    if spec.bench.mode == "off" or bench.phase in BENCH_DONE:
        return bench
    why = f"the training ended before the link was measured ({bench.phase or 'Pending'})"
    return replace(bench, phase="Skipped", message=why, completed_at=now)


def must_measure(spec: TrainingSpec, status: Status, observation: Observation) -> bool:
    """Whether to start the bench: while ranks run, or before them if it holds their start."""
    is_idle = observation.bench is not None and observation.bench.state == "idle"
    if spec.bench.mode == "off" or status.bench.phase in BENCH_DONE or not is_idle:
        return False
    return status.desired is not None or spec.bench.has_floor


def holds_start(spec: TrainingSpec, bench: BenchStatus) -> bool:
    """Whether ranks must wait for the bench: with a floor, until the measurement is there."""
    return spec.bench.has_floor and bench.phase != "Succeeded"


def check_floor(spec: TrainingSpec, status: Status) -> tuple[str, str]:
    """Reason and message if the link is below the floor or could not be measured; else empty."""
    floor, bench = spec.bench.require_gbps, status.bench
    if (
        not spec.bench.has_floor
        or bench.phase not in BENCH_DONE
        or status.gate_opened_at is not None
    ):
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
