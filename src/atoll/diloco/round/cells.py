"""Cells: how the values of a run are cut, how they lie in objects, and how they are read.

A fragment is one float32 vector. It is cut into cells, the least that is encoded and checked by
itself; cell `t` belongs to shard `t % shards`. Process `q` of `P` carries cells `K*q//P` to
`K*(q+1)//P` of the K cells of every shard, which is one span of the vector. The cut follows from
size, world and codecs alone, so replicas of any number of processes read each other's objects.

In an object, cells follow a table with their lengths and checksums. A table belongs to its place (a
digest of the object's key and more), so bytes that were cut, changed, or made for another run,
round, rank or place are refused. Any run of cells is one range.
"""

from __future__ import annotations

import hashlib
import math
import struct
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from copy import copy
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import NotFound
from atoll.diloco.codecs import Codec
from atoll.diloco.packing import TensorSpec, Vector
from atoll.diloco.round import objects
from atoll.diloco.round.objects import Manifest, Member, digest, encode
from atoll.objectstore import ObjectStore, RangeReader

if TYPE_CHECKING:
    from atoll.diloco.round.reduce import ReplicaValues

# Values; a multiple of every codec's blocks, so that cells do not change what a codec makes.
UNIT = 4096
# Of a shard: its table is then 48 KiB. Cells are of 512 KiB up to 2 GiB a shard, so that buffers of
# one cell a member stay small.
MAX_CELLS = 4096
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
BLOCK = 1 << 16  # values; so many float64 sums stay in the cache
_LARGEST = np.finfo(np.float32).max


# -- The cut ---------------------------------------------------------------------------------------


class RunLayout(msgspec.Struct, frozen=True, dict=True):
    """What all replicas of a run must have alike: its digest is in every header.

    `outer` names the outer rule and its settings, `names` the tensors of each fragment.
    """

    fragments: tuple[tuple[TensorSpec, ...], ...]
    world: int
    codec: str
    mean_codec: str
    outer: str = ""
    names: tuple[tuple[str, ...], ...] = ()

    @cached_property
    def digest(self) -> str:
        return digest(encode(self))

    def difference(self, other: RunLayout) -> str:
        """One sentence on the first difference; tensors are compared first."""
        for number, (ours, theirs) in enumerate(zip(self._tensors, other._tensors, strict=False)):
            where = f" of fragment {number}" if len(self.fragments) > 1 else ""
            for index, (our, their) in enumerate(zip(ours, theirs, strict=False)):
                if our != their:
                    return f"tensor {index}{where} is {their} there and {our} here"
            if len(ours) != len(theirs):
                return f"{len(theirs)} tensors{where} there and {len(ours)} here"
        if len(self.fragments) != len(other.fragments):
            return f"{len(other.fragments)} fragments there and {len(self.fragments)} here"
        for field in ("world", "codec", "mean_codec", "outer"):
            our_value, their_value = getattr(self, field), getattr(other, field)
            if our_value != their_value:
                return f"{field} is {their_value!r} there and {our_value!r} here"
        return "nothing differs"

    @property
    def _tensors(self) -> list[list[str]]:
        """Each tensor by its name, if it has one, and what it is."""
        names = self.names or [[""] * len(each) for each in self.fragments]
        return [
            [f"{name} {spec}".strip() for name, spec in zip(*each, strict=True)]
            for each in zip(names, self.fragments, strict=True)
        ]


class Cut:
    """The cells of one fragment of `size` values, dealt to `shards` in turn.

    A manifest says what its round was cut into, so that a replica of another world reads it.
    """

    def __init__(self, size: int, shards: int, cells: int) -> None:
        self.size, self.shards, self.cells = size, shards, cells
        self.per_shard = cells // shards

    @classmethod
    def of(cls, size: int, world: int, codecs: Sequence[Codec]) -> Cut:
        """That of the rounds of a run."""
        return cls(size, world, world * cells_per_shard(size // world, codecs))

    @cached_property
    def bounds(self) -> list[int]:
        """Where each cell begins in the vector, and at last where it ends."""
        unit = UNIT if self.size >= self.cells * UNIT else 1
        units = -(-self.size // unit)
        return [min(self.size, units * cell // self.cells * unit) for cell in range(self.cells + 1)]

    @cached_property
    def sizes(self) -> list[int]:
        """How many values each cell has."""
        return [stop - start for start, stop in pairwise(self.bounds)]


def cells_per_shard(shard_size: int, codecs: Sequence[Codec]) -> int:
    """Enough cells for many processes; each so large that its head and table row do not count."""
    count = max(1, min(MAX_CELLS, shard_size // (32 * UNIT)))
    if any(codec.name.startswith("sparse") for codec in codecs):  # sends a few bytes of a unit
        return max(1, min(MAX_CELLS, shard_size // (64 * UNIT)))
    if not all(codec.is_exact for codec in codecs):
        return max(count, min(16, shard_size // (4 * UNIT)))
    # One for each of eight processes: a cell takes each reader 6 µs beside its bytes.
    return max(count, min(8, shard_size // (2 * UNIT)), min(4, shard_size // 64))


class Share:
    """What process `process` of `processes` carries of a fragment: one span, kept as one row."""

    def __init__(self, cut: Cut, process: int = 0, processes: int = 1) -> None:
        self.cut = cut
        self.process, self.processes = process, processes
        first = cut.per_shard * process // processes
        stop = cut.per_shard * (process + 1) // processes
        self.cells = range(cut.shards * first, cut.shards * stop)
        self.start, self.stop = cut.bounds[self.cells.start], cut.bounds[self.cells.stop]
        self.size = self.stop - self.start

    def view(self, shards: int, cells: int) -> Share:
        """The same span in another cut, of whose cells it may hold parts."""
        if (shards, cells) == (self.cut.shards, self.cut.cells):
            return self
        share = copy(self)
        share.__dict__.pop("parts", None)
        share.__dict__.pop("slices", None)
        share.cut = cut = Cut(self.cut.size, shards, cells)
        # Cells without values at its ends are its own, too: somebody has to carry each.
        first = bisect_left(cut.bounds, self.start)
        stop = bisect_right(cut.bounds, self.stop) - 1
        first -= cut.bounds[first] > self.start
        stop += cut.bounds[stop] < self.stop
        share.cells = range(first, min(stop, cells))
        return share

    def cells_of(self, shard: int) -> range:
        """The cells of a shard in this share."""
        shards = self.cut.shards
        first = self.cells.start + (shard - self.cells.start) % shards
        return range(first, max(first, self.cells.stop), shards)

    @cached_property
    def slices(self) -> dict[int, slice]:
        """Where what is carried of each cell lies in the row."""
        places = [min(max(each, self.start), self.stop) - self.start for each in self.cut.bounds]
        return {cell: slice(places[cell], places[cell + 1]) for cell in self.cells}

    @cached_property
    def parts(self) -> dict[int, slice]:
        """What of each cell is carried."""
        firsts = {cell: self.cut.bounds[cell] - self.start for cell in self.cells}
        return {
            cell: slice(each.start - firsts[cell], each.stop - firsts[cell])
            for cell, each in self.slices.items()
        }


def overlap(ours: range, theirs: range) -> range:
    """The cells in both; each is a run of cells of the same shard."""
    start, stop = max(ours.start, theirs.start), min(ours.stop, theirs.stop)
    return range(start, max(start, stop), ours.step)


# -- Bytes ----------------------------------------------------------------------------------------


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
        raise Damaged("made for another position, round or run")
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
            start = first + sum(table.lengths[: self._wanted.start])
            self._reader.close()
            self._reader = self._store.reader(
                self._key, start, start + sum(table.lengths[self._wanted])
            )
        self._table = CellTable(table.lengths[self._wanted], table.checksums[self._wanted])
        return self._table

    def read(self, codec: Codec, out: Vector) -> None:
        """Fill `out` with the values of the next cell. Raises Damaged, NotFound."""
        length = self.open().lengths[self._at]
        if is_plain(codec):
            if length != out.nbytes:
                raise Damaged(f"a cell of other than {out.size} values")
            self._fill(bytes_of(out))
            return
        if length > MAX_BYTES_PER_VALUE * out.size + MAX_EXTRA_BYTES:
            raise Damaged(f"a cell of {length} bytes for {out.size} values")
        data = memoryview(np.empty(length, np.uint8))  # type: ignore[arg-type]
        self._fill(data)
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


# -- What members bring ---------------------------------------------------------------------------


class BadInput(Exception):
    """The upload of this rank cannot be used."""

    def __init__(self, rank: int, reason: str, *, is_missing: bool) -> None:
        super().__init__(reason)
        self.rank, self.is_missing = rank, is_missing


class MemberInputs:
    """The values of some members for some cells of a shard, in the members' order.

    An upload may lie in the parts of several processes, and what this replica has uploaded is in
    memory. A file is read when it is added, so it is in the cache, and takes one row of memory.
    Over a network all members are asked at once, and for the next cell while one is added.
    """

    def __init__(
        self,
        values: ReplicaValues,
        manifest: Manifest,
        name: str,
        members: Sequence[Member],
        numbers: range,
        *,
        is_memory: bool = True,
    ) -> None:
        self._values, self._manifest = values, manifest
        self._fragment = fragment = values.fragment(manifest.round)
        self._members, self._numbers = members, numbers
        self._cut, (self._codec, _) = values.share(manifest).cut, values.codecs(manifest)
        largest = max((self._cut.sizes[cell] for cell in numbers), default=0)
        is_carried = is_memory and all(each in fragment.share.cells for each in numbers)
        is_here = is_carried and name not in fragment.overwritten
        self._readers = {
            member.rank: self._find_parts(member)
            for member in members
            if not (is_here and member.upload in fragment.uploads)
        }
        self._is_ahead = bool(self._readers) and not values.store.is_folder
        rows = 2 * len(self._readers) if self._is_ahead else min(1, len(self._readers))
        self._buffers = [np.empty(largest, np.float32) for _ in range(rows)]
        self._asked: dict[int, tuple[Vector, Future[None]]] = {}  # of the cell that comes next

    def _find_parts(self, member: Member) -> list[tuple[range, CellReader]]:
        """Where the cells of one member are: one request for each process that carries some."""
        values, numbers, parts = self._values, self._numbers, []
        for process in range(member.processes if numbers else 0):
            shard = numbers[0] % self._cut.shards
            theirs = self._manifest.span(shard, process, member.processes)
            if not (common := overlap(numbers, theirs)):
                continue
            key = member.upload
            if member.processes > 1:
                key = objects.part_key(key, process)
            first = theirs.index(common.start)
            reader = CellReader(
                *(values.store, values.key(key), place_of(key, str(shard))),
                *(len(theirs), slice(first, first + len(common))),
                *self._find_section(member, process, shard),
            )
            parts.append((common, reader))
        return parts

    def _find_section(self, member: Member, process: int, shard: int) -> tuple[int, int]:
        """Where the section of a shard begins and ends in an upload, or in a process's part."""
        found = member.sections
        lengths: Sequence[int] = found[process] if process < len(found) else ()
        if is_plain(self._codec):
            sizes, lengths = self._cut.sizes, []
            for each in range(shard + 1):
                cells = self._manifest.span(each, process, member.processes)
                size = 4 * sum(sizes[cell] for cell in cells)
                lengths.append(table_size(len(cells)) + size if cells else 0)
        start = sum(lengths[:shard])
        return start, start + sum(lengths[shard : shard + 1])

    def read(self, cell: int) -> Iterator[Vector]:
        """The members' values of the next cell. Raises BadInput."""
        ready = self._take_asked(cell) if self._is_ahead else {}
        for member in self._members:
            if member.rank not in self._readers:
                yield self._values.own_cell(self._fragment, cell)
            elif self._is_ahead:
                yield ready[member.rank]
            else:
                out = self._buffers[0][: self._cut.sizes[cell]]
                self._read(member.rank, cell, out)
                yield out

    def _take_asked(self, cell: int) -> dict[int, Vector]:
        if not self._asked:
            self._ask(cell)
        asked = self._asked
        for _, read in asked.values():
            read.result()
        self._asked = {}
        if cell + self._numbers.step in self._numbers:
            self._ask(cell + self._numbers.step)
        return {rank: row for rank, (row, _) in asked.items()}

    def _ask(self, cell: int) -> None:
        first = self._numbers.index(cell) % 2 * len(self._readers)
        for at, rank in enumerate(self._readers, first):
            row = self._buffers[at][: self._cut.sizes[cell]]
            self._asked[rank] = row, self._values.pool.submit(self._read, rank, cell, row)

    def _read(self, rank: int, cell: int, out: Vector) -> None:
        try:
            for numbers, reader in self._readers[rank]:
                if cell in numbers:
                    reader.read(self._codec, out)
                    return
        except NotFound as problem:
            raise BadInput(rank, str(problem), is_missing=True) from None
        except Damaged as problem:
            raise BadInput(rank, str(problem), is_missing=False) from None
        raise BadInput(rank, f"no process carries cell {cell}", is_missing=False)

    def close(self) -> None:
        for _, read in self._asked.values():
            # One that went on would write into memory that others have.
            read.cancel()
            if not read.cancelled():
                read.exception()
        for parts in self._readers.values():
            for _, reader in parts:
                reader.close()


class WeightedMean:
    """The weighted mean, summed in float64 in the order of the parts and rounded once.

    It is within one unit in the last place of the true mean. That of nothing is zero.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        is_alike = all(weight == weights[0] for weight in weights)
        # Scaled by a power of two, which changes no bits of the mean: the sum of huge weights would
        # be infinite, that of tiny ones 0.
        _, exponent = math.frexp(max(weights, default=1.0))
        self._factors = [1.0 if is_alike else math.ldexp(w, -exponent) for w in weights]
        self._total = sum(self._factors)
        # That of a power of two is exact, so the product has the bits of the quotient, in a quarter
        # of its time.
        self._inverse = 1 / self._total if math.frexp(self._total)[0] == 0.5 else None
        self._sums, self._term = (np.empty(0, np.float64) for _ in range(2))

    def write(self, parts: Iterator[Vector], out: Vector) -> None:
        """`out`, which may be one of the parts, holds their mean; parts are summed as they come."""
        if not self._factors:
            out.fill(0)
            return
        if self._sums.size < out.size:
            self._sums = np.empty(out.size, np.float64)
        sums = self._sums[: out.size]
        with np.errstate(invalid="ignore", over="ignore"):  # infinity and its opposite make a NaN
            for index, (part, factor) in enumerate(zip(parts, self._factors, strict=True)):
                if not index:
                    np.copyto(sums, part)
                    if factor != 1.0:
                        np.multiply(sums, factor, out=sums)
                else:
                    np.add(sums, part if factor == 1.0 else self._scaled(part, factor), out=sums)
            if self._inverse is None:
                np.divide(sums, self._total, out=sums)
            elif self._inverse != 1.0:
                np.multiply(sums, self._inverse, out=sums)
            np.copyto(out, sums, casting="same_kind")

    def _scaled(self, part: Vector, factor: float) -> NDArray[np.float64]:
        if self._term.size < part.size:
            self._term = np.empty(part.size, np.float64)
        return np.multiply(part, factor, out=self._term[: part.size], dtype=np.float64)


def add_to_row(row: Vector, values: Vector) -> None:
    """Add in place. A sum of finite values beyond the largest float is that float."""
    for start in range(0, row.size, BLOCK):
        part = row[start : start + BLOCK]
        with np.errstate(over="ignore", invalid="ignore"):
            total = part + values[start : start + BLOCK]
        is_over = np.isinf(total)
        if is_over.any():
            is_over &= np.isfinite(part)
            total[is_over] = np.copysign(_LARGEST, total[is_over])
        part[:] = total


def add_scaled(row: Vector, rounding: Vector, factor: float) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = rounding * np.float32(factor)
    zero_infinite(scaled)
    add_to_row(row, scaled)


def zero_infinite(residual: Vector) -> None:
    """Infinity and NaN would stay in a residual for ever."""
    is_number = np.isfinite(residual)
    if not is_number.all():
        residual[~is_number] = 0
