"""Checkpoints of values: each process stores one piece, with the span that it carries.

A piece says of itself what it holds, and is cut into blocks that depend on nothing else, so
replicas of another world, other codecs or another number of processes load it. A block of zeros
takes no bytes: at the start of a run the state of the outer rule is all zeros.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from atoll.core.errors import NotFound, ValidationError
from atoll.core.model import json_decoder
from atoll.diloco.codecs import get_codec
from atoll.diloco.packing import Vector
from atoll.diloco.round import cells as wire
from atoll.diloco.round.cells import Buffer, CellReader, Damaged, RunLayout
from atoll.diloco.round.objects import Checkpoint, piece_key
from atoll.diloco.round.reduce import Fragment
from atoll.objectstore import ObjectStore, RangeReader

BLOCK = 1 << 17  # values: 512 KiB, so that a checksum costs no seek and a buffer little memory
MAX_HEADER_BYTES = 64 << 20  # the layout of a million tensors
_HEAD = struct.Struct("<4sII")  # magic, length and CRC of the header
_MAGIC = b"PIE2"


class PieceHeader(msgspec.Struct, frozen=True):
    """`spans`: where the piece begins and ends in each fragment. `rows`: names, by fragment."""

    layout: RunLayout
    spans: tuple[tuple[int, int], ...]
    rows: tuple[tuple[str, ...], ...]


class _Block(NamedTuple):
    fragment: int
    row: str
    start: int  # in the fragment's vector
    stop: int


_HEADER = json_decoder(PieceHeader)


def _blocks(header: PieceHeader) -> list[_Block]:
    return [
        _Block(fragment, row, at, min(at + BLOCK, stop))
        for fragment, ((start, stop), rows) in enumerate(
            zip(header.spans, header.rows, strict=True)
        )
        for row in rows
        for at in range(start, stop, BLOCK)
    ]


def save_piece(
    store: ObjectStore,
    prefix: str,
    meta: Checkpoint,
    layout: RunLayout,
    fragments: Sequence[Fragment],
) -> None:
    """Store what this process carries, durably: a checkpoint will name it."""
    process = fragments[0].share.process
    key = f"{prefix}{piece_key(meta.round, meta.nonce, process)}"
    header = PieceHeader(
        layout,
        tuple((each.share.start, each.share.stop) for each in fragments),
        tuple(tuple(each.outer.rows) for each in fragments),
    )

    def encode(block: _Block) -> Buffer:
        fragment = fragments[block.fragment]
        first = fragment.share.start
        values = fragment.outer.rows[block.row][block.start - first : block.stop - first]
        return wire.bytes_of(values) if values.any() else b""

    body = msgspec.json.encode(header)
    head = _HEAD.pack(_MAGIC, len(body), zlib.crc32(body)) + body
    encoded = [encode(block) for block in _blocks(header)]
    table = wire.pack_table(wire.place_of(key), encoded)
    store.put(key, [head, table, *encoded], is_durable=bool(encoded))


def load_pieces(
    store: ObjectStore,
    prefix: str,
    meta: Checkpoint,
    adopt: Callable[[RunLayout], object],
    fragments: Sequence[Fragment],
) -> bool:
    """Read what this process carries into the rows. False: a piece is missing or damaged.

    `adopt` is told the layout of whoever saved each piece, before it is read, and may raise.
    """
    found = [0] * len(fragments)
    try:
        for process in range(meta.processes):
            key = f"{prefix}{piece_key(meta.round, meta.nonce, process)}"
            for block, count in _load_piece(store, key, adopt, fragments):
                found[block.fragment] += count
    except (NotFound, Damaged):
        return False
    return found == [each.share.size * len(each.outer.rows) for each in fragments]


def _load_piece(
    store: ObjectStore,
    key: str,
    adopt: Callable[[RunLayout], object],
    fragments: Sequence[Fragment],
) -> Iterator[tuple[_Block, int]]:
    """Each block, and how many of its values are carried here."""
    reader = store.reader(key)
    try:
        header, first = _read_header(reader)
        adopt(header.layout)
        _check_spans(header, fragments)
        blocks = _blocks(header)
        parts = [_find_part(block, fragments) for block in blocks]
        numbers = [number for number, part in enumerate(parts) if part.stop > part.start]
        if not numbers:
            return
        wanted = slice(numbers[0], numbers[-1] + 1)
        cells = CellReader(
            *(store, key, wire.place_of(key), len(blocks), wanted), start=first, reader=reader
        )
        try:
            buffer = np.empty(BLOCK, np.float32)
            for number in range(wanted.start, wanted.stop):
                block, part = blocks[number], parts[number]
                if part.stop <= part.start:
                    cells.skip()
                    continue
                values = buffer[: block.stop - block.start]
                cells.read_sparse(get_codec("fp32"), values)
                yield block, _copy(block, part, values, fragments[block.fragment])
        finally:
            cells.close()
    finally:
        reader.close()


def _check_spans(header: PieceHeader, fragments: Sequence[Fragment]) -> None:
    """Raises Damaged, before memory is taken, for a piece of other values than there are."""
    sizes = [each.share.cut.size for each in fragments]
    if not len(header.rows) == len(header.spans) == len(sizes) or not all(
        0 <= start <= stop <= size for (start, stop), size in zip(header.spans, sizes, strict=True)
    ):
        raise Damaged("a piece has other values than the model")


def _find_part(block: _Block, fragments: Sequence[Fragment]) -> slice:
    """The places of a block that are carried here, and kept."""
    fragment = fragments[block.fragment]
    if block.row not in fragment.outer.rows:
        return slice(0, 0)
    return slice(max(block.start, fragment.share.start), min(block.stop, fragment.share.stop))


def _copy(block: _Block, part: slice, values: Vector, fragment: Fragment) -> int:
    first = fragment.share.start
    row = fragment.outer.rows[block.row]
    row[part.start - first : part.stop - first] = values[
        part.start - block.start : part.stop - block.start
    ]
    return int(part.stop - part.start)


def _read_header(reader: RangeReader) -> tuple[PieceHeader, int]:
    """The header of a piece, and where its table begins. Raises Damaged."""
    head = memoryview(bytearray(_HEAD.size))
    if reader.fill(head) != _HEAD.size:
        raise Damaged("a piece is too short")
    magic, length, check = _HEAD.unpack(head)
    if magic != _MAGIC or length > min(MAX_HEADER_BYTES, reader.remaining()):
        raise Damaged("not a piece of a checkpoint")
    body = memoryview(bytearray(length))
    if reader.fill(body) != length or zlib.crc32(body) != check:
        raise Damaged("the header of a piece is damaged")
    try:
        header = _HEADER.decode(body)
    except msgspec.MsgspecError as error:
        raise Damaged(str(error)) from error
    return header, _HEAD.size + length


def check_same(theirs: RunLayout, ours: RunLayout) -> None:
    """Another world and other codecs may go on with a run; another model may not.

    Raises ValidationError.
    """
    theirs = msgspec.structs.replace(
        theirs, world=ours.world, codec=ours.codec, mean_codec=ours.mean_codec
    )
    if theirs != ours:
        raise ValidationError(
            "tensors",
            f"{sum(map(len, ours.fragments))} tensors",
            f"{ours.difference(theirs)}; another model needs another run_id",
        )
