"""Who is in a round: a pure decision on the uploads that one look at the store has shown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from atoll.diloco.data import ranges
from atoll.diloco.data.ledger import Claim, InvalidClaim, Ledger, commit
from atoll.diloco.round import objects
from atoll.diloco.round.objects import DamagedObject, Manifest, Member, Refusal, UploadHeader

HEAVIEST = 100  # times the lower median: a weight beyond it is a mistake of its rank


class Terms(NamedTuple):
    """What an upload has to agree with: the deciding replica's own state."""

    round: int
    chain: str
    layout: str
    world: int
    ledger: Ledger | None


class Candidate(NamedTuple):
    """An upload that may be in the round. `time` is the store's."""

    key: str
    time: float
    header: UploadHeader


@dataclass
class Look:
    """What one LIST of the uploads shows."""

    there: dict[int, Candidate] = field(default_factory=dict)
    refused: list[Refusal] = field(default_factory=list)
    ended: dict[int, str] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)  # for the last round
    keys: set[str] = field(default_factory=set)
    has_later: bool = False  # somebody has uploaded to a later round: this one is decided

    @property
    def times(self) -> list[float]:
        return sorted(each.time for each in self.there.values())


class Decision(NamedTuple):
    """`ranks` are in the round; None: wait for `missing`."""

    ranks: tuple[int, ...] | None
    missing: tuple[int, ...]
    has_quorum: bool


def read_headers(bodies: Mapping[str, bytes | None]) -> dict[str, UploadHeader | None]:
    """None for what is not there or no header."""
    headers: dict[str, UploadHeader | None] = {}
    for key, body in bodies.items():
        try:
            headers[key] = None if body is None else objects.read_header(key, body)
        except DamagedObject:
            headers[key] = None
    return headers


def find_turn(last: Manifest | None, rank: int, world: int, *, is_idle: bool) -> int:
    """A rank's place in the order in which replicas begin to look at uploads."""
    order = [member.rank for member in last.present if member.rank < world] if last else []
    order = order or list(range(world))
    place = order.index(rank) if rank in order else len(order) + rank
    # Who has nothing to train on must not go on without those who train.
    return place + world if is_idle else place


def find_turn_after(manifest: Manifest, name: str, rank: int) -> int:
    """A rank's place among those who make a mean if its owner does not: members come first."""
    ranks = [member.rank for member in manifest.present]
    owner = manifest.owner_of(name)
    if owner is None or rank not in ranks:
        return len(ranks) + rank
    return (ranks.index(rank) - ranks.index(owner)) % len(ranks)


def examine(
    listing: Iterable[tuple[str, float]],
    headers: Mapping[str, UploadHeader | None],
    terms: Terms,
    last: Manifest | None,
    launch: str,
) -> Look:
    """Sort what a LIST shows, with the headers of this round's uploads.

    Of two good uploads of a rank the newest counts. An upload without a readable header is not
    there. A rank that has a good upload is not refused for another one.
    """
    look = Look()
    refused: list[Refusal] = []
    members = {member.rank for member in last.members} if last else set()
    for key, time in listing:
        if ended := objects.parse_ended(key, launch):
            look.ended[ended[0]] = ended[1]
            continue
        name = objects.parse_upload(key)
        if name is None:
            continue
        look.keys.add(key)
        if name.round > terms.round:
            look.has_later = True
        elif name.round == terms.round - 1 and name.rank not in members:
            look.late.add(name.rank)
        header = headers.get(key) if name.round == terms.round else None
        if header is None:
            continue
        reason = find_fault(header, terms)
        if reason:
            refused.append(Refusal(name.rank, key, reason))
            continue
        known = look.there.get(name.rank)
        if known is None or (known.time, known.key) < (time, key):
            look.there[name.rank] = Candidate(key, time, header)
    look.refused = [each for each in refused if each.rank not in look.there]
    return look


def find_fault(header: UploadHeader, terms: Terms) -> str:
    """Why an upload may not be in the round; empty: it may."""
    if header.world != terms.world or header.rank >= terms.world:
        return f"rank {header.rank} of a world of {header.world}, here it is {terms.world}"
    if header.layout != terms.layout:
        return "its layout is another one"
    if header.chain != terms.chain:
        return "it comes from another state: the replica was outdated"
    hold = terms.ledger.hold_of(header.rank) if terms.ledger else header.claim
    if not ranges.is_well_formed(header.claim) or not ranges.is_inside(header.claim, hold):
        return "it claims data that its rank does not hold"
    return ""


def decide_manifest(
    there: Collection[int],
    expected: Collection[int],
    ended: Mapping[int, str],
    needs: int,
    world: int,
    *,
    together: Collection[int] = (),
    is_grace_over: bool,
    is_timeout: bool = False,
) -> Decision:
    """Who is in the round, or whom to wait for.

    Ranks that have ended are not waited for; those that are done lower what a quorum needs, those
    that failed or left do not. `together`: this is the first round of ranks that were started
    together. All of them are waited for until the timeout, and their strict majority must be there.
    """
    done = sum(how == objects.DONE and rank not in there for rank, how in ended.items())
    if together:
        needs = max(needs, len(together) // 2 + 1)
    needs = max(1, min(needs, world - done))
    has_quorum = len(there) >= needs
    missing = sorted({*expected, *together} - {*there} - {*ended})
    is_waiting = any(rank in together for rank in missing) and not is_timeout
    is_waiting = is_waiting or (bool(missing) and not is_grace_over and not is_timeout)
    if not has_quorum or is_waiting:
        return Decision(None, tuple(missing), has_quorum)
    return Decision(tuple(sorted(there)), tuple(missing), has_quorum)


def make_manifest(
    look: Look,
    decision: Decision,
    terms: Terms,
    *,
    shards: int,
    cells: int,
    has_direct: bool,
    needs: int,
    nonce: str,
) -> Manifest:
    """The manifest of a decision. Claims that the ledger does not allow together are refused."""
    assert decision.ranks is not None
    ranks, refused = list(decision.ranks), list(look.refused)
    for reason, rank in _find_conflicts(look, ranks, terms):
        ranks.remove(rank)
        refused.append(Refusal(rank, look.there[rank].key, reason))
    weights = cap_weights({rank: look.there[rank].header.weight for rank in ranks})
    times = look.times
    return Manifest(
        round=terms.round,
        chain=terms.chain,
        plan="direct" if has_direct and len(ranks) <= 2 else "flat",
        shards=shards,
        cells=cells,
        world=terms.world,
        members=tuple(_make_member(look, rank, weights[rank]) for rank in ranks),
        missing=decision.missing,
        refused=tuple(refused),
        decided_by=nonce,
        spread_s=max(0.0, times[-1] - times[min(needs, len(times)) - 1]),
    )


def _make_member(look: Look, rank: int, weight: float) -> Member:
    key, _, header = look.there[rank]
    return Member(
        rank=rank,
        upload=key,
        weight=weight,
        processes=header.processes,
        steps=header.steps,
        tokens=header.tokens,
        claim=header.claim,
        want=header.want,
        end=header.end,
        sections=header.sections,
        has_left=header.is_leaving or look.ended.get(rank) == objects.LEFT,
    )


def _find_conflicts(look: Look, ranks: list[int], terms: Terms) -> list[tuple[str, int]]:
    """Members whose claims are good alone, but not beside the others'."""
    if terms.ledger is None:
        return []
    found: list[tuple[str, int]] = []
    while True:
        chosen = [rank for rank in ranks if rank not in {rank for _, rank in found}]
        claims = [claim_of(_make_member(look, rank, 1.0)) for rank in chosen]
        try:
            commit(terms.ledger, claims, terms.world)
            return found
        except InvalidClaim as error:
            found += [(str(error), rank) for rank in error.ranks]


def claim_of(member: Member) -> Claim:
    """What a member says to the ledger."""
    return Claim(member.rank, member.claim, member.want, member.end)


def cap_weights(weights: Mapping[int, float]) -> dict[int, float]:
    """No rank counts more than HEAVIEST times the lower median of those that count."""
    counted = sorted(weight for weight in weights.values() if weight > 0)
    if not counted:
        return dict(weights)
    most = HEAVIEST * counted[(len(counted) - 1) // 2]
    return {rank: min(weight, most) for rank, weight in weights.items()}
