"""The attempts of ranks: each start of a rank's process, and how it ended.

A status has the newest attempt of each rank. Stores keep those before it, as many as `KEPT`, beside
the status, and only once they have a successor: a rank that never restarts costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from atoll.core.model import Model
from atoll.core.ranks import in_ms, with_explanation
from atoll.core.reasons import ExitReason
from atoll.core.status import AttemptStatus, Exit, Observation, RankStatus, Status

MAX_ATTEMPTS = 20  # of one rank, before its newest
MESSAGE_CHARS = 300
TIMES = 10**6  # larger numbers of attempts are seconds since the epoch


class AttemptList(Model, frozen=True):
    """In order of rank and attempt."""

    items: list[AttemptStatus]


def superseded_attempts(
    old: Status, new: Status, observation: Observation
) -> tuple[AttemptStatus, ...]:
    """The attempts that have a successor in `new` and had none in `old`."""
    before = {r.rank: r for r in (*old.ranks, *old.removed_ranks)}
    observed_ranks = {observed_rank.rank: observed_rank for observed_rank in observation.ranks}
    ended: list[AttemptStatus] = []
    for rank in (*new.ranks, *new.removed_ranks):
        was = before.get(rank.rank) or RankStatus(rank=rank.rank)
        if rank.attempt <= max(was.attempt, 0):
            continue
        observed_rank = observed_ranks.get(rank.rank)
        earlier = {} if observed_rank is None else {a.attempt: a for a in observed_rank.attempts}
        if was.attempt >= 0 and was.attempt not in earlier:
            earlier[was.attempt] = attempt_of(was, _end(was, rank))
        ended += (earlier[number] for number in sorted(earlier) if number < rank.attempt)
    return tuple(ended)


def _end(was: RankStatus, rank: RankStatus) -> Exit:
    """How the attempt that `was` shows had ended by the time `rank` was seen."""
    if was.exit is not None:
        return was.exit
    if rank.attempt == was.attempt + 1 and rank.previous_exit is not None:
        return rank.previous_exit
    at = rank.started_at or was.started_at or 0.0
    return Exit(code=None, at=at, reason=ExitReason.VANISHED, message="its end was not seen")


def attempt_of(rank: RankStatus, exit: Exit | None) -> AttemptStatus:
    """The attempt that the status of a rank shows."""
    return close_attempt(
        AttemptStatus(
            rank=rank.rank, attempt=rank.attempt, started_at=rank.started_at, host=rank.node
        ),
        exit,
    )


def close_attempt(attempt: AttemptStatus, exit: Exit | None) -> AttemptStatus:
    if exit is None:
        return attempt
    exit = with_explanation(exit)
    started_at = None if attempt.started_at is None else in_ms(attempt.started_at)
    return AttemptStatus(
        rank=attempt.rank,
        attempt=attempt.attempt,
        started_at=started_at,
        host=attempt.host,
        ended_at=in_ms(exit.at),
        exit_code=exit.code,
        reason=exit.reason,
        signal=exit.signal,
        is_stopped=exit.is_stopped,
        message=exit.message[:MESSAGE_CHARS],
    )


def attempts_of(status: Status, stored: Iterable[AttemptStatus]) -> list[AttemptStatus]:
    """All that are known, in order of rank and attempt: those stored, and the newest ones.

    Where an executor tells attempts apart by their times, they are counted from 0.
    """
    known = {(a.rank, a.attempt): a for a in stored}
    for rank in (*status.ranks, *status.removed_ranks):
        if rank.attempt >= 0:
            known[rank.rank, rank.attempt] = attempt_of(rank, rank.exit)
    counts: dict[int, int] = {}
    attempts = []
    for key in sorted(known):
        one, count = known[key], counts.get(key[0], 0)
        attempts.append(one if one.attempt < TIMES else replace(one, attempt=count))
        counts[key[0]] = count + 1
    return attempts


def newest_attempts(
    attempts: Sequence[AttemptStatus], most: int | None = None
) -> list[AttemptStatus]:
    """Those to keep, in order of rank: `KEPT` of each rank, and `most` of all, the newest."""
    by_rank: dict[int, dict[int, AttemptStatus]] = {}
    for attempt in attempts:
        by_rank.setdefault(attempt.rank, {})[attempt.attempt] = attempt
    attempts_left = [
        own[number] for _, own in sorted(by_rank.items()) for number in sorted(own)[-MAX_ATTEMPTS:]
    ]
    if most is not None and len(attempts_left) > most:
        newest = sorted(attempts_left, key=lambda a: a.ended_at or 0.0)[-most:]
        attempts_left = sorted(newest, key=lambda a: (a.rank, a.attempt))
    return attempts_left
