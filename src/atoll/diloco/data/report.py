"""What of the data was used, in which round and by whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from atoll.diloco.allreduce.note import DataRound
from atoll.diloco.data import ranges
from atoll.diloco.data.ledger import Ledger
from atoll.diloco.data.ranges import Ranges


class DataUse(NamedTuple):
    """The positions of the run that a rank trained on, and the round that committed them."""

    seq: int
    fragment: int
    round: int
    rank: int
    ranges: Ranges


class RoundRead(NamedTuple):
    """A committed round of a fragment, with its number."""

    fragment: int
    number: int
    data: DataRound


@dataclass(frozen=True)
class DataReport:
    """Counts are of positions. `total` is None for a stream whose end nobody met yet.

    `used` in committed rounds, `held` by ranks that may train on them, `back` with nobody. What was
    `skipped`, `dropped`, and trained on `in_vain` is told by this process of itself.
    """

    total: int | None
    used: int
    stored: int
    back: int
    end: int | None
    by_rank: dict[int, int] = field(default_factory=dict)
    rounds: list[DataUse] = field(default_factory=list)
    skipped: int = 0
    dropped: int = 0
    in_vain: int = 0


def make(
    ledger: Ledger | None,
    rounds: Sequence[RoundRead],
    *,
    skipped: int = 0,
    dropped: int = 0,
    in_vain: int = 0,
) -> DataReport:
    uses = sorted(
        DataUse(read.data.data.seq, read.fragment, read.number, claim.rank, claim.took)
        for read in rounds
        for claim in read.data.claims
        if claim.took
    )
    by_rank: dict[int, int] = {}
    for use in uses:
        by_rank[use.rank] = by_rank.get(use.rank, 0) + ranges.size(use.ranges)
    return DataReport(
        total=None if ledger is None else ledger.total,
        used=0 if ledger is None else ledger.used,
        stored=0 if ledger is None else ledger.stored,
        back=0 if ledger is None else ranges.size(ledger.back),
        end=None if ledger is None else ledger.end,
        by_rank=by_rank,
        rounds=uses,
        skipped=skipped,
        dropped=dropped,
        in_vain=in_vain,
    )
