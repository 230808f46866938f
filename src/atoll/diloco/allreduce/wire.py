"""The format of objects: each one, and each section of an upload, is a sealed envelope.

An envelope carries its kind, a fence (a digest of the place it belongs to), its length and a
checksum. Bytes that were cut, changed, or made for another run, round, rank or place do not open.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from atoll.core.model import json_decoder, msgpack_decoder

Buffer = bytes | bytearray | memoryview

SEAL = struct.Struct("<4s4s16sQI")
MAGIC = b"ATL1"
FOLD_BYTES = 64 * 1024 * 8
UNIT_BYTES = 16 * 128 * 8  # of a cell, summed together; cells of plain values are of whole units
FOLDED = 16  # so many bytes of a unit become one of its sums
SUMMED_BYTES = 1 << 20  # at a time; a multiple of the unit
MAX_FOOTER = 16 << 20  # a layout, and the lengths of the sections

SECTION = b"SECT"  # one rank's part of one shard, inside its upload; a table of cells, then they
FOOTER = b"FOOT"  # at the end of an upload: the layout, and how long each section is
MANIFEST = b"ROST"
PAST = b"PAST"  # the manifests of many rounds
SHARD = b"DATA"  # the mean of one shard
ABANDONED = b"DROP"  # in a shard's place: this attempt can never be completed
CHECKPOINT = b"CKPT"


class Corrupt(ValueError):
    """These bytes are not what should be here."""


def fence(*where: str) -> bytes:
    """A digest of where an envelope belongs, such as the key of its object."""
    return hashlib.blake2b("\0".join(where).encode(), digest_size=16).digest()


def seal(kind: bytes, location: bytes, payload: Buffer) -> bytes:
    return b"".join([frame_header(kind, location, payload), payload])


def frame_header(kind: bytes, location: bytes, payload: Buffer) -> bytes:
    """The bytes that, put before the payload, make an envelope of it."""
    body = memoryview(payload).cast("B")
    return SEAL.pack(MAGIC, kind, location, body.nbytes, _checksum(kind, location, body))


def unseal(kind: bytes, location: bytes, data: Buffer) -> memoryview:
    """The payload. Raises Corrupt unless the envelope is whole, of this kind and for this place."""
    view = memoryview(data).cast("B")
    if view.nbytes < SEAL.size:
        raise Corrupt(f"{view.nbytes} bytes are too few")
    magic, found_kind, found_place, length, checksum = SEAL.unpack_from(view)
    if magic != MAGIC or found_kind != kind:
        raise Corrupt(f"not a {kind.decode()} object")
    if found_place != location:
        raise Corrupt("made for another place, round or run")
    body = view[SEAL.size :]
    if body.nbytes != length:
        raise Corrupt(f"{body.nbytes} bytes instead of {length}")
    if _checksum(kind, location, body) != checksum:
        raise Corrupt("checksum does not match")
    return body


def kind_of(data: Buffer) -> bytes:
    """The kind of the envelope, unchecked; empty if `data` is no envelope."""
    view = memoryview(data).cast("B")
    return bytes(view[4:8]) if bytes(view[:4]) == MAGIC else b""


def _checksum(kind: bytes, location: bytes, body: memoryview) -> int:
    """The CRC-32; for large bodies that of the sums of their columns, which is five times as fast.

    Every 64 rows of 1,024 words are summed, so any change within them shows unless it cancels
    out in the very same columns, and parts that moved show by the order of the sums.
    """
    first = zlib.crc32(location, zlib.crc32(kind))
    complete = body.nbytes - body.nbytes % FOLD_BYTES
    if complete:
        messages = np.frombuffer(body[:complete], "<u8").reshape(-1, 64, 1024)
        first = zlib.crc32(memoryview(np.add.reduce(messages, axis=1)).cast("B"), first)
    return zlib.crc32(body[complete:], first)


class CellTable(NamedTuple):
    """The cells of an object, as the table before them tells of them."""

    lengths: tuple[int, ...]
    checksums: tuple[int, ...]

    def cut(self, start: int, stop: int) -> CellTable:
        """Of some of the cells."""
        return CellTable(self.lengths[start:stop], self.checksums[start:stop])


@lru_cache(maxsize=256)
def _rows(count: int) -> struct.Struct:
    """So many cells: how many bytes each has, and their checksum."""
    return struct.Struct("<" + "QI" * count)


def table_size(count: int) -> int:
    return SEAL.size + _rows(count).size


def cell_sums(kind: bytes, location: bytes, data: Buffer, lengths: Sequence[int]) -> list[int]:
    """The checksums of cells of these lengths, which follow each other in `data`."""
    view, first = memoryview(data).cast("B"), zlib.crc32(location, zlib.crc32(kind))
    sums = []
    for start, stop, cells in _groups(tuple(lengths)):
        if len(cells) == 1:
            sums.append(_cell_sum(first, view[start:stop]))
            continue
        folded = memoryview(_folded(view[start:stop]).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        for begin, end, tail, tail_end in cells:
            total = zlib.crc32(folded[begin:end], first)
            sums.append(zlib.crc32(view[tail:tail_end], total) if tail < tail_end else total)
    return sums


@lru_cache(maxsize=256)
def _groups(lengths: tuple[int, ...]) -> list[tuple[int, int, list[tuple[int, int, int, int]]]]:
    """The cells in runs that are summed at once: many calls cost time, long sums memory.

    All cells of a run but its last are whole units. Of each run: where it starts and ends, and of
    each cell where its sums lie in those of the run, and the bytes that are no whole unit.
    """
    groups: list[tuple[int, int, list[tuple[int, int, int, int]]]] = []
    for start, stop in pairwise(section_offsets(lengths)):
        first, last, cells = groups[-1] if groups else (0, 0, [])
        if not groups or (last - first) % UNIT_BYTES or stop - first > SUMMED_BYTES:
            first, cells = start, []
            groups.append((first, stop, cells))
        groups[-1] = (first, stop, cells)
        begin = (start - first) // FOLDED
        end = (stop - first) // UNIT_BYTES * UNIT_BYTES // FOLDED
        cells.append((begin, end, first + end * FOLDED, stop))
    return groups


def _folded(data: memoryview) -> NDArray[np.uint64]:
    """The sums of the columns of each whole unit, seen as 16 rows of 128 words."""
    messages = np.frombuffer(data[: data.nbytes - data.nbytes % UNIT_BYTES], "<u8")
    folded: NDArray[np.uint64] = np.add.reduce(messages.reshape(-1, 16, 128), axis=1)
    return folded


def _cell_sum(first: int, cell: memoryview) -> int:
    """The CRC-32 of the sums and of what is no whole unit: fifteen times as fast as that of all.

    Any change within a unit shows unless it cancels out in the very same columns, and units that
    moved show by the order of the sums.
    """
    complete = cell.nbytes - cell.nbytes % UNIT_BYTES
    for start in range(0, complete, SUMMED_BYTES):
        folded = _folded(cell[start : min(start + SUMMED_BYTES, complete)])
        first = zlib.crc32(memoryview(folded), first)  # type: ignore[arg-type]
    return zlib.crc32(cell[complete:], first)


def seal_cells(kind: bytes, location: bytes, lengths: Sequence[int], sums: Sequence[int]) -> bytes:
    """A sealed table of cells, which follow it as they are: any run of them is one range."""
    pairs = chain.from_iterable(zip(lengths, sums, strict=True))
    return seal(kind, location, _rows(len(lengths)).pack(*pairs))


def seal_table(kind: bytes, location: bytes, cells: Sequence[Buffer]) -> bytes:
    """As `seal_cells`, of cells that do not lie in one piece of memory."""
    lengths = [memoryview(cell).nbytes for cell in cells]
    sums = [cell_sums(kind, location, cell, [n])[0] for cell, n in zip(cells, lengths, strict=True)]
    return seal_cells(kind, location, lengths, sums)


def unseal_table(kind: bytes, location: bytes, head: Buffer, count: int) -> CellTable:
    """The table that `head` begins with. Raises Corrupt unless it is whole and for this place."""
    view = memoryview(head).cast("B")
    body = unseal(kind, location, view[: table_size(count)])
    rows = _rows(count)
    if body.nbytes != rows.size:
        raise Corrupt(f"a table of {body.nbytes} bytes instead of {count} cells")
    messages = rows.unpack(body)
    return CellTable(messages[0::2], messages[1::2])


def check_cells(kind: bytes, location: bytes, table: CellTable, data: memoryview) -> None:
    """Raises Corrupt unless `data` is these cells."""
    if data.nbytes != sum(table.lengths):
        raise Corrupt(f"{data.nbytes} bytes instead of {sum(table.lengths)}")
    if cell_sums(kind, location, data, table.lengths) != list(table.checksums):
        raise Corrupt("checksum does not match")


class Footer(msgspec.Struct, frozen=True):
    layout: bytes
    sections: list[int]
    header: bytes = b""


class Damage(msgspec.Struct, frozen=True):
    """Why an attempt was given up: the uploads that must not be in the next manifest."""

    uploads: list[str]
    by: int
    reason: str


_FOOTER = msgpack_decoder(Footer)
BLAME = json_decoder(Damage)


def section_offsets(sections: Sequence[int]) -> list[int]:
    """Where each section of these lengths starts, and at last where the footer does."""
    starts = [0]
    for length in sections:
        starts.append(starts[-1] + length)
    return starts


def footer_guess(shards: int, tensors: int) -> int:
    """How many bytes to read from the end of an upload so as to get, mostly, the whole footer."""
    return SEAL.size + 4 + 512 + 16 * shards + 8 * tensors


def seal_footer(location: bytes, footer: Footer) -> bytes:
    """The footer with its length behind it, so that a reader can find it from the end."""
    sealed = seal(FOOTER, location, msgspec.msgpack.encode(footer))
    return sealed + struct.pack("<I", len(sealed))


def footer_length(tail: memoryview) -> int:
    """Bytes of the footer and its length field together; `tail` is the end of an upload."""
    if tail.nbytes < 4:
        raise Corrupt("too short for a footer")
    length = int(struct.unpack("<I", tail[-4:])[0]) + 4
    if length > MAX_FOOTER:
        raise Corrupt(f"a footer of {length} bytes, more than the {MAX_FOOTER} there can be")
    return length


def unseal_footer(location: bytes, tail: memoryview) -> Footer:
    length = footer_length(tail)
    if tail.nbytes < length:
        raise Corrupt("the footer is cut")
    try:
        body = unseal(FOOTER, location, tail[tail.nbytes - length : -4])
        return _FOOTER.decode(body)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"not a footer: {error}") from error
