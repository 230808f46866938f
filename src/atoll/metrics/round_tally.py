"""Who took part in the rounds of one run, counted as rounds come in."""

from __future__ import annotations

import heapq
from collections import Counter

from atoll.core.rounds import RankRounds, StoredRound
from atoll.core.status import ObservedRounds
from atoll.core.warnings import ABSENT_ROUNDS, merge_warnings


class RunTally:
    """Rounds that a file has dropped meanwhile still count."""

    def __init__(self) -> None:
        self._taken: Counter[tuple[int, int]] = Counter()  # by rank and fragment
        self._last: dict[int, int] = {}
        self._bad: dict[int, int] = {}
        self._gone: set[int] = set()
        self._times: dict[int, float] = {}  # of the newest rounds
        self._warnings: list[str] = []

    def replace(self, before: StoredRound | None, stored_round: StoredRound) -> None:
        """Counts a round that is new, or of which more is known than before."""
        self._warnings = merge_warnings(self._warnings, stored_round.warnings)
        old, facts = None if before is None else before.facts, stored_round.facts
        if old is not None:
            self._taken.subtract((rank, old.fragment) for rank in old.members)
        if facts is None:
            return
        self._taken.update((rank, facts.fragment) for rank in facts.members)
        for rank in facts.members:
            self._last[rank] = max(self._last.get(rank, -1), facts.round)
            if rank not in facts.gone:
                self._gone.discard(rank)
        self._gone.update(facts.gone)
        for rank in facts.bad:
            self._bad[rank] = min(self._bad.get(rank, facts.round), facts.round)
        if facts.at is not None:
            self._times[facts.round] = min(self._times.get(facts.round, facts.at), facts.at)
        if len(self._times) > 2 * ABSENT_ROUNDS:
            newest = heapq.nlargest(ABSENT_ROUNDS, self._times)
            self._times = {number: self._times[number] for number in newest}

    @property
    def gone(self) -> list[int]:
        return sorted(self._gone)

    @property
    def ranks(self) -> list[RankRounds]:
        """A round of several fragments counts once, though some may have been missed."""
        rounds: dict[int, int] = {}
        for (rank, _), count in self._taken.items():
            rounds[rank] = max(rounds.get(rank, 0), count)
        return [
            RankRounds(rank=rank, rounds=count, last=self._last[rank])
            for rank, count in sorted(rounds.items())
            if count
        ]

    @property
    def observed(self) -> ObservedRounds:
        newest = heapq.nlargest(ABSENT_ROUNDS, self._times)
        return ObservedRounds(
            newest=max(self._last.values(), default=-1),
            recent_since=self._times[newest[-1]] if len(newest) == ABSENT_ROUNDS else None,
            last=dict(self._last),
            gone=self.gone,
            bad=dict(self._bad),
            warnings=list(self._warnings),
        )
