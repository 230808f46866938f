"""What the members bring to one shard, and its mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future

import numpy as np
from numpy.typing import NDArray

from atoll.diloco.allreduce.manifest import Member
from atoll.diloco.allreduce.share import Cells, Share
from atoll.diloco.allreduce.upload import RUN, Section, run_size, runs_of
from atoll.diloco.codecs import Codec
from atoll.diloco.packing import Vector
from atoll.objectstore import ObjectStore

BLOCK = 1 << 16  # values; so many sums stay in the cache

Rooms = Callable[[int, int], list[Vector]]  # so many rows of memory, of so many values each


class Sections:
    """What the members bring to one shard, run by run."""

    def __init__(
        self,
        blobs: ObjectStore,
        pool: Executor,
        codec: Codec,
        share: Share,
        shard: int,
        members: Sequence[Member],
        rank: int,
        own: Callable[[Cells], Vector],
        rooms: Rooms,
    ) -> None:
        """`own`: what rank `rank` itself brings."""
        self._is_folder, self._pool = blobs.is_folder, pool
        self._share, self._shard = share, shard
        self._members, self._rank, self._own = members, rank, own
        self._rooms = rooms
        is_empty = not share.section_size(shard)
        self._sections = {
            m.rank: Section(blobs, m, shard, share, codec)
            for m in members
            if m.rank != rank and not is_empty
        }
        self._reads: list[Future[None]] = []

    def parts(self) -> Iterator[tuple[Cells, Iterable[Vector]]]:
        """The cells of a run, and the values of every member for it. Raises Blamed."""
        # One row is in memory at a time of what is in files, so a run of them can be long.
        size = RUN if self._is_folder else run_size(len(self._sections))
        runs = list(runs_of(self._share, self._shard, size))
        return self._one_by_one(runs) if self._is_folder else self._ahead(runs)

    def _one_by_one(self, runs: list[Cells]) -> Iterator[tuple[Cells, Iterable[Vector]]]:
        """What a file holds is read when it is added, so it is in the cache then, and takes one row
        of memory. A file is not waited for, so no thread need read the next one meanwhile.
        """
        (room,) = self._rooms(1, max(map(self._size, runs)))

        def read(run: Cells) -> Iterator[Vector]:
            for member in self._members:
                section = self._sections.get(member.rank)
                if section is None:
                    yield self._other(member.rank, run)
                else:
                    values = room[: self._size(run)]
                    section.read(run, values)
                    yield values

        for run in runs:
            yield run, read(run)

    def _ahead(self, runs: list[Cells]) -> Iterator[tuple[Cells, Iterable[Vector]]]:
        """All members are asked at once, and the next run is read while this one is added."""
        ranks = list(self._sections)
        count = min(2, len(runs))
        rooms = self._rooms(count * len(ranks), max(map(self._size, runs)))

        def begin(turn: int) -> dict[int, Vector]:
            size, first = self._size(runs[turn]), turn % count * len(ranks)
            values = {rank: rooms[first + i][:size] for i, rank in enumerate(ranks)}
            self._reads = [
                self._pool.submit(self._sections[rank].read, runs[turn], values[rank])
                for rank in ranks
            ]
            return values

        values = begin(0)
        for turn, run in enumerate(runs):
            for read in self._reads:
                read.result()
            ready = values
            if turn + 1 < len(runs):
                values = begin(turn + 1)
            yield (
                run,
                [
                    ready[m.rank] if m.rank in ready else self._other(m.rank, run)
                    for m in self._members
                ],
            )

    def _size(self, run: Cells) -> int:
        start, stop = self._share.within(self._shard, run)
        return stop - start

    def _other(self, rank: int, run: Cells) -> Vector:
        """What is in no section that is read."""
        return self._own(run) if rank == self._rank else np.empty(0, np.float32)

    def close(self) -> None:
        """Nobody reads any more."""
        for read in self._reads:
            read.exception()
        for section in self._sections.values():
            section.close()


class WeightedMean:
    """The weighted mean, summed in float64 in the order of the parts and rounded once.

    It is within one unit in the last place of the true mean.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        is_plain = all(weight == weights[0] for weight in weights)
        # Scaled by a power of two, which changes no bits of the mean: the sum of huge weights would
        # be infinite, that of tiny ones 0.
        _, exponent = math.frexp(max(weights))
        self._factors = [1.0 if is_plain else math.ldexp(w, -exponent) for w in weights]
        self._total = sum(self._factors)
        self._sums, self._term = (np.empty(0, np.float64) for _ in range(2))

    def write(self, parts: Iterable[Vector], out: Vector) -> None:
        """`out`, which may be one of the parts, holds their mean.

        Parts that come one by one are summed as they come. Those in a list are cut into blocks.
        """
        if not isinstance(parts, list):
            return self._write(parts, out)
        for start in range(0, out.size, BLOCK):
            at = slice(start, start + BLOCK)
            self._write((part[at] for part in parts), out[at])

    def _write(self, parts: Iterable[Vector], out: Vector) -> None:
        if self._sums.size < out.size:
            self._sums = np.empty(out.size, np.float64)
        sums = self._sums[: out.size]
        with np.errstate(invalid="ignore", over="ignore"):  # infinity and its opposite make a NaN
            for index, (part, factor) in enumerate(zip(parts, self._factors, strict=True)):
                if not index:
                    np.copyto(sums, part)
                    np.multiply(sums, factor, out=sums)
                else:
                    np.add(sums, part if factor == 1.0 else self._scaled(part, factor), out=sums)
            np.divide(sums, self._total, out=sums)
            np.copyto(out, sums, casting="same_kind")

    def _scaled(self, part: Vector, factor: float) -> NDArray[np.float64]:
        if self._term.size < part.size:
            self._term = np.empty(part.size, np.float64)
        return np.multiply(part, factor, out=self._term[: part.size], dtype=np.float64)
