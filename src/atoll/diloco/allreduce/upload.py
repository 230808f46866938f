"""The upload of one replica to one round: a section for each shard but its own, then a footer.

Each process of the replica has an object of its own with its cells. Process 0 puts the last one:
with it, and the lengths of all sections in its footer, the whole upload is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import numpy as np

from atoll.core.errors import NotFound, ValidationError
from atoll.diloco.allreduce import wire
from atoll.diloco.allreduce.feedback import add_residual, set_left_out
from atoll.diloco.allreduce.keys import part_of
from atoll.diloco.allreduce.layout import Layout, tensor_at
from atoll.diloco.allreduce.manifest import Member
from atoll.diloco.allreduce.share import Cells, Share
from atoll.diloco.codecs import Codec
from atoll.diloco.packing import Vector
from atoll.diloco.pool import CORES, each
from atoll.objectstore import ObjectStore

RUN = 1 << 17  # values of a shard that are in memory at a time
ROOM_BYTES = 8 << 20  # of all members together, or little more
MAX_BYTES_A_VALUE, MAX_EXTRA = 8, 4096  # what no codec exceeds


class DamagedUpload(Exception):
    """This upload cannot be used."""

    def __init__(self, upload: str, reason: str) -> None:
        super().__init__(f"{upload}: {reason}")
        self.upload = upload
        self.reason = reason


class Payload:
    """The values one process brings, as one row, and the object made of them.

    Nothing is copied: an exact upload is sent from where the values lie. Memory that belongs to the
    cargo is used again in every round: fresh pages cost more than the arithmetic.
    """

    def __init__(self, share: Share, rank: int, codec: Codec) -> None:
        self.share = share
        self.layout = share.layout
        self.rank = rank
        self.codec = codec
        self.parts: list[Vector] = []
        # The upload has the own shard, too: somebody else will make its mean.
        self.is_complete = False
        self._own: Vector | None = None
        self._rooms = np.empty(0, np.float32)

    def hold(self, row: Vector | None) -> None:
        """The values are those in `row`, which is the cargo's until the round is over.

        None: in memory of its own.
        """
        row = self.spare if row is None else row
        self.row = row
        self.parts = [row[slice(*self.share.bounds(s))] for s in range(self.layout.shards)]

    def release(self) -> None:
        """The round is over: memory that others have given is theirs."""
        self.row, self.parts = np.empty(0, np.float32), []

    @property
    def spare(self) -> Vector:
        """Memory of the cargo for a row, kept from round to round."""
        if self._own is None:
            self._own = np.empty(self.share.size, np.float32)
        return self._own

    def rooms(self, count: int, size: int) -> list[Vector]:
        """Rows of memory for what others bring, kept from round to round."""
        if self._rooms.size < count * size:
            self._rooms = np.empty(count * size, np.float32)
        return [self._rooms[at * size : (at + 1) * size] for at in range(count)]

    def add(self, residual: Vector | None) -> None:
        """Bring what earlier rounds left out, too."""
        if residual is not None:
            add_residual(self.row, residual)

    def replace(self, residual: Vector | None, other: Vector | None) -> None:
        """Bring `other` in place of `residual`."""
        if residual is not None:
            np.subtract(self.row, residual, out=self.row)
        self.add(other)

    def bring_only(self, residual: Vector | None) -> None:
        """Bring nothing but what earlier rounds left out."""
        self.row.fill(0)
        self.add(residual)

    def check_finite(self) -> None:
        """Raises ValidationError naming the first tensor with a NaN or an infinity."""
        row = self.row
        # NaN and infinity show in the minimum or the maximum: no mask of the whole is needed.
        if row.size and not (np.isfinite(row.min()) and np.isfinite(row.max())):
            at = int(np.flatnonzero(~np.isfinite(row))[0])
            index = tensor_at(self.layout, self.share.location(at))
            codecs = f"{self.layout.codec!r}, {self.layout.down_codec!r}"
            raise ValidationError(
                f"tensors[{index}]", float(row[at]), f"codecs {codecs} need finite numbers"
            )

    def pack(self, key: str, pool: Executor) -> Parcel:
        """The object to be put at `key`, still without its footer."""

        def pack_shard(shard: int) -> list[wire.Buffer]:
            if self._is_retained(shard) or not self.share.section_size(shard):
                return []
            location, values = wire.fence(key, str(shard)), self.parts[shard]
            if self.codec.name == "fp32":
                return seal_plain(wire.SECTION, location, values, self.share.cell_sizes(shard))
            cells = encode_cells(self.codec, self.share, shard, values)
            return [wire.seal_table(wire.SECTION, location, cells), *cells]

        # What is sent as it is only needs its checksums, which take less time than threads do.
        lanes = 1 if self.codec.name == "fp32" else CORES
        sealed = each(pool, pack_shard, range(self.layout.shards), lanes)
        sections = [sum(memoryview(piece).nbytes for piece in pieces) for pieces in sealed]
        return Parcel([piece for pieces in sealed for piece in pieces], sections)

    def _is_retained(self, shard: int) -> bool:
        """Whether the upload does without the shard."""
        return shard == self.rank and not self.is_complete

    def footer(self, key: str, sections: list[list[int]], header: bytes = b"") -> bytes:
        """The end of the object, with the sections of all processes."""
        remainder = [] if self.codec.is_exact else [n for each in sections for n in each]
        return wire.seal_footer(wire.fence(key), wire.Footer(self.layout.pack(), remainder, header))

    def as_sent(self, shard: int, cells: Cells) -> Vector:
        """The values of some cells as the upload holds them, and so as every other rank has them.

        The own shard is in no upload, so it counts as it is.
        """
        part = self.parts[shard][slice(*self.share.within(shard, cells))]
        if self.codec.is_exact or self._is_retained(shard):
            return part
        sent, at = np.empty_like(part), 0
        for size in _sizes(self.share, shard, cells):
            values = part[at : at + size]
            sent[at : at + size] = self.codec.decode(self.codec.encode(values), size)
            at += size
        return sent

    def left_out(self, pool: Executor, into: Vector | None) -> Vector:
        """What the upload lacks of the values, in `into` if it is a row of this share."""
        size = self.share.size
        row = into if into is not None and into.size == size else np.empty(size, np.float32)

        def fill(shard: int) -> None:
            out, values = row[slice(*self.share.bounds(shard))], self.parts[shard]
            if self._is_retained(shard):
                out.fill(0)
                return
            for cells in runs_of(self.share, shard, 1):
                at = slice(*self.share.within(shard, cells))
                set_left_out(out[at], values[at], self.as_sent(shard, cells))

        each(pool, fill, range(self.layout.shards), CORES)
        return row


class Parcel(NamedTuple):
    """What a process is about to put, and how long its sections are."""

    pieces: list[wire.Buffer]
    sections: list[int]


def encode_cell(codec: Codec, values: Vector) -> wire.Buffer:
    """The values as bytes; a view of them where they are sent as they are."""
    return _bytes_of(values) if codec.name == "fp32" else codec.encode(values)


def seal_plain(
    kind: bytes, location: bytes, values: Vector, sizes: Sequence[int]
) -> list[wire.Buffer]:
    """A table and the values it is of, as they lie in memory."""
    data, lengths = _bytes_of(values), [values.itemsize * size for size in sizes]
    return [
        wire.seal_cells(kind, location, lengths, wire.cell_sums(kind, location, data, lengths)),
        data,
    ]


def encode_cells(codec: Codec, share: Share, shard: int, values: Vector) -> list[wire.Buffer]:
    starts = wire.section_offsets(share.cell_sizes(shard))
    return [encode_cell(codec, values[a:b]) for a, b in zip(starts, starts[1:], strict=False)]


def run_size(members: int) -> int:
    """Values of a run that is read from so many members: they have ROOM_BYTES, twice."""
    return max(min(2 * RUN, ROOM_BYTES // 8 // max(members, 1)), RUN // 4)


def runs_of(share: Share, shard: int, most: int = RUN) -> Iterator[Cells]:
    """The carried cells of the shard in runs of about `most` values."""
    first, size = share.cells.start, 0
    for cell, more in enumerate(share.cell_sizes(shard), share.cells.start):
        if size and size + more > most:
            yield Cells(first, cell)
            first, size = cell, 0
        size += more
    yield Cells(first, share.cells.stop)


def _sizes(share: Share, shard: int, cells: Cells) -> list[int]:
    first = share.cells.start
    return share.cell_sizes(shard)[cells.start - first : cells.stop - first]


def _bytes_of(values: Vector) -> memoryview:
    return memoryview(values.view(np.uint8))  # type: ignore[arg-type]


class CellReader:
    """The cells `wanted` of a table with the cells of `theirs`, read as they come.

    The table begins at byte `start` of the object; it ends at `end`, or with the object.
    """

    def __init__(
        self,
        blobs: ObjectStore,
        key: str,
        span: tuple[int, int | None],
        kind: bytes,
        location: bytes,
        theirs: Share,
        wanted: Cells,
    ) -> None:
        self._kind, self._location = kind, location
        self._is_all = wanted == theirs.cells
        self._count = theirs.cells.length
        size = wire.table_size(self._count)
        start, end = span
        self._reader = blobs.reader(key, start, end if self._is_all else start + size)
        head = memoryview(bytearray(size))
        self.head = head[: self._reader.fill(head)]
        self._blobs, self._key, self._first = blobs, key, start + size
        self._cut = (wanted.start - theirs.cells.start, wanted.stop - theirs.cells.start)
        self._table: wire.CellTable | None = None
        self._at = 0

    def __enter__(self) -> CellReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._reader.close()

    def _open_table(self) -> wire.CellTable:
        return wire.unseal_table(self._kind, self._location, self.head, self._count)

    def _next(self, count: int) -> wire.CellTable:
        if self._table is None:
            table, (first, last) = self._open_table(), self._cut
            if not self._is_all:
                start = self._first + sum(table.lengths[:first])
                end = start + sum(table.lengths[first:last])
                self._reader.close()
                self._reader = self._blobs.reader(self._key, start, end)
            self._table = table.cut(first, last)
        self._at += count
        return self._table.cut(self._at - count, self._at)

    def take(self, size: int) -> wire.Buffer:
        """The next cell, which holds so many values, as bytes. Raises Corrupt."""
        table = self._next(1)
        (length,) = table.lengths
        if length > MAX_BYTES_A_VALUE * size + MAX_EXTRA:
            raise wire.Corrupt(f"{length} bytes for {size} values")
        data = memoryview(np.empty(length, np.uint8))  # type: ignore[arg-type]
        self._fill(table, data)
        return data

    def decode(self, codec: Codec, sizes: Sequence[int], out: Vector) -> None:
        """Fill `out` with the next cells. Raises ValueError if the bytes are not good."""
        if codec.name == "fp32":
            table = self._next(len(sizes))
            if table.lengths != tuple(out.itemsize * size for size in sizes):
                raise wire.Corrupt(f"{sum(table.lengths)} bytes for {sum(sizes)} values")
            return self._fill(table, _bytes_of(out))
        at = 0
        for size in sizes:
            out[at : at + size] = codec.decode(memoryview(self.take(size)), size)
            at += size

    def end(self) -> None:
        """Raises Corrupt unless the table is good and nothing follows the cells."""
        if self._table is None:
            self._open_table()
        if self._is_all and self._reader.fill(memoryview(bytearray(1))):
            raise wire.Corrupt("there are bytes behind the last cell")

    def _fill(self, table: wire.CellTable, data: memoryview) -> None:
        count = self._reader.fill(data)
        wire.check_cells(self._kind, self._location, table, data[:count])


def read_footer(blobs: ObjectStore, key: str, size: int, layout: Layout) -> wire.Footer:
    """The footer of an upload of `size` bytes. Raises Blamed if it is not a good upload."""
    guess = wire.footer_guess(layout.shards, len(layout.tensors))
    try:
        tail = blobs.get(key, max(0, size - guess), size)
        if tail.nbytes < wire.footer_length(tail):
            tail = blobs.get(key, max(0, size - wire.footer_length(tail)), size)
        return wire.unseal_footer(wire.fence(key), tail)
    except (NotFound, wire.Corrupt) as error:
        raise DamagedUpload(key, str(error)) from error


class Section:
    """The own cells of one shard in a member's upload, read run by run, by one thread at a time."""

    def __init__(
        self, blobs: ObjectStore, member: Member, shard: int, share: Share, codec: Codec
    ) -> None:
        self._blobs = blobs
        self._member = member
        self._shard = shard
        self._share = share
        self._codec = codec
        count, is_alike = member.processes, member.processes == 1 == share.processes
        shares = [share] if is_alike else [Share(share.layout, p, count) for p in range(count)]
        self._theirs = [each for each in shares if each.section_size(shard)]
        self._readers: dict[int, CellReader] = {}

    def read(self, cells: Cells, out: Vector) -> None:
        """Fill `out` with the values of `cells`, which follow those read before.

        Raises Blamed if the section is missing, cut, changed or foreign.
        """
        first = self._share.within(self._shard, cells)[0]
        for theirs in self._theirs:
            wanted = cells.overlap(theirs.cells)
            if wanted.length:
                start, stop = self._share.within(self._shard, wanted)
                self._read_part(theirs, wanted, out[start - first : stop - first])

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def _read_part(self, theirs: Share, wanted: Cells, out: Vector) -> None:
        process = theirs.process
        sizes = _sizes(self._share, self._shard, wanted)
        for is_last in (False, True):  # a second try: bytes can also be damaged on the way
            try:
                if process not in self._readers:
                    self._readers[process] = self._open(theirs, wanted.start)
                return self._readers[process].decode(self._codec, sizes, out)
            except (NotFound, ValueError) as error:
                if process in self._readers:
                    self._readers.pop(process).close()
                if is_last:
                    raise DamagedUpload(self._member.upload, str(error)) from error

    def _open(self, theirs: Share, first: int) -> CellReader:
        count, shard = theirs.layout.shards, self._shard
        sections = self._member.sections[theirs.process * count : (theirs.process + 1) * count]
        owner = -1 if self._member.has_left else self._member.rank
        span = exact_span(theirs, shard, owner)
        if sections:
            starts = wire.section_offsets(sections)
            span = starts[shard], starts[shard + 1]
        key = part_of(self._member.upload, theirs.process)
        remainder = Cells(first, self._share.cells.overlap(theirs.cells).stop)
        location = wire.fence(key, str(shard))
        return CellReader(self._blobs, key, span, wire.SECTION, location, theirs, remainder)


def read_section(
    blobs: ObjectStore, member: Member, shard: int, share: Share, codec: Codec
) -> Vector:
    """The values of the own cells of one shard out of a member's upload. Raises Blamed."""
    out = np.empty(share.section_size(shard), np.float32)
    section = Section(blobs, member, shard, share, codec)
    section.read(share.cells, out)
    section.close()
    return out


def exact_span(share: Share, shard: int, rank: int) -> tuple[int, int]:
    """Where a section lies in the exact upload of a rank: that follows from the layout."""
    head = wire.table_size(share.cells.length)

    def before(shard: int) -> int:
        """Bytes of the sections before that of the shard, if there were one for each."""
        return head * share.filled[shard] + 4 * share.starts[shard]

    start, stop = before(shard), before(shard + 1)
    own = before(rank + 1) - before(rank) if 0 <= rank < shard else 0
    return start - own, start - own if shard == rank else stop - own
