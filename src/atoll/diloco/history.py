"""The committed rounds of a run as the store has them, and what of the data they used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from atoll.core.errors import NotFound
from atoll.diloco.data import ranges
from atoll.diloco.data.lease import DataLease
from atoll.diloco.data.ledger import Ledger
from atoll.diloco.data.ranges import Ranges
from atoll.diloco.data.sampler import DataSampler
from atoll.diloco.round import objects
from atoll.diloco.round.objects import Manifest
from atoll.objectstore import ObjectStore

MAX_BYTES = 64 << 20  # of a manifest, or a block of them


def read_manifests(store: ObjectStore, run: str, until: int | None = None) -> list[Manifest]:
    """The manifests of all rounds before `until`, in order, those in history included."""
    known: dict[int, Manifest] = {}
    # Manifests first: one that is folded in between is in the block that is read then.
    for info in store.list(f"{run}/manifest"):
        key = info.key.removeprefix(f"{run}/")
        if objects.parse_round(key) is None:
            continue
        try:
            body = bytes(store.get(info.key, max_bytes=MAX_BYTES))
        except NotFound:
            continue
        manifest = objects.read_manifest(key, body)
        known[manifest.round] = manifest
    for info in store.list(f"{run}/history"):
        key = info.key.removeprefix(f"{run}/")
        block = objects.read_history(key, bytes(store.get(info.key, max_bytes=MAX_BYTES)))
        known |= {manifest.round: manifest for manifest in block.manifests}
    return [each for round, each in sorted(known.items()) if until is None or round < until]


class DataUse(NamedTuple):
    """The positions of the run that a rank trained on, and the round that committed them."""

    seq: int
    fragment: int
    round: int
    rank: int
    ranges: Ranges


@dataclass(frozen=True)
class DataReport:
    """What of the data was used.

    `skipped` could not be read, `dropped` gave pseudo-gradients that were not finite, `in_vain` was
    trained on and thrown away: these three as this replica saw it.
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


def make_data_report(
    ledger: Ledger | None,
    manifests: Sequence[Manifest],
    fragments: int,
    lease: DataLease | None,
    sampler: DataSampler | None,
) -> DataReport:
    uses = sorted(
        DataUse(each.round, each.round % fragments, each.round // fragments, m.rank, m.claim)
        for each in manifests
        if each.data is not None
        for m in each.members
        if m.claim
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
        skipped=0 if sampler is None else sampler.skipped,
        dropped=0 if lease is None else lease.dropped,
        in_vain=0 if lease is None else lease.in_vain,
    )
