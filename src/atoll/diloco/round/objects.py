"""The objects of a run: their keys and what the small ones hold.

upload/ROUND/RANK.NONCE-SERIAL    what one replica brings to a round; its header is at the end
upload/ROUND/RANK.NONCE-SERIAL+K  what one that left K rounds before brings to this round
part/ROUND/RANK.NONCE-SERIAL/P    cells of process P of a replica of several
manifest/ROUND                    who is in the round: creating it commits the round
mean/ROUND/SHARD.P                the mean of one shard, cut like its owner
receipt/ROUND/RANK                in a direct round: whether this member's upload is readable
checkpoint/ROUND.CHAIN            the state after so many rounds, once its pieces are stored
state/ROUND.NONCE/P               values and momentum of the cells that process P carries
upload/ended/LAUNCH/RANK.HOW      the mark of a rank that has ended: done, failed or left
history/BLOCK                     the manifests of a block of old rounds
probe/NONCE                       created twice at the start: does the store refuse the second?

Keys are relative to the run's prefix. Numbers in them are ASCII digits of a fixed width, so a
LIST is in the order of rounds. Whoever may write to the bucket can store anything under any key:
the parsers answer None for keys that no replica makes, the decoders raise DamagedObject.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Annotated, Final, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from atoll.core.model import json_decoder
from atoll.diloco.data.ledger import Terms
from atoll.diloco.data.ranges import Ranges

T = TypeVar("T")

FORMAT: Final = 2  # of all objects of a run; 1 had manifests with attempts
MAX_ROUND = 99_999_999  # eight digits: at a round a second, three years
MAX_RANK = 99_999
MAX_PROCESSES = 99_999
ZERO = "0" * 32  # the chain before the first round

FLAT, DIRECT = "flat", "direct"
DONE, FAILED, LEFT = "done", "failed", "left"

_ROUND, _RANK, _NONCE, _HEX = "([0-9]{8})", "([0-9]{5})", "([0-9a-f]{16})", "([0-9a-f]{32})"
_NUMBER = "(0|[1-9][0-9]{0,4})"  # a process
_SERIAL = "([0-9]{6})"
_UPLOAD = re.compile(f"upload/{_ROUND}/{_RANK}\\.{_NONCE}-{_SERIAL}")
_PART = re.compile(f"part/{_ROUND}/{_RANK}\\.{_NONCE}-{_SERIAL}/{_NUMBER}")
_ENDED = re.compile(f"upload/ended/([A-Za-z0-9_-]{{1,100}})/{_RANK}\\.(done|failed|left)")
_CHECKPOINT = re.compile(f"checkpoint/{_ROUND}\\.{_HEX}")
_OF_ROUND = re.compile(
    f"(?:manifest/{_ROUND}|(?:upload|part|mean|receipt)/{_ROUND}/.+"
    f"|checkpoint/{_ROUND}\\.{_HEX}|state/{_ROUND}\\.{_NONCE}/.+)"
)


class DamagedObject(ValueError):
    """An object in the store is not what its key says."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(f"{key} is damaged: {reason}")
        self.key, self.reason = key, reason


# -- Keys ---------------------------------------------------------------------------------------


class UploadKey(NamedTuple):
    round: int
    rank: int
    nonce: str
    serial: int


class CheckpointKey(NamedTuple):
    round: int
    chain: str


def upload_key(round: int, rank: int, nonce: str, serial: int) -> str:
    return f"upload/{round:08d}/{rank:05d}.{nonce}-{serial:06d}"


def rest_key(upload: str, ahead: int) -> str:
    """The key under which one that leaves brings another fragment to a round that comes later."""
    round, name = upload.removeprefix("upload/").split("/")
    return f"upload/{int(round) + ahead:08d}/{name}+{ahead}"


def part_key(upload: str, process: int) -> str:
    """The key of the cells that one process of a replica carries of its upload."""
    return f"part/{upload.removeprefix('upload/')}/{process}"


def manifest_key(round: int) -> str:
    return f"manifest/{round:08d}"


def mean_key(round: int, name: str) -> str:
    return f"mean/{round:08d}/{name}"


def receipt_key(round: int, name: str) -> str:
    return f"receipt/{round:08d}/{name}"


def checkpoint_key(round: int, chain: str) -> str:
    return f"checkpoint/{round:08d}.{chain}"


def piece_key(round: int, nonce: str, process: int) -> str:
    return f"state/{round:08d}.{nonce}/{process}"


def ended_prefix(launch: str) -> str:
    return f"upload/ended/{launch}/"


def ended_key(launch: str, rank: int, how: str) -> str:
    return f"{ended_prefix(launch)}{rank:05d}.{how}"


def history_key(block: int) -> str:
    return f"history/{block:08d}"


def probe_key(nonce: str) -> str:
    return f"probe/{nonce}"


def folders_before(manifest: Manifest) -> tuple[str, ...]:
    """The folders of what a manifest names, and of the means that its chain follows from."""
    keys = []
    if before := manifest.round:
        keys = [f"{folder}/{before - 1:08d}/" for folder in ("mean", "receipt")]
    for member in manifest.members:
        uploads = [member.upload, *(each.upload for each in member.rest)]
        keys += uploads
        keys += [part_key(each, 0) for each in uploads if member.processes > 1]
    return tuple(sorted({key.rpartition("/")[0] for key in keys}))


def from_round(folder: str, round: int) -> str:
    """The `after` of a LIST that shows the objects of `round` and of later rounds."""
    return f"{folder}/{max(round, 0):08d}" if folder != "manifest" else manifest_key(round - 1)


def parse_upload(key: str) -> UploadKey | None:
    match = _UPLOAD.fullmatch(key)
    return match and UploadKey(int(match[1]), int(match[2]), match[3], int(match[4]))


def parse_ended(key: str, launch: str) -> tuple[int, str] | None:
    """The rank and how it ended, of a mark of this launch."""
    match = _ENDED.fullmatch(key)
    return (int(match[2]), match[3]) if match and match[1] == launch else None


def read_ended(body: bytes | None) -> tuple[int, str] | None:
    """The round and the chain at which a rank ended, as its mark says."""
    match = re.fullmatch(f"([0-9]{{1,8}}) {_HEX}".encode(), body or b"")
    return match and (int(match[1]), match[2].decode())


def parse_checkpoint(key: str) -> CheckpointKey | None:
    match = _CHECKPOINT.fullmatch(key)
    return match and CheckpointKey(int(match[1]), match[2])


def parse_round(key: str) -> int | None:
    """The round of any object that belongs to one."""
    match = _OF_ROUND.fullmatch(key)
    return None if match is None else int(next(each for each in match.groups() if each))


# -- Small objects ------------------------------------------------------------------------------

Rank = Annotated[int, Meta(ge=0, le=MAX_RANK)]
Round = Annotated[int, Meta(ge=0, le=MAX_ROUND)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Weight = Annotated[float, Meta(ge=0)]
Tokens = Annotated[float, Meta(ge=0)]
Processes = Annotated[int, Meta(ge=1, le=MAX_PROCESSES)]
Nonce = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Sections = tuple[tuple[Count, ...], ...]  # bytes, by process and shard


class Rest(msgspec.Struct, frozen=True):
    """What one that leaves brings to a round that comes later: a row, cut into `cells`."""

    upload: str
    weight: Weight
    cells: Count
    sections: Sections = ()


class UploadHeader(msgspec.Struct, frozen=True):
    """What an upload says of itself.

    `chain`: the state that the pseudo-gradient was taken from. `data`: the digest of the terms of
    the shared data; `claim`: the positions whose training it carries; `want`: how many positions
    the rank wants to hold; `end`: the stream ends there. `sections` are empty where they follow
    from the layout. `sums` are for the checks of the first rounds. `is_leaving`: the replica goes
    as soon as the upload is stored; `rest`: what it brings to the next rounds, one after the other.
    """

    rank: Rank
    nonce: Nonce
    chain: Digest
    weight: Weight
    layout: Digest
    world: Count
    processes: Processes
    steps: Count
    tokens: Tokens = 0.0
    data: str = ""
    claim: Ranges = ()
    want: Count = 0
    end: Count | None = None
    sections: Sections = ()
    sums: dict[str, str] = {}
    is_leaving: bool = False
    rest: tuple[Rest, ...] = ()


class Member(msgspec.Struct, frozen=True):
    """A replica in a round. `has_left`: its upload counts, but it owns no shard.

    `rest`: what it brings to the next rounds, one after the other. `is_rest`: it is such a one; an
    earlier manifest has committed it, and what it says of data.
    """

    rank: Rank
    upload: str
    weight: Weight
    processes: Processes = 1
    steps: Count = 0
    tokens: Tokens = 0.0
    claim: Ranges = ()
    want: Count = 0
    end: Count | None = None
    sections: Sections = ()
    sums: dict[str, str] = {}
    has_left: bool = False
    rest: tuple[Rest, ...] = ()
    is_rest: bool = False


class Departed(msgspec.Struct, frozen=True):
    """What one that left brings to `round`, in the cut of its world. Part of a run's state."""

    round: Round
    member: Member
    layout: Digest
    shards: Count
    cells: Count
    codec: str
    mean_codec: str


class Refusal(msgspec.Struct, frozen=True):
    """An upload that may not be in the round."""

    rank: Rank
    upload: str
    reason: str


class Manifest(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """Who is in a round, with which weights. Creating it commits the round.

    `cells` of the round's fragment go to the shards in turn, so the names of all means follow from
    the manifest alone; with the codecs, too, whoever comes later reads them, whatever its own cut.
    `fragments` of the run take turns; this one has `size` values. `data`: the terms of the shared
    data. `spread_s`: seconds between the upload that made the quorum and the last. `next_s`: the
    next period ends so many seconds after whoever is in the round had this; 0: it counts steps.
    """

    round: Round
    chain: Digest
    plan: Literal["flat", "direct"]
    shards: Annotated[int, Meta(ge=1, le=MAX_RANK + 1)]
    cells: Count
    world: Count
    members: tuple[Member, ...]
    missing: tuple[Rank, ...] = ()
    refused: tuple[Refusal, ...] = ()
    decided_by: Nonce = "0" * 16
    spread_s: float = 0.0
    next_s: Annotated[float, Meta(ge=0, le=1e9)] = 0.0
    layout: Digest = ZERO
    fragments: Annotated[int, Meta(ge=1)] = 1
    size: Count = 0
    codec: str = "fp32"
    mean_codec: str = "fp32"
    data: Terms | None = None
    format: Literal[2] = FORMAT

    @cached_property
    def digest(self) -> str:
        """Of the stored bytes: `read_manifest` takes no other spelling."""
        return digest(msgspec.json.encode(self))

    @cached_property
    def present(self) -> tuple[Member, ...]:
        """The members that own shards."""
        return tuple(member for member in self.members if not member.has_left)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of all means; in a direct round, of all receipts. None where nobody trained."""
        if not any(member.weight for member in self.members):
            return ()  # a round without work must not move the parameters
        if self.plan == DIRECT:
            return tuple(f"{each.rank:05d}" for each in self.members if each.weight)
        return tuple(
            f"{shard:05d}.{part}"
            for shard in range(self.shards)
            for part in _parts_with_cells(len(self.span(shard, 0, 1)), self.parts_of(shard))
        )

    @property
    def total_weight(self) -> float:
        return sum(member.weight for member in self.members)

    def member(self, rank: int) -> Member | None:
        return next((each for each in self.members if each.rank == rank), None)

    def key_of(self, name: str) -> str:
        """Of a mean; in a direct round, of a receipt."""
        return (mean_key if self.plan == FLAT else receipt_key)(self.round, name)

    def owner_of(self, name: str) -> int | None:
        """The rank that makes this mean or receipt first. None: everybody has left."""
        if self.plan == DIRECT:
            others = [each.rank for each in self.present if each.rank != int(name)]
            return others[0] if others else self.present[0].rank if self.present else None
        return self._owner_of_shard(shard_of(name))

    def _owner_of_shard(self, shard: int) -> int | None:
        owners = self.present
        return owners[(shard + self.round) % len(owners)].rank if owners else None

    def parts_of(self, shard: int) -> int:
        """Into how many parts the mean of a shard is cut: one for each process of its owner."""
        owner = self._owner_of_shard(shard)
        member = None if owner is None else self.member(owner)
        return 1 if member is None else member.processes

    def span(self, shard: int, part: int, parts: int) -> range:
        """The cells of `part` of `parts` of a shard, as numbers of cells of the fragment."""
        cells = range(shard, self.cells, self.shards)
        return cells[len(cells) * part // parts : len(cells) * (part + 1) // parts]


def _parts_with_cells(cells: int, parts: int) -> Iterable[int]:
    """Of a shard: there may be more parts than cells, and those without any are no objects."""
    if parts <= cells:
        return range(parts)
    return [-(-parts * cell // cells) - 1 for cell in range(1, cells + 1)]


class MeanHeader(msgspec.Struct, frozen=True):
    """Before the table and the cells of a mean. `excluded`: members whose cells are not in it."""

    manifest: Digest
    made_by: Nonce
    excluded: tuple[Rank, ...] = ()


class Receipt(msgspec.Struct, frozen=True):
    """Whether the upload of one member of a direct round can be read."""

    manifest: Digest
    made_by: Nonce
    rank: Rank
    is_readable: bool


class Checkpoint(msgspec.Struct, frozen=True):
    """The state after `round` rounds; its values are in the pieces of `nonce`.

    The pieces are cut by `shards` and `processes` of whoever saved it. `last`: the manifest of the
    round before. `ledger`: packed, where replicas share their data. `steps` and `tokens`: the run's
    clock.
    """

    round: Round
    chain: Digest
    layout: Digest
    shards: Count
    nonce: Nonce
    processes: Processes
    last: Manifest | None = None
    ledger: str = ""
    steps: Count = 0
    tokens: Tokens = 0.0
    departed: tuple[Departed, ...] = ()
    format: Literal[2] = FORMAT


class HistoryBlock(msgspec.Struct, frozen=True):
    """The manifests of a block of rounds, in order."""

    first: Round
    manifests: tuple[Manifest, ...]


class Outcome(NamedTuple):
    """What a stored mean or receipt says of itself, as it goes into the chain."""

    made_by: str
    excluded: tuple[int, ...] = ()


_HEADER = json_decoder(UploadHeader)
_MANIFEST = json_decoder(Manifest)
_MEAN = json_decoder(MeanHeader)
_RECEIPT = json_decoder(Receipt)
_CHECKPOINTS = json_decoder(Checkpoint)
_HISTORY = json_decoder(HistoryBlock)


def encode(what: msgspec.Struct) -> bytes:
    return msgspec.json.encode(what)


def read_header(key: str, body: bytes) -> UploadHeader:
    """The header of the upload at `key`; one of another rank or start is none."""
    header = _decode(_HEADER, key, body)
    name = parse_upload(key)
    if name is None or (name.rank, name.nonce) != (header.rank, header.nonce):
        raise DamagedObject(key, f"its header is of rank {header.rank}, start {header.nonce}")
    return header


def read_manifest(key: str, body: bytes) -> Manifest:
    manifest = _decode(_MANIFEST, key, body)
    if key != manifest_key(manifest.round):
        raise DamagedObject(key, f"it is the manifest of round {manifest.round}")
    if encode(manifest) != body:
        raise DamagedObject(key, "another version of atoll wrote it: its digest would differ")
    return manifest


def read_mean_header(key: str, body: bytes) -> MeanHeader:
    return _decode(_MEAN, key, body)


def read_receipt(key: str, body: bytes) -> Receipt:
    return _decode(_RECEIPT, key, body)


def read_checkpoint(key: str, body: bytes) -> Checkpoint:
    meta = _decode(_CHECKPOINTS, key, body)
    if key != checkpoint_key(meta.round, meta.chain):
        raise DamagedObject(key, f"it is the checkpoint of {meta.round} rounds, {meta.chain}")
    return meta


def read_history(key: str, body: bytes) -> HistoryBlock:
    return _decode(_HISTORY, key, body)


def _decode(decoder: msgspec.json.Decoder[T], key: str, body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedObject(key, str(error)) from error


def shard_of(name: str) -> int:
    """The shard of a mean's name."""
    return int(name.partition(".")[0])


def part_of(name: str) -> int:
    """The part of a mean's name."""
    return int(name.partition(".")[2])


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def extend_chain(manifest: Manifest, outcomes: Mapping[str, Outcome]) -> str:
    """The chain after a round. Equal chains are equal parameters and residuals."""
    rows = [(name, *outcomes[name]) for name in sorted(outcomes)]
    return digest(msgspec.json.encode((manifest.digest, rows)))
