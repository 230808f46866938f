"""The upload of one replica to one round: a section for each shard but its own, then a footer.

Each process of the replica has an object of its own with its cells. Process 0 puts the last one:
with it, and the lengths of all sections in its footer, the whole upload is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import NotFound, ValidationError
from atoll.diloco.allreduce import wire
from atoll.diloco.allreduce.codecs import Codec
from atoll.diloco.allreduce.feedback import left_out
from atoll.diloco.allreduce.keys import part_of
from atoll.diloco.allreduce.layout import Layout, Vector, scatter, tensor_at
from atoll.diloco.allreduce.roster import Member
from atoll.diloco.allreduce.share import Cells, Share
from atoll.diloco.blobs import Blobs


class Blamed(Exception):
    """This upload cannot be used."""

    def __init__(self, upload: str, reason: str) -> None:
        super().__init__(f"{upload}: {reason}")
        self.upload = upload
        self.reason = reason


class Cargo:
    """The values one process brings, shard by shard, and the object made of them.

    With an exact codec the values lie where they are sent from, so nothing is copied. The memory
    is used again in every round: fresh pages cost more than the arithmetic.
    """

    def __init__(self, share: Share, rank: int, codec: Codec) -> None:
        self.share = share
        self.layout = share.layout
        self.rank = rank
        self.codec = codec
        self._buffer: NDArray[np.uint8] | None = None
        shards = range(self.layout.shards)
        if codec.is_exact:
            sections = exact_sections(share, rank)
            starts = wire.section_offsets(sections)
            head = wire.table_size(share.cells.length)
            self._buffer = np.empty(starts[-1] + self._footer_room(), np.uint8)
            self.parts = [
                self._buffer[starts[s] + head : starts[s + 1]].view("<f4")
                if sections[s]
                else np.empty(share.section_size(s), np.float32)
                for s in shards
            ]
        else:
            flat = np.empty(share.size, np.float32)
            self.parts = [flat[slice(*share.bounds(s))] for s in shards]

    def load(self, tensors: Sequence[Any], residual: Vector | None) -> None:
        """Copy the values of the tensors, plus what earlier rounds left out."""
        scatter(tensors, self.parts)
        self._add(residual)

    def load_owed(self, residual: Vector | None) -> None:
        """Bring nothing but what earlier rounds left out."""
        for part in self.parts:
            part.fill(0)
        self._add(residual)

    def _add(self, residual: Vector | None) -> None:
        if residual is not None:
            for shard, part in enumerate(self.parts):
                part += residual[slice(*self.share.bounds(shard))]

    def check_finite(self) -> None:
        """Raises ValidationError naming the first tensor with a NaN or an infinity."""
        for shard, part in enumerate(self.parts):
            # NaN and infinity show in the minimum or the maximum: no mask of the whole is needed.
            if part.size and not (np.isfinite(part.min()) and np.isfinite(part.max())):
                at = int(np.flatnonzero(~np.isfinite(part))[0])
                place = self.share.place(self.share.bounds(shard)[0] + at)
                index = tensor_at(self.layout, place)
                codecs = f"{self.layout.codec!r}, {self.layout.down_codec!r}"
                raise ValidationError(
                    f"tensors[{index}]", float(part[at]), f"codecs {codecs} need finite numbers"
                )

    def pack(self, key: str, pool: Executor) -> Parcel:
        """The object to be put at `key`, still without its footer."""
        if self._buffer is not None:
            sections = exact_sections(self.share, self.rank)
            self._write_tables(key, self._buffer, sections, pool)
            return Parcel(self._buffer, sections, None)
        shards = [
            s for s in range(self.layout.shards) if s != self.rank and self.share.section_size(s)
        ]
        encoded = list(
            pool.map(lambda s: encode_cells(self.codec, self.share, s, self.parts[s]), shards)
        )
        cells = dict(zip(shards, encoded, strict=True))
        sealed = {
            s: [wire.seal_table(wire.SECTION, wire.fence(key, str(s)), each), *each]
            for s, each in cells.items()
        }
        sections = [sum(map(len, sealed.get(s, []))) for s in range(self.layout.shards)]
        data = b"".join(piece for s in shards for piece in sealed[s])
        return Parcel(data, sections, self._left_out(cells))

    def close(self, key: str, parcel: Parcel, sections: list[list[int]]) -> bytes | memoryview:
        """The object with a footer that has the sections of all processes."""
        rest = [] if self.codec.is_exact else [n for each in sections for n in each]
        footer = wire.seal_footer(wire.fence(key), wire.Footer(self.layout.pack(), rest))
        data = parcel.data
        if isinstance(data, bytes):
            return data + footer
        data[sum(parcel.sections) :] = np.frombuffer(footer, np.uint8)
        return memoryview(data)  # type: ignore[arg-type]

    def as_sent(self, shard: int) -> Vector:
        """The values of the shard as the upload holds them, and so as every other rank has them.

        The own shard is in no upload, so it counts as it is.
        """
        part = self.parts[shard]
        if self.codec.is_exact or shard == self.rank:
            return part
        cells = encode_cells(self.codec, self.share, shard, part)
        sent = np.empty_like(part)
        decode_cells(self.codec, cells, self.share.cell_sizes(shard), sent)
        return sent

    def whole(self) -> Vector:
        """All values as one new row."""
        return np.concatenate(self.parts)

    def _footer_room(self) -> int:
        """Bytes behind the sections for the footer, which the upload of process 0 ends with."""
        if self.share.process:
            return 0
        return len(wire.seal_footer(bytes(16), wire.Footer(self.layout.pack(), [])))

    def _write_tables(
        self, key: str, out: NDArray[np.uint8], sections: list[int], pool: Executor
    ) -> None:
        starts = wire.section_offsets(sections)

        def write(shard: int) -> None:
            values = memoryview(self.parts[shard])  # type: ignore[arg-type]
            cells = cut(values, self.share.cell_sizes(shard))
            head = wire.seal_table(wire.SECTION, wire.fence(key, str(shard)), cells)
            out[starts[shard] : starts[shard] + len(head)] = np.frombuffer(head, np.uint8)

        list(pool.map(write, (s for s in range(self.layout.shards) if sections[s])))

    def _left_out(self, cells: dict[int, list[bytes]]) -> Vector:
        residual = np.zeros(self.share.size, np.float32)
        for shard, encoded in cells.items():
            part = residual[slice(*self.share.bounds(shard))]
            decode_cells(self.codec, encoded, self.share.cell_sizes(shard), part)
            part[:] = left_out(self.parts[shard], part)
        return residual


class Parcel(NamedTuple):
    """What a process is about to put, how long its sections are, and what the codec left out."""

    data: bytes | NDArray[np.uint8]
    sections: list[int]
    left_out: Vector | None

    def body(self) -> bytes | memoryview:
        """The object of a process that has no footer."""
        return self.data if isinstance(self.data, bytes) else memoryview(self.data)  # type: ignore[arg-type]


def cut(values: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    starts = wire.section_offsets(list(sizes))
    return [values[start:stop] for start, stop in zip(starts, starts[1:], strict=False)]


def encode_cells(codec: Codec, share: Share, shard: int, values: Vector) -> list[bytes]:
    starts = wire.section_offsets(share.cell_sizes(shard))
    return [codec.encode(values[a:b]) for a, b in zip(starts, starts[1:], strict=False)]


def decode_cells(
    codec: Codec, cells: Sequence[wire.Buffer], sizes: Sequence[int], out: Vector
) -> None:
    """Fill `out` with the values of the cells. Raises ValueError if one does not hold its size."""
    start = 0
    for cell, size in zip(cells, sizes, strict=True):
        out[start : start + size] = codec.decode(memoryview(cell), size)
        start += size


def read_cells(
    get: Callable[[int, int | None], memoryview],
    kind: bytes,
    place: bytes,
    theirs: Share,
    shard: int,
    wanted: Cells,
    codec: Codec,
    out: Vector,
) -> None:
    """Fill `out` with the cells `wanted` of a table with the cells of `theirs`.

    `get` reads a range of it. Raises ValueError if the bytes are not good.
    """
    count = theirs.cells.length
    head = wire.table_size(count)
    first, last = wanted.start - theirs.cells.start, wanted.stop - theirs.cells.start
    if wanted == theirs.cells:
        data = get(0, None)
        table = wire.unseal_table(kind, place, data, count)
        data = data[head:]
    else:
        table = wire.unseal_table(kind, place, get(0, head), count)
        start = head + sum(cell.length for cell in table[:first])
        data = get(start, start + sum(cell.length for cell in table[first:last]))
    cells = wire.open_cells(kind, place, table[first:last], data)
    decode_cells(codec, cells, theirs.cell_sizes(shard)[first:last], out)


def read_footer(blobs: Blobs, key: str, size: int, layout: Layout) -> wire.Footer:
    """The footer of an upload of `size` bytes. Raises Blamed if it is not a good upload."""
    guess = wire.footer_guess(layout.shards, len(layout.tensors))
    try:
        tail = blobs.get(key, max(0, size - guess), size)
        if tail.nbytes < wire.footer_length(tail):
            tail = blobs.get(key, max(0, size - wire.footer_length(tail)), size)
        return wire.unseal_footer(wire.fence(key), tail)
    except (NotFound, wire.Corrupt) as error:
        raise Blamed(key, str(error)) from error


def read_section(blobs: Blobs, member: Member, shard: int, share: Share, codec: Codec) -> Vector:
    """The values of the own cells of one shard out of a member's upload.

    Raises Blamed if a section is missing, cut, changed or foreign.
    """
    out = np.empty(share.section_size(shard), np.float32)
    for process in range(member.processes):
        theirs = Share(share.layout, process, member.processes)
        wanted = share.cells.overlap(theirs.cells)
        if wanted.length and theirs.section_size(shard):
            part = out[slice(*share.within(shard, wanted))]
            _read_part(blobs, member, shard, theirs, wanted, codec, part)
    return out


def _read_part(
    blobs: Blobs,
    member: Member,
    shard: int,
    theirs: Share,
    wanted: Cells,
    codec: Codec,
    out: Vector,
) -> None:
    count = theirs.layout.shards
    sections = member.sections[theirs.process * count : (theirs.process + 1) * count]
    starts = wire.section_offsets(sections or exact_sections(theirs, member.rank))
    first, last = starts[shard], starts[shard + 1]
    key = part_of(member.upload, theirs.process)
    place = wire.fence(key, str(shard))

    def get(start: int, end: int | None) -> memoryview:
        return blobs.get(key, first + start, last if end is None else min(first + end, last))

    for is_last in (False, True):  # a second try: bytes can also be damaged on the way
        try:
            return read_cells(get, wire.SECTION, place, theirs, shard, wanted, codec, out)
        except (NotFound, ValueError) as error:
            if is_last:
                raise Blamed(member.upload, str(error)) from error


def exact_sections(share: Share, rank: int) -> list[int]:
    """The section lengths of an exact upload follow from the layout."""
    head = wire.table_size(share.cells.length)
    return [
        0
        if shard == rank or not share.section_size(shard)
        else head + 4 * share.section_size(shard)
        for shard in range(share.layout.shards)
    ]
