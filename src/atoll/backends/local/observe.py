"""What the journal of a gang says, as the controller sees it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from atoll.backends.local.journal import Attempt, GangState, Record
from atoll.core.attempts import ended_attempt
from atoll.core.stall import check_again_s
from atoll.core.status import AttemptStatus, DesiredState, Exit, Followup, ObservedRank, Training


def observed_rank(
    name: str, host: str, attempt: Attempt, past: Iterable[Attempt] = ()
) -> ObservedRank:
    return ObservedRank(
        rank=attempt.rank,
        state="running" if attempt.exit is None else "exited",
        attempt=attempt.attempt,
        restarts=attempt.restarts,
        started_at=attempt.started_at,
        metered_s=attempt.metered_s,
        previous_exit=_exit(attempt.previous_exit),
        attempts=tuple(_past_attempt(host, one) for one in past),
        exit=_exit(attempt.exit),
        is_stopping=attempt.is_stopping and attempt.exit is None,
        pod_name=f"{name}-{attempt.rank}",
        host=host,
    )


class EndStalled(Followup, frozen=True):
    """A rank that does not move, and that is to be started again."""

    rank: int
    attempt: int


def stalled_followups(
    training: Training, state: GangState, quiet: Mapping[int, float]
) -> tuple[EndStalled, ...]:
    spec = training.spec
    if not spec.stall_restart or spec.stall_s is None:
        return ()
    return tuple(
        EndStalled(rank=rank, attempt=state.attempts[rank].attempt)
        for rank, quiet_s in quiet.items()
        if quiet_s >= spec.stall_s
    )


def next_look_s(training: Training) -> float | None:
    stall_s = training.spec.stall_s
    return None if stall_s is None else check_again_s(stall_s)


def _past_attempt(host: str, attempt: Attempt) -> AttemptStatus:
    bare = AttemptStatus(
        rank=attempt.rank, attempt=attempt.attempt, started_at=attempt.started_at, host=host
    )
    return ended_attempt(bare, _exit(attempt.exit))


def desired_of(state: GangState) -> DesiredState | None:
    if state.size is None:
        return None
    return DesiredState(
        version=state.version, size=state.size, discarded_attempts=dict(state.discarded_attempts)
    )


def _exit(record: Record | None) -> Exit | None:
    if record is None:
        return None
    return Exit(
        code=record["code"],
        at=record["at"],
        reason=record["reason"],
        signal=record["signal"],
        is_stopped=record["stopped"],
        failed_at=record.get("failedAt"),
        message=record.get("message", ""),
        log_tail=record.get("tail", []),
    )
