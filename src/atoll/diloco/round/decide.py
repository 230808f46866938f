"""Who is in a round: a pure decision on the uploads that one look at the store has shown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from atoll.core.errors import BelowMinimumWorld
from atoll.diloco.data import ranges
from atoll.diloco.data.ledger import Claim, InvalidClaim, Ledger, commit
from atoll.diloco.round import objects
from atoll.diloco.round.effects import UNKNOWN_LAUNCH, RoundConfig, UnlikeUpload
from atoll.diloco.round.objects import (
    DamagedObject,
    Departed,
    Manifest,
    Member,
    Refusal,
    Rest,
    UploadHeader,
)

HEAVIEST = 100  # times the lower median: a weight beyond it is a mistake of its rank


class Terms(NamedTuple):
    """What an upload has to agree with: the deciding replica's own state.

    `cells` of each fragment. `departed`: what those who left bring to this round and later ones.
    `sums`: what the replica says of its settings. `opened`: since when it is here, by the store's
    time.
    """

    round: int
    chain: str
    layout: str
    world: int
    ledger: Ledger | None
    cells: tuple[int, ...] = (1,)
    departed: tuple[Departed, ...] = ()
    sums: Mapping[str, str] = {}
    opened: float = 0.0


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
    unlike: list[Candidate] = field(default_factory=list)  # refused for settings of their replica
    ended: dict[int, str] = field(default_factory=dict)
    ended_at: dict[int, float] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)  # for the last round
    keys: set[str] = field(default_factory=set)
    later: list[str] = field(default_factory=list)  # uploads to later rounds

    @property
    def has_leaving(self) -> bool:
        """Whether one that goes, or is gone, has uploaded what it had."""
        return any(each.header.is_leaving for each in self.there.values())


class Decision(NamedTuple):
    """`ranks` are in the round; None: wait for `missing`. A quorum `needs` so many."""

    ranks: tuple[int, ...] | None
    missing: tuple[int, ...]
    has_quorum: bool
    needs: int = 1


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

    Of two good uploads of a rank the newest counts, or the one of a replica that leaves: it cannot
    come again, while the other goes with the next round. An upload without a readable header is
    not there. A rank that has a good upload is not refused for another one.
    """
    look = Look()
    refused: list[tuple[Candidate, str]] = []
    members = {each.rank for each in last.members if not each.is_rest} if last else set()
    for key, time in listing:
        if ended := objects.parse_ended(key, launch):
            if time < terms.opened and launch == UNKNOWN_LAUNCH:
                continue  # in an earlier life of the run: it may come again, as this replica did
            look.ended[ended[0]] = ended[1]
            look.ended_at[ended[0]] = time
            continue
        name = objects.parse_upload(key)
        if name is None:
            continue
        look.keys.add(key)
        if name.round > terms.round:
            look.later.append(key)
        elif name.round == terms.round - 1 and name.rank not in members:
            look.late.add(name.rank)
        header = headers.get(key) if name.round <= terms.round else None
        if header is None:
            continue
        found = Candidate(key, time, header)
        if name.round < terms.round:
            later = carry_over(found, terms, last)
            if later is None:
                continue
            found = later
        reason = find_fault(found.header, terms)
        if reason:
            refused.append((found, reason))
            continue
        known = look.there.get(name.rank)
        if known is None or _precedence(known) < _precedence(found):
            look.there[name.rank] = found
    refused = [(each, why) for each, why in refused if each.header.rank not in look.there]
    look.refused = [Refusal(each.header.rank, each.key, why) for each, why in refused]
    look.unlike = [
        each
        for each, _ in refused
        if each.header.chain == terms.chain and find_difference(each.header, terms)
    ]
    return look


def find_left_over(
    listing: Iterable[tuple[str, float]], round: int, last: Manifest | None
) -> list[str]:
    """Uploads to the last round that it did not take: those of one that leaves count in this."""
    if last is None:
        return []
    uploads = {each.upload for each in last.members} | {each.upload for each in last.refused}
    names = ((key, objects.parse_upload(key)) for key, _ in listing)
    return [key for key, name in names if name and name.round == round - 1 and key not in uploads]


def carry_over(found: Candidate, terms: Terms, last: Manifest | None) -> Candidate | None:
    """What one that leaves brought to the last round, decided in that moment without its upload.

    As a late row goes with the next upload of its replica, the rows go with the next rounds of
    their fragments. None: the replica has not left, or another one of its rank was in.
    """
    key, time, header = found
    if last is None or header.chain != last.chain or not header.is_leaving:
        return None
    rows, member = list(header.rest), last.member(header.rank)
    if member is None or member.is_rest:
        cells = terms.cells[last.round % len(terms.cells)]
        rows.append(Rest(key, header.weight, cells, header.sections))
    else:
        # The same row was in it, by an earlier upload of this start that had no others with it.
        name = objects.parse_upload(member.upload)
        if name is None or name.nonce != header.nonce or member.rest:
            return None
        header = msgspec.structs.replace(
            header,
            steps=max(0, header.steps - member.steps),
            tokens=max(0.0, header.tokens - member.tokens),
            claim=ranges.minus(header.claim, member.claim),
        )
    if not any(row.weight for row in rows):
        return None
    first, *more = rows
    header = msgspec.structs.replace(
        header,
        chain=terms.chain,
        weight=first.weight,
        sections=first.sections,
        rest=tuple(more),
    )
    return Candidate(first.upload, time, header)


def _precedence(found: Candidate) -> tuple[bool, float, str]:
    return found.header.is_leaving, found.time, found.key


def find_difference(header: UploadHeader, terms: Terms) -> str:
    """In what the settings of its replica differ from this one's; empty: in nothing."""
    if header.world != terms.world or header.rank >= terms.world:
        return f"world_size is {header.world} there and {terms.world} here"
    ours = "" if terms.ledger is None else terms.ledger.terms.digest
    has_other_data = header.data != ours and bool(header.data or header.weight or header.claim)
    if header.layout == terms.layout and not has_other_data:
        return ""
    for name, mine in terms.sums.items():
        theirs = header.sums.get(name, mine)
        if theirs != mine:
            return f"{name} is {theirs!r} there and {mine!r} here"
    return "it shares other data" if has_other_data else "its layout is another one"


def make_unlike(rank: int, theirs: int, reason: str) -> UnlikeUpload:
    """The error of `rank` for an upload of `theirs`; the field is the setting that differs."""
    field, is_named, _ = reason.partition(" is ") if " there" in reason else ("", "", "")
    return UnlikeUpload(
        field if is_named else "settings", f"of rank {rank}", f"rank {theirs}: {reason}"
    )


def find_fault(header: UploadHeader, terms: Terms) -> str:
    """Why an upload may not be in the round; empty: it may."""
    if difference := find_difference(header, terms):
        return difference
    if header.chain != terms.chain:
        return "it comes from another state: the replica was outdated"
    if not header.claim:
        return ""
    hold = terms.ledger.hold_of(header.rank) if terms.ledger else header.claim
    if not ranges.is_well_formed(header.claim) or not ranges.is_inside(header.claim, hold):
        return "it claims data that its rank does not hold"
    return ""


def find_refusal(
    manifest: Manifest,
    header: UploadHeader | None,
    uploads: Collection[str],
    *,
    is_empty_handed: bool,
) -> str:
    """Why the round was decided without these uploads, if that is for their replica's settings."""
    reasons = [each.reason for each in manifest.refused if each.upload in uploads]
    if header is None or not reasons:
        return ""
    data = "" if manifest.data is None else manifest.data.digest
    has_other_data = header.data != data and not is_empty_handed
    return reasons[-1] if has_other_data or header.layout != manifest.layout else ""


def decide_manifest(
    there: Collection[int],
    expected: Collection[int],
    ended: Mapping[int, str],
    needs: int,
    world: int,
    *,
    together: int = 0,
    is_grace_over: bool,
    is_timeout: bool = False,
) -> Decision:
    """Who is in the round, or whom to wait for.

    Ranks that have ended are not waited for; those that are done lower what a quorum needs, those
    that failed or left do not. `together`: this is the first round, and so many ranks were started
    together, whichever they are. All of them are waited for until the timeout, nobody else is, and
    their strict majority must be there.
    """
    done = sum(how == objects.DONE and rank not in there for rank, how in ended.items())
    here = {*there, *ended}
    if together:
        needs = max(needs, together // 2 + 1)
        absent = [rank for rank in range(world) if rank not in here]
        missing = absent[: max(0, together - len(here))]
        is_waiting = bool(missing) and not is_timeout
    else:
        missing = sorted({*expected} - here)
        is_waiting = bool(missing) and not is_grace_over and not is_timeout
    needs = max(1, min(needs, world - done))
    has_quorum = len(there) >= needs
    if not has_quorum or is_waiting:
        return Decision(None, tuple(missing), has_quorum, needs)
    return Decision(tuple(sorted(there)), tuple(missing), has_quorum, needs)


def make_below_minimum(
    look: Look, decision: Decision, round: int, timeout_s: float
) -> BelowMinimumWorld:
    """The error of a round that has no quorum: it says why ranks are not there."""
    refused = {each.rank: each.reason for each in look.refused}
    groups = {
        "missing": {*decision.missing} - {*refused},
        "finished": set[int](),
        "failed": set[int](),
        "left": set[int](),
    }
    names = {objects.DONE: "finished", objects.FAILED: "failed", objects.LEFT: "left"}
    for rank, how in look.ended.items():
        if rank not in look.there:
            groups[names[how]].add(rank)
    for rank, reason in refused.items():
        groups.setdefault(f"refused, as {reason}", set()).add(rank)
    reasons = "".join(f"; {why}: ranks {sorted(who)}" for why, who in groups.items() if who)
    there, needs = len(look.there), decision.needs
    return BelowMinimumWorld(
        f"round {round}: {there} of at least {needs} ranks uploaded within {timeout_s:g} s"
        f"{reasons}",
        ready=there,
        required_min=needs,
        timeout=timeout_s,
    )


def make_manifest(
    look: Look,
    decision: Decision,
    terms: Terms,
    config: RoundConfig,
    next_s: float = 0.0,
) -> Manifest:
    """The manifest of a decision. Claims that the ledger does not allow together are refused.

    Whoever left in one of the last rounds is in it with the rest of its values. Another process of
    its rank is late then: what it brings goes with the next round.
    """
    assert decision.ranks is not None
    ranks, refused = list(decision.ranks), list(look.refused)
    rests = find_rests(terms)
    cut = next((each for each in rests if each.layout != terms.layout), None)
    if cut is not None:  # values of two cuts do not go into one mean: all others are late
        ranks, rests = [], [each for each in rests if each.layout == cut.layout]
    if terms.ledger is not None:
        for reason, rank in _find_conflicts(look, ranks, terms.ledger, terms.world):
            ranks.remove(rank)
            refused.append(Refusal(rank, look.there[rank].key, reason))
    found = {each.member.rank: each.member for each in rests}
    found |= {rank: _make_member(look, rank) for rank in ranks if rank not in found}
    weights = cap_weights({rank: member.weight for rank, member in found.items()})
    times = sorted(each.time for each in look.there.values())
    is_direct = (
        config.has_direct
        and len(found) <= 2
        # What lies in the folder of another round is swept with that.
        and all(objects.parse_round(each.upload) == terms.round for each in found.values())
    )
    return Manifest(
        round=terms.round,
        chain=terms.chain,
        layout=terms.layout,
        plan="direct" if is_direct else "flat",
        shards=cut.shards if cut else config.shards,
        cells=cut.cells if cut else config.cells[terms.round % len(config.cells)],
        world=terms.world,
        members=tuple(
            msgspec.structs.replace(found[rank], weight=weights[rank]) for rank in sorted(found)
        ),
        fragments=len(config.cells),
        size=config.sizes[terms.round % len(config.cells)] if config.sizes else 0,
        codec=cut.codec if cut else config.codec,
        mean_codec=cut.mean_codec if cut else config.mean_codec,
        data=None if terms.ledger is None else terms.ledger.terms,
        missing=decision.missing,
        refused=tuple(refused),
        decided_by=config.nonce,
        spread_s=max(0.0, times[-1] - times[min(config.quorum, len(times)) - 1]),
        next_s=next_s,
    )


def find_rests(terms: Terms) -> list[Departed]:
    """What those who left bring to this round."""
    return [each for each in terms.departed if each.round == terms.round]


def fold_departed(departed: Iterable[Departed], manifest: Manifest) -> tuple[Departed, ...]:
    """What those who left bring to the rounds after this one."""
    left = (
        Departed(
            manifest.round + ahead,
            Member(
                rank=member.rank,
                upload=rest.upload,
                weight=rest.weight,
                processes=member.processes,
                sections=rest.sections,
                has_left=True,
                is_rest=True,
            ),
            *(manifest.layout, manifest.shards, rest.cells, manifest.codec, manifest.mean_codec),
        )
        for member in manifest.members
        for ahead, rest in enumerate(member.rest, 1)
        if rest.weight
    )
    return tuple(each for each in (*departed, *left) if each.round > manifest.round)


def _make_member(look: Look, rank: int) -> Member:
    key, _, header = look.there[rank]
    return Member(
        rank=rank,
        upload=key,
        weight=header.weight,
        processes=header.processes,
        steps=header.steps,
        tokens=header.tokens,
        claim=header.claim,
        want=header.want,
        end=header.end,
        sections=header.sections,
        sums=header.sums,
        has_left=header.is_leaving or look.ended.get(rank) == objects.LEFT,
        rest=header.rest,
    )


def _find_conflicts(
    look: Look, ranks: list[int], ledger: Ledger, world: int
) -> list[tuple[str, int]]:
    """Members whose claims are good alone, but not beside the others'."""
    found: list[tuple[str, int]] = []
    while True:
        chosen = [rank for rank in ranks if rank not in {rank for _, rank in found}]
        try:
            commit(ledger, claims_of(_make_member(look, rank) for rank in chosen), world)
            return found
        except InvalidClaim as error:
            found += [(str(error), rank) for rank in error.ranks]


def claims_of(members: Iterable[Member]) -> list[Claim]:
    """What the members say to the ledger. Who left before has said it then."""
    return [
        Claim(each.rank, each.claim, each.want, each.end) for each in members if not each.is_rest
    ]


def check_cut(manifest: Manifest, sizes: Sequence[int]) -> Manifest:
    """Refuse a cut that no world has: memory is taken for each of its cells."""
    if sizes:
        size = sizes[manifest.round % len(sizes)]
        most = 16 * manifest.shards + size // 4096  # see cells.cells_per_shard
        if manifest.size != size or manifest.cells > most or manifest.cells % manifest.shards:
            key = objects.manifest_key(manifest.round)
            raise DamagedObject(key, f"{size} values are not cut into {manifest.cells} cells")
    return manifest


def describe_foreign(manifest: Manifest, name: str) -> str:
    """Why a replica cannot go on with a stored mean or receipt."""
    key = objects.manifest_key(manifest.round)
    text = f"{manifest.key_of(name)} does not belong to {key}"
    if manifest.plan == objects.DIRECT:
        folder = objects.from_round("upload", manifest.round)
        text += f", or an upload in {folder} is missing or damaged"
    return text


def cap_weights(weights: Mapping[int, float]) -> dict[int, float]:
    """No rank counts more than HEAVIEST times the lower median of those that count."""
    counted = sorted(weight for weight in weights.values() if weight > 0)
    if not counted:
        return dict(weights)
    most = HEAVIEST * counted[(len(counted) - 1) // 2]
    return {rank: min(weight, most) for rank, weight in weights.items()}
