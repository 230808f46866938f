"""The ledger: who may train on what. A pure fold over the committed rounds of a run.

Every replica computes the same ledger from the same manifests: no clock, no chance, nothing local.
Positions are used, held by a rank, back with nobody, or not given out yet. What is used is never
written down, so the size does not grow with it. See docs/decisions/020.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import msgspec

from atoll.core.model import json_decoder
from atoll.diloco.data import ranges
from atoll.diloco.data.ranges import Ranges

_LEVELS = 1 << 20  # in so many steps the last positions are shared out


class InvalidClaim(Exception):
    """A round that this ledger does not allow. `ranks` are those whose claims are wrong."""

    def __init__(self, ranks: Sequence[int], reason: str) -> None:
        super().__init__(reason)
        self.ranks = list(ranks)


class Terms(msgspec.Struct, frozen=True):
    """What the replicas of a run must agree on before the first round.

    `length` of the data is None for a stream. `first` positions are leased to a rank that has not
    said yet how much it wants. A hold of a rank that was seen comes back after `patience` rounds
    without it, one that nobody claimed after `shelf` rounds.
    """

    length: int | None
    epochs: int
    seed: int
    shuffle: bool
    fingerprint: str
    world: int
    first: int
    patience: int
    shelf: int

    @property
    def total(self) -> int | None:
        return None if self.length is None else self.length * self.epochs

    @property
    def digest(self) -> str:
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=8).hexdigest()


def make_terms(
    length: int | None,
    *,
    period: int,
    world: int,
    fragments: int,
    epochs: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    fingerprint: str = "",
) -> Terms:
    """The terms of a run with rounds of `period` steps.

    The first lease must not depend on the batch of a replica, which may be any. It is large, and
    costs nothing: what is not wanted by its rank comes back before the data ends.
    """
    if length is None:
        first = 64 * period
    else:
        # Within the first epoch, if that is enough for a period: replicas begin with other samples.
        most = max(length // (2 * world), 16 * period)
        first = max(1, min(1024 * period, length * epochs // (2 * world), most))
    return Terms(
        length=length,
        epochs=epochs,
        seed=seed,
        shuffle=shuffle and length is not None,
        fingerprint=fingerprint,
        world=world,
        first=first,
        patience=2 * fragments,
        shelf=16 * fragments,
    )


class Claim(msgspec.Struct, frozen=True):
    """What a member of a round says: it trained on `took`, and wants to hold `want` positions.

    `end`: it met the end of a stream there.
    """

    rank: int
    took: Ranges = ()
    want: int = 0
    end: int | None = None


class Hold(msgspec.Struct, frozen=True, array_like=True):
    """What a rank may train on. `observed`: the last round it was in. `firm`: it was in one."""

    ranges: Ranges
    observed: int
    firm: bool


class Ledger(msgspec.Struct, frozen=True):
    """The ledger after `seq` committed rounds. `idle`: the last rounds in which nobody took any."""

    terms: Terms
    seq: int
    next: int
    back: Ranges
    holds: dict[int, Hold]
    end: int | None
    idle: int = 0

    @property
    def total(self) -> int | None:
        """Where the line ends, if that is known."""
        return self.terms.total if self.end is None else self.end

    @property
    def used(self) -> int:
        """How many positions were trained on and committed."""
        return self.next - ranges.size(self.back) - self.stored

    @property
    def stored(self) -> int:
        return sum(ranges.size(hold.ranges) for hold in self.holds.values())

    @property
    def is_used_up(self) -> bool:
        return self.total is not None and self.used >= self.total

    @property
    def first_unused(self) -> int:
        """Everything before it is used."""
        unused = self.unused()
        return min(unused[0][0], self.next) if unused else self.next

    @property
    def epoch(self) -> int:
        length = self.terms.length
        return self.first_unused // length if length else 0

    def hold_of(self, rank: int) -> Ranges:
        hold = self.holds.get(rank)
        return () if hold is None else hold.ranges

    def unused(self) -> Ranges:
        """The positions below `next` that were given out, or came back, and are not used."""
        return ranges.union(self.back, *(hold.ranges for hold in self.holds.values()))


_LEDGER = json_decoder(Ledger)


def pack(ledger: Ledger) -> bytes:
    ordered = dict(sorted(ledger.holds.items()))
    return msgspec.json.encode(msgspec.structs.replace(ledger, holds=ordered))


def unpack(data: bytes) -> Ledger:
    """What `pack` made. Raises ValueError for anything else."""
    try:
        return _LEDGER.decode(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a ledger: {error}") from error


def begin(terms: Terms, seq: int = 0) -> Ledger:
    """Every rank of the first world has a lease waiting."""
    ledger = _Draft(Ledger(terms, seq, 0, (), {}, None))
    for rank in range(terms.world):
        ledger.lease(rank, terms.first, is_firm=False)
    return ledger.done()


def commit(ledger: Ledger, claims: Sequence[Claim], world: int) -> Ledger:
    """The ledger after a round of these members, in manifest order, of a world of so many ranks.

    Raises InvalidClaim unless each of them took what it held.
    """
    _check(ledger, claims, world)
    draft = _Draft(ledger)
    draft.seq += 1
    members = {claim.rank for claim in claims}
    is_dry = not any(claim.took for claim in claims)
    draft.idle = ledger.idle + 1 if is_dry else 0
    for claim in claims:
        remainder = ranges.minus(ledger.hold_of(claim.rank), claim.took)
        draft.holds[claim.rank] = Hold(remainder, draft.seq, True)
        if not claim.want:
            draft.give_back([claim.rank])
    draft.give_back(
        rank
        for rank, hold in ledger.holds.items()
        if rank not in members and (is_dry or _is_over(ledger.terms, hold, draft.seq, rank, world))
    )
    ends = [claim.end for claim in claims if claim.end is not None]
    if ends:
        draft.cut(min(ends))
    wants = {claim.rank: claim.want for claim in claims if claim.want}
    draft.top_up(wants, members)
    draft.lease_ahead(wants, world)
    return draft.done()


def _check(ledger: Ledger, claims: Sequence[Claim], world: int) -> None:
    ranks = [claim.rank for claim in claims]
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice:
        raise InvalidClaim(twice, f"ranks {twice} are in the round twice")
    beyond = [rank for rank in ranks if not 0 <= rank < world]
    if beyond:
        raise InvalidClaim(beyond, f"ranks {beyond} are not in a world of {world}")
    wrong = [
        claim.rank
        for claim in claims
        if not ranges.is_well_formed(claim.took)
        or not ranges.is_inside(claim.took, ledger.hold_of(claim.rank))
    ]
    if wrong:
        raise InvalidClaim(wrong, f"ranks {wrong} took data that they did not hold")
    for claim in claims:
        if claim.end is None:
            continue
        for other in claims:
            if other.took and other.took[-1][1] > claim.end:
                raise InvalidClaim(
                    [claim.rank],
                    f"rank {claim.rank} says that the data ends at {claim.end}, but rank "
                    f"{other.rank} trained on position {other.took[-1][1] - 1}",
                )


def _is_over(terms: Terms, hold: Hold, seq: int, rank: int, world: int) -> bool:
    """Whether the hold of a rank that is not in the round comes back."""
    limit = terms.patience if hold.firm else terms.shelf
    return rank >= world or seq - hold.observed > limit


class _Draft:
    """A ledger that is being changed."""

    def __init__(self, ledger: Ledger) -> None:
        self.terms = ledger.terms
        self.seq, self.next, self.idle = ledger.seq, ledger.next, ledger.idle
        self.back = ledger.back
        self.holds = dict(ledger.holds)
        self.end = ledger.end

    def done(self) -> Ledger:
        return Ledger(self.terms, self.seq, self.next, self.back, self.holds, self.end, self.idle)

    def give_back(self, ranks: Iterable[int]) -> None:
        """The holds of the ranks belong to nobody."""
        ended = [self.holds.pop(rank).ranges for rank in list(ranks)]
        self.back = ranges.union(self.back, *ended)

    def cut(self, end: int) -> None:
        """The stream ends there, or before."""
        self.end = end = min(end, self.next if self.end is None else self.end)
        self.next = min(self.next, end)
        self.back = ranges.below(self.back, end)
        self.holds = {
            rank: msgspec.structs.replace(hold, ranges=ranges.below(hold.ranges, end))
            for rank, hold in self.holds.items()
        }

    def left(self) -> int | None:
        """How many positions can be given to somebody; None: as many as are wanted."""
        total = self.terms.total if self.end is None else self.end
        return None if total is None else ranges.size(self.back) + total - self.next

    def take(self, count: int) -> Ranges:
        """So many positions: those that came back first, then new ones."""
        part, self.back = ranges.take(self.back, count)
        remainder = count - ranges.size(part)
        total = self.terms.total if self.end is None else self.end
        if total is not None:
            remainder = min(remainder, total - self.next)
        if remainder > 0:
            part = ranges.union(part, ((self.next, self.next + remainder),))
            self.next += remainder
        return part

    def lease(self, rank: int, count: int, *, is_firm: bool) -> None:
        known = self.holds.get(rank)
        stored = () if known is None else known.ranges
        self.holds[rank] = Hold(ranges.union(stored, self.take(count)), self.seq, is_firm)

    def top_up(self, wants: dict[int, int], members: set[int]) -> None:
        """Each member holds what it wants, or its share of what is left."""
        stored = {rank: ranges.size(self.holds[rank].ranges) for rank in wants}
        lacks = sum(max(0, want - stored[rank]) for rank, want in wants.items())
        left = self.left()
        if left is not None and lacks > left:
            loose = [r for r, hold in self.holds.items() if r not in members and not hold.firm]
            self.give_back(loose)
            left = self.left()
        grants = (
            {rank: max(0, want - stored[rank]) for rank, want in wants.items()}
            if left is None or lacks <= left
            else shared(wants, stored, left)
        )
        for rank, count in grants.items():
            if count:
                self.lease(rank, count, is_firm=True)

    def lease_ahead(self, wants: dict[int, int], world: int) -> None:
        """While there is plenty, a lease waits for every rank that has none."""
        first = max(wants.values(), default=self.terms.first)
        for rank in range(world):
            left = self.left()
            if left is not None and left <= 2 * sum(wants.values()) + first:
                return
            if rank not in self.holds:
                self.lease(rank, first, is_firm=False)


def shared(wants: dict[int, int], stored: dict[int, int], left: int) -> dict[int, int]:
    """How much of `left` each rank gets, so that all holds last about equally long."""

    def at_level(level: int) -> dict[int, int]:
        return {
            rank: max(0, want * level // _LEVELS - stored[rank]) for rank, want in wants.items()
        }

    low, high = 0, _LEVELS
    while high - low > 1:
        middle = (low + high) // 2
        if sum(at_level(middle).values()) <= left:
            low = middle
        else:
            high = middle
    grants = at_level(low)
    remainder = left - sum(grants.values())
    for rank, want in wants.items():  # what rounding left over
        more = min(remainder, max(0, want - stored[rank] - grants[rank]))
        if more > 0:
            more = min(more, -(-remainder // max(1, len(wants))))
            grants[rank] += more
            remainder -= more
    for rank, want in wants.items():
        more = min(remainder, max(0, want - stored[rank] - grants[rank]))
        grants[rank] += more
        remainder -= more
    return grants
