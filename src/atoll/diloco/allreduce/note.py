"""What a replica says with its upload, beside its values: how far it trained, and on which data.

It stands in the name of the upload, so that the LIST on which a manifest is decided has all of it,
and in full in the footer. The manifest repeats it for each member, so that every replica folds the
same clock and the same ledger.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from atoll.core.model import msgpack_decoder
from atoll.diloco.data import ranges
from atoll.diloco.data.ledger import Claim, Terms, difference
from atoll.diloco.data.ranges import Ranges

MAX_RANGES = 6
MAX_TEXT = 48  # of ranges: a name has room for 255 characters
DATA_ERROR = "data: "  # what the error of a void manifest begins with

NOTE = re.compile(
    r"C(?P<steps>[0-9a-z]+)-(?P<tokens>[0-9a-z_+-]+)"
    r"(?:\.D(?P<took>[0-9a-z_-]+)\.(?P<want>[0-9a-z]+)\.(?P<base>[0-9a-f]{8})"
    r"(?:\.e(?P<end>[0-9a-z]+))?)?"
)


class DataNote(msgspec.Struct, frozen=True):
    """`took` is None where the name had no room for it: it is in the footer.

    `base`: the digest of the ledger that the claim was made on.
    """

    took: Ranges | None
    want: int
    base: str
    end: int | None = None


class UploadNote(msgspec.Struct, frozen=True):
    """`steps` of the period, and the `tokens` that were counted in them. No `data`: no ledger."""

    steps: int
    tokens: float = 0.0
    data: DataNote | None = None


class NoteInFull(msgspec.Struct, frozen=True):
    """What the footer of an upload has."""

    note: UploadNote
    terms: Terms | None = None


_IN_FULL = msgpack_decoder(NoteInFull)


class MemberNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the manifest has of a member's note."""

    steps: int
    tokens: float = 0.0
    took: Ranges = ()
    want: int = 0
    end: int | None = None


class ManifestData(msgspec.Struct, frozen=True):
    """The ledger on which a round was decided: after `seq` rounds, with digest `base`."""

    seq: int
    base: str
    terms: Terms
    world: int


def write_note(note: UploadNote) -> str:
    """The note as a part of a name."""
    tokens = float(note.tokens).hex().replace(".", "_")
    text = f"C{ranges.base36(note.steps)}-{tokens}"
    data = note.data
    if data is None:
        return text
    took = data.took or ()
    inside = ranges.write(took)
    if len(took) > MAX_RANGES or len(inside) > MAX_TEXT:
        inside = f"x{ranges.digest(took)}"
    end = "" if data.end is None else f".e{ranges.base36(data.end)}"
    return f"{text}.D{inside}.{ranges.base36(data.want)}.{data.base[:8]}{end}"


def read_note(text: str) -> UploadNote | None:
    """What `write_note` wrote; None for anything else."""
    match = NOTE.fullmatch(text)
    if match is None:
        return None
    try:
        tokens = float.fromhex(match["tokens"].replace("_", "."))
        if not (math.isfinite(tokens) and tokens >= 0):
            return None
        data = None
        if match["took"] is not None:
            is_cut = match["took"].startswith("x") and "-" not in match["took"]
            data = DataNote(
                None if is_cut else ranges.read(match["took"]),
                int(match["want"], 36),
                match["base"],
                None if match["end"] is None else int(match["end"], 36),
            )
        return UploadNote(int(match["steps"], 36), tokens, data)
    except ValueError:
        return None


def member_note(note: UploadNote) -> MemberNote:
    data = note.data
    if data is None:
        return MemberNote(note.steps, note.tokens)
    return MemberNote(note.steps, note.tokens, data.took or (), data.want, data.end)


def claim_of(rank: int, note: MemberNote) -> Claim:
    return Claim(rank, note.took, note.want, note.end)


class DataRound(NamedTuple):
    """What a committed manifest says of the data: the ledger before it, and its claims."""

    data: ManifestData
    claims: tuple[Claim, ...]


class LedgerWriter(Protocol):
    """Keeps the ledger of a run; asked by the process that decides a round."""

    @property
    def rank(self) -> int: ...

    def after(self, round: DataRound) -> str:
        """The ledger after the round, for a checkpoint."""

    def data(self) -> ManifestData | None:
        """The ledger that the next round is decided on; None: this replica has none."""

    def refuses(self, rank: int, data: DataNote) -> str | None:
        """Why an upload cannot be in the round, in words."""

    def problem(self, round: DataRound | None) -> str | None:
        """Why a manifest is not one of this ledger."""


class UploadHeader(NamedTuple):
    """What an upload says. For `idle_s` it leaves the decision to those who train."""

    note: UploadNote
    terms: Terms | None = None
    idle_s: float = 0.0

    @property
    def is_single(self) -> bool:
        return self.note.data is not None

    @property
    def text(self) -> str:
        return write_note(self.note)

    @property
    def full(self) -> bytes:
        return msgspec.msgpack.encode(NoteInFull(self.note, self.terms))


class SaidUpload(NamedTuple):
    """An upload as its name tells of it: the rank, what it says, and how to read the rest."""

    rank: int
    note: UploadNote | None
    read: Callable[[], bytes]


class ValidUploads(NamedTuple):
    """`notes` of the uploads that may be in the round, and why others may not.

    `error`: why nobody may go on.
    """

    notes: dict[int, UploadNote | None]
    error: str = ""
    refused: dict[int, str] = {}


def sift(
    ledger_writer: LedgerWriter | None, uploads: Sequence[SaidUpload], rank: int
) -> ValidUploads:
    """Which uploads may be in a round that `rank` decides on."""
    data = None if ledger_writer is None else ledger_writer.data()
    notes = {each.rank: each.note for each in uploads}
    for each in uploads:
        shares = each.note is not None and each.note.data is not None
        if shares != (data is not None):
            one, other = (each.rank, rank) if shares else (rank, each.rank)
            return ValidUploads(
                {}, f"rank {one} shares its data by diloco.shard(), rank {other} does not"
            )
    if data is None or ledger_writer is None:
        return ValidUploads(notes)
    refused: dict[int, str] = {}
    for each in uploads:
        note = each.note
        assert note is not None
        assert note.data is not None
        is_foreign = note.data.base[:8] != data.base[:8]
        if is_foreign or note.data.took is None:
            try:
                full = _IN_FULL.decode(each.read())
            except (msgspec.MsgspecError, ValueError) as error:
                refused[each.rank] = str(error)
                continue
            other_terms = None if full.terms is None else difference(data.terms, full.terms)
            if is_foreign and other_terms is None and full.terms is not None:
                if full.terms.first != data.terms.first:  # it follows from the steps of a period
                    return ValidUploads({}, f"sync_every of ranks {each.rank} and {rank} differs")
            if is_foreign and other_terms is not None:
                name, mine, theirs = other_terms
                return ValidUploads(
                    {}, f"{name} is {theirs!r} in rank {each.rank} and {mine!r} in rank {rank}"
                )
            note = notes[each.rank] = full.note
        assert note.data is not None
        reason = ledger_writer.refuses(each.rank, note.data)
        if reason is not None:
            refused[each.rank] = reason
    good = {rank: note for rank, note in notes.items() if rank not in refused}
    return ValidUploads(good, refused=refused)
