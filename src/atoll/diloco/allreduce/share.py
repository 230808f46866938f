"""What one process of a replica carries: the same cells of every shard.

A process keeps its cells as one row, shard after shard. Between the replicas nothing else is
known of it, so replicas of one process and of many read each other's objects cell by cell.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

from atoll.diloco.allreduce.layout import Layout


class Cells(NamedTuple):
    """A run of cells of a shard."""

    start: int
    stop: int

    def overlap(self, other: Cells) -> Cells:
        start = max(self.start, other.start)
        return Cells(start, max(start, min(self.stop, other.stop)))

    @property
    def length(self) -> int:
        return self.stop - self.start


def carried(layout: Layout, process: int, processes: int) -> Cells:
    """The cells of every shard that a process carries."""
    count = max(layout.cells, 1)
    return Cells(count * process // processes, count * (process + 1) // processes)


class Share:
    """The part of the vector that process `process` of `processes` carries, as one row."""

    def __init__(self, layout: Layout, process: int = 0, processes: int = 1) -> None:
        self.layout = layout
        self.process, self.processes = process, processes
        self.cells = carried(layout, process, processes)

    @cached_property
    def _cuts(self) -> list[list[int]]:
        """The bounds of the carried cells of each shard, counted from the shard's start."""
        start, stop = self.cells
        return [self.layout.cell_bounds(s)[start : stop + 1] for s in range(self.layout.shards)]

    @cached_property
    def starts(self) -> list[int]:
        """Where the cells of each shard begin in the row, and at last where it ends."""
        starts = [0]
        for cuts in self._cuts:
            starts.append(starts[-1] + cuts[-1] - cuts[0])
        return starts

    @property
    def size(self) -> int:
        return self.starts[-1]

    def bounds(self, shard: int) -> tuple[int, int]:
        """Where the cells of the shard lie in the row."""
        return self.starts[shard], self.starts[shard + 1]

    @cached_property
    def filled(self) -> list[int]:
        """How many shards before each one, and at last of all, have values here."""
        sizes = map(self.section_size, range(self.layout.shards))
        return list(accumulate((size > 0 for size in sizes), initial=0))

    def section_size(self, shard: int) -> int:
        return self.starts[shard + 1] - self.starts[shard]

    def within(self, shard: int, cells: Cells) -> tuple[int, int]:
        """Where some of the carried cells of the shard lie in its part of the row."""
        cuts, first = self._cuts[shard], self.cells.start
        return cuts[cells.start - first] - cuts[0], cuts[cells.stop - first] - cuts[0]

    def cell_in_row(self, shard: int, cell: int) -> tuple[int, int]:
        """Where one of the carried cells of the shard lies in the row."""
        cuts, at = self._cuts[shard], cell - self.cells.start
        first = self.starts[shard] - cuts[0]
        return first + cuts[at], first + cuts[at + 1]

    def cell_sizes(self, shard: int) -> list[int]:
        """How many values each carried cell of the shard has."""
        return self._sizes[shard]

    @cached_property
    def _sizes(self) -> list[list[int]]:
        return [[stop - start for start, stop in pairwise(cuts)] for cuts in self._cuts]

    @cached_property
    def intervals(self) -> list[tuple[int, int]]:
        """The places of the vector that the row holds, in its order."""
        out: list[tuple[int, int]] = []
        for shard, cuts in enumerate(self._cuts):
            first = self.layout.bounds(shard)[0]
            start, stop = first + cuts[0], first + cuts[-1]
            if out and out[-1][1] == start:
                out[-1] = out[-1][0], stop
            elif stop > start:
                out.append((start, stop))
        return out

    def locations(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The places `start:stop` of the vector that part `begin:end` of the row holds, each with
        where in the row it begins."""
        at = 0
        for start, stop in self.intervals:
            low, high = max(begin, at), min(end, at + stop - start)
            if high > low:
                yield start + low - at, start + high - at, low
            at += stop - start

    def location(self, at: int) -> int:
        """The place in the vector of the value at `at` of the row."""
        for start, stop in self.intervals:
            if at < stop - start:
                return start + at
            at -= stop - start
        raise IndexError(at)
