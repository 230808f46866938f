"""What a journal says, folded one record after the other: a second, independent rule for tests.

The fold of the product knows sets of records and no order. This one knows only order, as the first
supervisors did: each attempt carries its restarts and whether it has to stop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Attempt:
    rank: int
    number: int
    restarts: int
    started_at: float
    metered_s: float
    previous_exit: Mapping[str, Any] | None
    exit: Mapping[str, Any] | None = None
    is_stopping: bool = False


@dataclass
class Reference:
    """The state of a training after all records so far."""

    size: int = 0
    discarded: dict[int, int] = field(default_factory=dict)
    attempts: dict[int, Attempt] = field(default_factory=dict)  # the newest of each rank
    ended: dict[int, list[int]] = field(default_factory=dict)  # numbers of those before it

    def fold(self, records: Iterable[Mapping[str, Any]]) -> None:
        for record in records:
            getattr(self, f"_{record['t']}")(record)

    def _desired(self, record: Mapping[str, Any]) -> None:
        self.size = record["size"]
        self.discarded = {int(rank): number for rank, number in record["discarded"].items()}
        for one in self.attempts.values():
            if one.exit is None and one.rank >= self.size:
                one.is_stopping = True

    def _start(self, record: Mapping[str, Any]) -> None:
        rank, before = record["rank"], self.attempts.get(record["rank"])
        restarts, metered_s = 0, 0.0
        if before is not None:
            assert before.exit is not None
            # The next attempt of one that had to stop is no restart, however that one ended.
            is_new = before.number <= self.discarded.get(rank, -1) or before.is_stopping
            restarts = 0 if is_new else before.restarts + 1
            ran_s = max(before.exit["at"] - before.started_at, 0.0)
            metered_s = before.metered_s + ran_s
            self.ended.setdefault(rank, []).append(before.number)
        self.attempts[rank] = Attempt(
            rank,
            record["attempt"],
            restarts,
            record["at"],
            metered_s,
            None if before is None else before.exit,
        )

    def _exit(self, record: Mapping[str, Any]) -> None:
        self.attempts[record["rank"]].exit = record

    def due(self, max_restarts: int) -> set[tuple[int, int, int, float]]:
        """The rank, attempt, restarts and earliest time of what is to be started."""
        found = set()
        for rank in range(self.size):
            last, discarded = self.attempts.get(rank), self.discarded.get(rank, -1)
            if last is None or (last.exit is not None and last.number <= discarded):
                number = max(discarded, -1 if last is None else last.number) + 1
                found.add((rank, number, 0, 0.0))
            elif last.exit is not None and not last.exit["stopped"] and last.exit["code"] != 0:
                if last.restarts < max_restarts:
                    delay_s = 0.0 if not last.restarts else min(2.0 ** (last.restarts - 1), 30.0)
                    at = last.exit["at"] + delay_s
                    restarts = 0 if last.is_stopping else last.restarts + 1
                    found.add((rank, last.number + 1, restarts, at))
        return found
