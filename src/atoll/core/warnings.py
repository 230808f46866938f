"""Warnings of a training: what its ranks and its outer rounds show to be wrong with it. Pure.

A warning is a fact that stays true, so it is never taken back: `status.warnings` only grows. Its
text is the same however often it is found, so that it is reported once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from atoll.core.status import ObservedRounds, RankStatus, Training

WARNED = "TrainingWarning"  # reason of the events and of the condition
CONDITION = "Warnings"
MAX_WARNINGS = 20  # of a training: more say nothing new, and a status is bounded
ABSENT_ROUNDS = 10  # in a row without a rank that runs, before that is reported


def merge_warnings(known: Sequence[str], warnings: Iterable[str]) -> list[str]:
    """Those known, then the new ones, each once; the first `MAX_WARNINGS`."""
    return list(dict.fromkeys([*known, *warnings]))[:MAX_WARNINGS]


def find_warnings(
    training: Training, ranks: Iterable[RankStatus], rounds: ObservedRounds | None
) -> list[str]:
    """What is wrong as far as the rounds tell, in sentences."""
    if rounds is None:
        return []
    return [
        *rounds.warnings,
        *(
            f"round {number} left out rank {rank}: its pseudo-gradient was not finite"
            for rank, number in sorted(rounds.bad.items())
        ),
        *_absences(training, ranks, rounds),
    ]


def _absences(
    training: Training, ranks: Iterable[RankStatus], rounds: ObservedRounds
) -> Iterator[str]:
    if not has_replica_per_rank(training, len(rounds.last)) or rounds.recent_since is None:
        return
    for rank in ranks:
        is_old = rank.started_at is not None and rank.started_at < rounds.recent_since
        is_absent = rounds.last.get(rank.rank, -1) <= rounds.newest - ABSENT_ROUNDS
        if rank.is_alive and is_old and is_absent and rank.rank not in rounds.gone:
            yield f"rank {rank.rank} was in none of {ABSENT_ROUNDS} rounds in a row while it ran"


def has_replica_per_rank(training: Training, replicas: int) -> bool:
    """Whether every rank should be in the rounds: not if all ranks together are one replica."""
    return replicas > 1 or training.spec.rendezvous.backend == "none"
