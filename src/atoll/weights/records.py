"""The objects of a weight channel: their keys and what the small ones hold.

log/N               create-only: the claim of a publisher, or a version
delta/N.WHO.TRY/K   part K of what version N changes against its parent
full/N.WHO.TRY/…    version N as a Hugging Face folder; its `atoll.json` is written last
…/K.WHO.SERIAL.json share K of version N, which WHO has put there for the publisher
lease/ID/N          empty: follower ID stands on version N
lease/ID/N.joining  empty: follower ID is on its way in, and needs what comes after N

Numbers have ten digits, so a LIST is in their order. Whoever may write to the bucket is trusted,
but objects may be torn or damaged: parsers answer None for other keys, `unseal` raises Damaged.
"""

from __future__ import annotations

import hashlib
import re
from typing import NamedTuple, TypeVar

import msgspec

from atoll.core.errors import AtollError
from atoll.core.model import Model, json_decoder

T = TypeVar("T")

SEAL = "atoll.json"  # of a full copy
# A claim has at most 157 bytes, a version at least 201: the size in a LIST tells them apart.
MAX_CLAIM_BYTES = 160
_KEY = re.compile(r"(?P<kind>delta|full)/(?P<number>[0-9]{10})\.(?P<who>[0-9a-f]+)\.[0-9]+/.+")
_LOG = re.compile(r"log/([0-9]{10})")
_LEASE = re.compile(r"lease/([^/]+)/([0-9]{10})(\.joining)?")
_SHARE = re.compile(r".+/([0-9]{5})\.([0-9a-f]+)\.[0-9]+\.json")


class Damaged(AtollError):
    """An object is not what it was written as, or does not fit the version that it is for."""


class Part(Model, frozen=True):
    key: str
    size: int
    sha256: str


class Claim(Model, frozen=True, tag_field="kind", tag="claim"):
    """From this number on, `publisher` alone publishes; `run`: for the replicas of this run."""

    number: int
    publisher: str
    run: str = ""


class VersionRecord(Model, frozen=True, tag_field="kind", tag="version"):
    """A version. Without `parent` it has no parts: its full copy was written before it.

    `state`: a digest of names, types, shapes and values. `changed`: values that differ from the
    parent's. `bytes`: what was uploaded for it. `run`, `round`: replicas of that run published it
    together, after that round.
    """

    number: int
    publisher: str
    state: str
    step: int | None = None
    parent: int | None = None
    parts: tuple[Part, ...] = ()
    removed: tuple[str, ...] = ()
    changed: int = 0
    bytes: int = 0
    run: str = ""
    round: int = 0


Record = Claim | VersionRecord


class Share(Model, frozen=True):
    """What one of several brings to a version: parts of a delta, or files of a full copy.

    `state`: of its values. `files`: their SHA-256; `names`: the file of each tensor.
    """

    state: str
    parts: tuple[Part, ...] = ()
    files: dict[str, str] = {}
    names: dict[str, str] = {}
    changed: int = 0
    size: int = 0


class FullCopy(Model, frozen=True):
    """The last object of a full copy: the SHA-256 of each of its files."""

    state: str
    files: dict[str, str]


_RECORDS: msgspec.json.Decoder[Record] = json_decoder(Record)  # type: ignore[arg-type]
_FULL_COPIES = json_decoder(FullCopy)
_SHARES = json_decoder(Share)


class Try(NamedTuple):
    """Where the objects of one try to publish are."""

    folder: str
    number: int
    who: str


class Row(NamedTuple):
    """An object in the answer to a List. `time`: of its last write, by the store's clock."""

    key: str
    time: float
    size: int


def log_key(number: int) -> str:
    return f"log/{number:010d}"


def log_number(key: str) -> int | None:
    match = _LOG.fullmatch(key)
    return int(match[1]) if match else None


def looks_like_claim(size: int) -> bool:
    """Whether a record of this size need not be read.

    A damaged version may look like one: what follows does not name the parent that it should.
    """
    return size <= MAX_CLAIM_BYTES


class Lease(NamedTuple):
    """What comes after `number` is to stay for the follower."""

    follower: str
    number: int
    is_joining: bool


def lease_key(follower: str, number: int, *, is_joining: bool) -> str:
    return f"lease/{follower}/{number:010d}{'.joining' if is_joining else ''}"


def read_lease(key: str) -> Lease | None:
    match = _LEASE.fullmatch(key)
    return Lease(match[1], int(match[2]), match[3] is not None) if match else None


def try_folder(kind: str, number: int, who: str, attempt: int) -> str:
    return f"{kind}/{number:010d}.{who}.{attempt}"


def read_try(key: str) -> Try | None:
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    return Try("/".join(key.split("/")[:2]), int(match["number"]), match["who"])


def share_key(folder: str, index: int, who: str, serial: int) -> str:
    """What the keys of a share begin with; that of its description ends with `.json`."""
    return f"{folder}/{index:05d}.{who}.{serial}"


def read_share_key(key: str) -> tuple[int, str] | None:
    """The number of the share that this key describes, and who has put it there."""
    match = _SHARE.fullmatch(key)
    return (int(match[1]), match[2]) if match else None


def seal(record: Record | FullCopy | Share) -> bytes:
    """The record as JSON, with its SHA-256 on a line of its own."""
    body = msgspec.json.encode(record)
    return body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"


def unseal(data: bytes | memoryview) -> FullCopy:
    """The last object of a full copy. Raises Damaged."""
    return _decode(data, _FULL_COPIES)


def unseal_share(data: bytes | memoryview) -> Share:
    """Raises Damaged."""
    return _decode(data, _SHARES)


def read_record(data: bytes | memoryview, number: int) -> Record:
    """The record of this number. Raises Damaged."""
    record = _decode(data, _RECORDS)
    if record.number != number:
        raise Damaged(f"record {number} says that it is {record.number}")
    return record


def _decode(data: bytes | memoryview, decoder: msgspec.json.Decoder[T]) -> T:
    body, _, digest = bytes(data).rstrip(b"\n").rpartition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise Damaged("a record does not have its SHA-256")
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise Damaged(f"a record of another form: {error}") from None
