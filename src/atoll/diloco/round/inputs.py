"""What the members of a round bring to some cells of a shard, and the mean of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import NotFound
from atoll.diloco.codecs import Codec
from atoll.diloco.packing import Vector
from atoll.diloco.round import cells as wire
from atoll.diloco.round import objects
from atoll.diloco.round.cells import CellReader, Damaged, is_plain
from atoll.diloco.round.layout import Cut, offsets, overlap
from atoll.diloco.round.objects import Manifest, Member

if TYPE_CHECKING:
    from atoll.diloco.round.reduce import ReplicaValues

BLOCK = 1 << 16  # values; so many float64 sums stay in the cache
_LARGEST = np.finfo(np.float32).max


class BadInput(Exception):
    """The upload of this rank cannot be used."""

    def __init__(self, rank: int, reason: str, *, is_missing: bool) -> None:
        super().__init__(reason)
        self.rank, self.is_missing = rank, is_missing


class MemberInputs:
    """The values of some members for some cells of a shard, in the members' order."""

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
        self._values = values
        self._fragment = fragment = values.fragment(manifest.round)
        self._members, self._numbers = members, numbers
        self._reads: list[Future[None]] = []
        self._cut = cut = values.share(manifest).cut
        largest = max(map(cut.size_of, numbers), default=0)
        is_carried = is_memory and all(each in fragment.share.cells for each in numbers)
        is_here = is_carried and name not in fragment.overwritten
        codec, _ = values.codecs(manifest)
        self._readers = {
            member.rank: _MemberReader(values, codec, cut, member, numbers)
            for member in members
            if not (is_here and member.upload in fragment.uploads)
        }
        # Over a network all members are asked at once, and the next cell while one is added.
        self._is_ahead = bool(self._readers) and not values.store.is_folder
        rows = 2 * len(self._readers) if self._is_ahead else min(1, len(self._readers))
        self._buffers = [np.empty(largest, np.float32) for _ in range(rows)]

    def __enter__(self) -> MemberInputs:
        return self

    def __exit__(self, *_: object) -> None:
        for read in self._reads:  # one that went on would write into memory that others have
            read.cancel()
            if not read.cancelled():
                read.exception()
        for reader in self._readers.values():
            reader.close()

    def cells(self) -> Iterator[tuple[int, Iterator[Vector]]]:
        """Each cell, and the members' values of it. Raises BadInput, there or while they come."""
        return self._cells_ahead() if self._is_ahead else self._cells_in_turn()

    def _own(self, cell: int) -> Vector:
        return self._values.own_cell(self._fragment, cell)

    def _cells_in_turn(self) -> Iterator[tuple[int, Iterator[Vector]]]:
        """A file is read when it is added, so it is in the cache, and takes one row of memory."""

        def read(cell: int) -> Iterator[Vector]:
            size = self._cut.size_of(cell)
            for member in self._members:
                reader = self._readers.get(member.rank)
                if reader is None:
                    yield self._own(cell)
                else:
                    out = self._buffers[0][:size]
                    reader.read(cell, out)
                    yield out

        for cell in self._numbers:
            yield cell, read(cell)

    def _cells_ahead(self) -> Iterator[tuple[int, Iterator[Vector]]]:
        ranks, cut = list(self._readers), self._cut

        def begin(turn: int) -> dict[int, Vector]:
            cell, first = self._numbers[turn], turn % 2 * len(ranks)
            size = cut.size_of(cell)
            rows = {rank: self._buffers[first + at][:size] for at, rank in enumerate(ranks)}
            self._reads = [
                self._values.pool.submit(self._readers[rank].read, cell, rows[rank])
                for rank in ranks
            ]
            return rows

        rows = begin(0) if self._numbers else {}
        for turn, cell in enumerate(self._numbers):
            for read in self._reads:
                read.result()
            ready = rows
            if turn + 1 < len(self._numbers):
                rows = begin(turn + 1)
            yield (
                cell,
                iter(
                    ready[member.rank] if member.rank in ready else self._own(cell)
                    for member in self._members
                ),
            )


class _MemberReader:
    """The cells of one member's upload, which may lie in the parts of several processes."""

    def __init__(
        self, values: ReplicaValues, codec: Codec, cut: Cut, member: Member, numbers: range
    ) -> None:
        self._codec, self._rank = codec, member.rank
        self._parts: list[tuple[range, CellReader]] = []
        if not numbers:
            return
        shard = numbers[0] % cut.shards
        for process in range(member.processes):
            theirs = cut.span(shard, process, member.processes)
            common = overlap(numbers, theirs)
            if not common:
                continue
            key = member.upload
            if member.processes > 1:
                key = objects.part_key(key, process)
            lengths = _section_lengths(codec, cut, member, process)
            starts = offsets(lengths)
            first = theirs.index(common.start)
            self._parts.append(
                (
                    common,
                    CellReader(
                        *(values.store, values.key(key), wire.place_of(key, str(shard))),
                        *(len(theirs), slice(first, first + len(common))),
                        *(starts[shard], starts[shard + 1]),
                    ),
                )
            )

    def read(self, cell: int, out: Vector) -> None:
        try:
            for numbers, reader in self._parts:
                if cell in numbers:
                    reader.read(self._codec, out)
                    return
        except NotFound as problem:
            raise BadInput(self._rank, str(problem), is_missing=True) from None
        except Damaged as problem:
            raise BadInput(self._rank, str(problem), is_missing=False) from None
        raise BadInput(self._rank, f"no process carries cell {cell}", is_missing=False)

    def close(self) -> None:
        for _, reader in self._parts:
            reader.close()


def _section_lengths(codec: Codec, cut: Cut, member: Member, process: int) -> list[int]:
    """How long the section of each shard is in an upload, or in the part of one process."""
    if not is_plain(codec):
        sections = member.sections[process] if process < len(member.sections) else ()
        return [*sections, *[0] * (cut.shards - len(sections))][: cut.shards]
    lengths = []
    for shard in range(cut.shards):
        numbers = cut.span(shard, process, member.processes)
        size = 4 * sum(map(cut.size_of, numbers))
        lengths.append(wire.table_size(len(numbers)) + size if numbers else 0)
    return lengths


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
