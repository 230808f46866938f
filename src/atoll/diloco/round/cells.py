"""Cells as bytes: a table with the length and checksum of each, and then the cells themselves.

A table belongs to its place (a digest of the object's key and more), so bytes that were cut,
changed, or made for another run, round, rank or place are refused. Any run of cells is one range.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np

from atoll.diloco.codecs import Codec
from atoll.diloco.packing import Vector
from atoll.diloco.round.layout import offsets
from atoll.objectstore import ObjectStore, RangeReader

Buffer = bytes | bytearray | memoryview

_HEAD = struct.Struct("<4s16s")
_CHECK = struct.Struct("<I")
_MAGIC = b"CEL2"
# No codec makes more; what a table says beyond it is damage, found before memory is taken.
MAX_BYTES_PER_VALUE, MAX_EXTRA_BYTES = 8, 4096
# The sums of the 16 rows of such a block go into the checksum, a sixteenth of its bytes: 15 times
# as fast as a CRC of all. A change shows unless it cancels out in the very same columns.
_BLOCK_BYTES = 16 * 128 * 8
_SUM_BYTES = 1 << 20  # at a time: the sums stay in the cache; a multiple of the block


class Damaged(ValueError):
    """These bytes are not what should be here."""


def place_of(*words: str) -> bytes:
    """A digest of where a table belongs."""
    return hashlib.blake2b("\0".join(words).encode(), digest_size=16).digest()


def checksum(cell: Buffer) -> int:
    view, total = memoryview(cell).cast("B"), 0
    whole = view.nbytes - view.nbytes % _BLOCK_BYTES
    for start in range(0, whole, _SUM_BYTES):
        words = np.frombuffer(view[start : min(start + _SUM_BYTES, whole)], "<u8")
        sums = np.add.reduce(words.reshape(-1, 16, 128), axis=1)
        total = zlib.crc32(memoryview(sums), total)
    return zlib.crc32(view[whole:], total)


class CellTable(NamedTuple):
    lengths: Sequence[int]
    checksums: Sequence[int]

    def cut(self, start: int, stop: int) -> CellTable:
        return CellTable(self.lengths[start:stop], self.checksums[start:stop])


@lru_cache(maxsize=256)
def _rows(count: int) -> struct.Struct:
    return struct.Struct("<" + "QI" * count)


def table_size(count: int) -> int:
    return _HEAD.size + _rows(count).size + _CHECK.size


def pack_table(place: bytes, cells: Sequence[Buffer]) -> bytes:
    """The table of these cells."""
    pairs = ((memoryview(cell).nbytes, checksum(cell)) for cell in cells)
    body = _HEAD.pack(_MAGIC, place) + _rows(len(cells)).pack(*chain.from_iterable(pairs))
    return body + _CHECK.pack(zlib.crc32(body))


def unpack_table(place: bytes, data: Buffer, count: int) -> CellTable:
    """The table of `count` cells that `data` is. Raises Damaged."""
    view = memoryview(data)
    if view.nbytes != table_size(count):
        raise Damaged(f"{view.nbytes} bytes are too few for a table of {count} cells")
    magic, found = _HEAD.unpack_from(view)
    if magic != _MAGIC or _CHECK.unpack(view[-_CHECK.size :])[0] != zlib.crc32(
        view[: -_CHECK.size]
    ):
        raise Damaged("not a table of cells")
    if found != place:
        raise Damaged("made for another place, round or run")
    words = _rows(count).unpack(view[_HEAD.size : -_CHECK.size])
    return CellTable(words[0::2], words[1::2])


def bytes_of(values: Vector) -> memoryview:
    """The memory of the values."""
    return memoryview(values.view(np.uint8))  # type: ignore[arg-type]


def is_plain(codec: Codec) -> bool:
    """Whether the bytes of a cell are its values as they lie in memory."""
    return codec.name == "fp32"


def encode_cell(codec: Codec, values: Vector) -> Buffer:
    """The values as bytes; a view of them where they are sent as they are."""
    return bytes_of(values) if is_plain(codec) else codec.encode(values)


def max_bytes(size: int) -> int:
    """No codec makes more of so many values."""
    return MAX_BYTES_PER_VALUE * size + MAX_EXTRA_BYTES


class CellReader:
    """The `wanted` of the `count` cells behind a table, read one after the other by one thread.

    The table begins at byte `start` of the object, and its last cell ends at `end`. One request
    where all cells are wanted, else two.
    """

    def __init__(
        self,
        store: ObjectStore,
        key: str,
        place: bytes,
        count: int,
        wanted: slice,
        start: int = 0,
        end: int | None = None,
        reader: RangeReader | None = None,
    ) -> None:
        """`reader`: one that stands at `start`, and reads the table at least."""
        self._store, self._key, self._place = store, key, place
        self._count, self._wanted = count, wanted
        self._is_all = (wanted.start, wanted.stop) == (0, count)
        self._start, self._end = start, end
        self._reader = reader
        self._table: CellTable | None = None
        self._at = 0

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def open(self) -> CellTable:
        """Read the table. Raises Damaged, NotFound."""
        if self._table is not None:
            return self._table
        size, first = table_size(self._count), self._start + table_size(self._count)
        if self._reader is None:
            end = self._end if self._is_all else first
            self._reader = self._store.reader(self._key, self._start, end)
        head = memoryview(bytearray(size))
        table = unpack_table(self._place, head[: self._reader.fill(head)], self._count)
        if not self._is_all:
            ends = offsets(table.lengths)
            start, stop = first + ends[self._wanted.start], first + ends[self._wanted.stop]
            self._reader.close()
            self._reader = self._store.reader(self._key, start, stop)
        self._table = table.cut(self._wanted.start, self._wanted.stop)
        return self._table

    def take(self, size: int) -> memoryview:
        """The bytes of the next cell, which holds so many values. Raises Damaged, NotFound."""
        length = self.open().lengths[self._at]
        if length > max_bytes(size):
            raise Damaged(f"a cell of {length} bytes for {size} values")
        data = memoryview(np.empty(length, np.uint8))  # type: ignore[arg-type]
        self._fill(data)
        return data

    def read(self, codec: Codec, out: Vector) -> None:
        """Fill `out` with the values of the next cell. Raises Damaged, NotFound."""
        if is_plain(codec):
            if self.open().lengths[self._at] != out.nbytes:
                raise Damaged(f"a cell of other than {out.size} values")
            self._fill(bytes_of(out))
            return
        data = self.take(out.size)
        try:
            out[:] = codec.decode(data, out.size)
        except ValueError as error:
            raise Damaged(str(error)) from error

    def read_sparse(self, codec: Codec, out: Vector) -> None:
        """As `read`, where a cell without bytes is one of zeros."""
        if self.open().lengths[self._at]:
            self.read(codec, out)
        else:
            out.fill(0)
            self._at += 1

    def skip(self) -> None:
        """Pass the next cell."""
        left = self.open().lengths[self._at]
        self._at += 1
        assert self._reader is not None
        while left:
            data = memoryview(bytearray(min(left, 1 << 20)))
            count = self._reader.fill(data)
            if not count:
                raise Damaged("a cell is cut short")
            left -= count

    def _fill(self, data: memoryview) -> None:
        assert self._reader is not None
        count = self._reader.fill(data)
        if count != data.nbytes:
            raise Damaged(f"{count} bytes of a cell of {data.nbytes}")
        if checksum(data) != self.open().checksums[self._at]:
            raise Damaged("the checksum of a cell does not match")
        self._at += 1
