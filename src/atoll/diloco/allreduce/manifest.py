"""Who is in a round: a pure decision, made once for everybody by one conditional write.

Whoever sees enough uploads proposes a manifest; the store lets exactly one proposal in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from atoll.core.errors import ValidationError
from atoll.core.model import json_decoder
from atoll.diloco.allreduce.keys import COMPLETE, UploadName, parse_upload
from atoll.diloco.allreduce.note import DATA_ERROR, DataRound, ManifestData, MemberNote, claim_of


class Member(msgspec.Struct, frozen=True):
    """`sections`: bytes of each section of the upload, process by process.

    It is empty where they follow from the layout. `said`: how far it trained, and on which data.
    """

    rank: int
    upload: str
    weight: float
    sections: list[int] = []
    header: MemberNote | msgspec.UnsetType = msgspec.UNSET  # unset in runs of older versions

    @property
    def processes(self) -> int:
        """How many processes carry the upload."""
        name = parse_upload(self.upload)
        return 1 if name is None else name.processes

    @property
    def note(self) -> str:
        """The word that the upload has for everybody."""
        name = parse_upload(self.upload)
        return "" if name is None else name.note

    @property
    def has_left(self) -> bool:
        """Whether its process has left: it owns no shard, and its upload has all of them."""
        return self.note == COMPLETE


class Manifest(msgspec.Struct, frozen=True):
    """`owners[s]` is the rank that makes the mean of shard `s`.

    A manifest without members makes the round void. `error` says why; where it is empty, everybody
    goes on to the next round.
    """

    run: str
    round: int
    attempt: int
    layout: bytes
    members: list[Member]
    owners: list[int]
    blamed: list[str]
    missing: list[int]
    by: str
    spread_s: float = 0.0
    error: str = ""
    data: ManifestData | msgspec.UnsetType = msgspec.UNSET  # where the replicas share their data
    owner_grace_s: float = 0.0  # as its author has learned it, for those who join; 0: not yet

    @property
    def digest(self) -> str:
        """Of what the round is; advice to those who join is no part of it."""
        facts = msgspec.structs.asdict(self)
        del facts["owner_grace_s"]
        if self.data is msgspec.UNSET:
            del facts["data"]
        return hashlib.blake2b(msgspec.json.encode(facts), digest_size=16).hexdigest()

    def data_round(self) -> DataRound | None:
        """What the round says of the data, if the replicas share it."""
        if isinstance(self.data, msgspec.UnsetType):
            return None
        return DataRound(
            self.data,
            tuple(
                claim_of(m.rank, m.header) for m in self.members if isinstance(m.header, MemberNote)
            ),
        )

    def refusal(self, rank: int) -> ValidationError:
        """What a manifest with an error means for a rank."""
        field, _, text = self.error.rpartition(DATA_ERROR)
        return ValidationError("data" if text != self.error else "tensors", f"of rank {rank}", text)

    def member(self, rank: int) -> Member | None:
        return next((m for m in self.members if m.rank == rank), None)

    def has(self, upload: str) -> bool:
        return any(m.upload == upload for m in self.members)

    @property
    def weights(self) -> dict[int, float]:
        return {m.rank: m.weight for m in self.members}


MANIFEST = json_decoder(Manifest)


class PastRound(NamedTuple):
    """The run is at round `latest`, far after the one asked for, which had `manifest`."""

    latest: int
    manifest: Manifest


class Quorum(NamedTuple):
    """Who is in a round, or None while that cannot be decided; `reason` says why."""

    members: list[int] | None
    reason: str


def check(
    listing: Iterable[tuple[str, datetime, UploadName]], number: int, blamed: Iterable[str]
) -> dict[int, UploadName]:
    """The newest upload of each rank to round `number`, without those in `blamed`.

    A rank has two when it was restarted within the round, or when two processes claim it.
    """
    blamed_keys = set(blamed)
    newest: dict[int, tuple[datetime, str]] = {}
    uploads: dict[int, UploadName] = {}
    for key, modified, name in listing:
        if name.round != number or key in blamed_keys:
            continue
        if name.rank not in newest or (modified, key) > newest[name.rank]:
            newest[name.rank] = (modified, key)
            uploads[name.rank] = name
    return uploads


def decide(
    uploaded: Iterable[int], expected: Iterable[int], min_replicas: int, *, is_grace_over: bool
) -> Quorum:
    """Who is in: all who uploaded, once nobody expected is missing or the grace is over."""
    there = sorted(set(uploaded))
    missing = sorted(set(expected) - set(there))
    if len(there) < min_replicas:
        return Quorum(None, f"{len(there)} of at least {min_replicas} ranks")
    if missing and not is_grace_over:
        return Quorum(None, f"waiting for {missing}")
    return Quorum(there, "all there" if not missing else f"without {missing}")


HEAVIEST = 100  # times the median: what one member may weigh at most
NOTHING = 1e-30  # the weight of a replica that has nothing to bring: as good as left out


def bounded(weights: Mapping[int, float]) -> dict[int, float]:
    """The weights by rank, none beyond HEAVIEST times the median of those that weigh something."""
    real = sorted(weight for weight in weights.values() if weight > NOTHING)
    if not real:
        return dict(weights)
    most = HEAVIEST * real[(len(real) - 1) // 2]
    return {rank: min(weight, most) for rank, weight in weights.items()}


def owners(members: Sequence[int], shards: int, number: int) -> list[int]:
    """The owner of each shard: the member of that rank; shards of absent ranks rotate.

    A member leaves its own shard out of its upload, so nobody else can compute its mean.
    """
    present = set(members)
    orphans = [shard for shard in range(shards) if shard not in present]
    stand_in = {shard: members[(number + i) % len(members)] for i, shard in enumerate(orphans)}
    return [stand_in.get(shard, shard) for shard in range(shards)]


def turn(rank: int, order: Sequence[int], world_size: int) -> int:
    """How many others try to decide the manifest before this rank does."""
    return order.index(rank) if rank in order else len(order) + (rank % world_size)


def blamed_uploads(manifest: Manifest, ranks: Iterable[int]) -> list[str]:
    by_rank: Mapping[int, str] = {m.rank: m.upload for m in manifest.members}
    return [by_rank[rank] for rank in ranks if rank in by_rank]
