"""How the values of a run are cut: fragments, cells dealt to shards in turn, spans of processes.

A fragment is one float32 vector. It is cut into cells, the least that is encoded and checked by
itself; cell `t` belongs to shard `t % shards`. Process `q` of `P` carries cells `K*q//P` to
`K*(q+1)//P` of the K cells of every shard, which is one span of the vector. The cut follows from
size, world and codecs alone, so replicas of any number of processes read each other's objects.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from itertools import accumulate

import msgspec

from atoll.diloco.codecs import Codec
from atoll.diloco.packing import TensorSpec
from atoll.diloco.round.objects import digest, encode

# Values; a multiple of every codec's blocks, so that cells do not change what a codec makes.
UNIT = 4096
# Of a shard: its table is then 48 KiB. Cells are of 512 KiB up to 2 GiB a shard, so that buffers of
# one cell a member stay small.
MAX_CELLS = 4096


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

    def size_of(self, cell: int) -> int:
        return self.bounds[cell + 1] - self.bounds[cell]

    def span(self, shard: int, process: int = 0, processes: int = 1) -> range:
        """The cells of a shard that a process carries: as `Manifest.span` has it."""
        count = self.per_shard
        first, stop = count * process // processes, count * (process + 1) // processes
        return range(shard, self.cells, self.shards)[first:stop]


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

    @property
    def size(self) -> int:
        return self.stop - self.start

    def view(self, shards: int, cells: int) -> Share:
        """The same span in another cut, of whose cells it may hold parts."""
        if (shards, cells) == (self.cut.shards, self.cut.cells):
            return self
        share = copy(self)
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

    def slice_of(self, cell: int) -> slice:
        """Where what is carried of a cell lies in the row."""
        part = self.part_of(cell)
        first = self.cut.bounds[cell] - self.start
        return slice(first + part.start, first + part.stop)

    def part_of(self, cell: int) -> slice:
        """What of a cell is carried."""
        first, stop = self.cut.bounds[cell : cell + 2]
        return slice(max(first, self.start) - first, min(stop, self.stop) - first)


def overlap(ours: range, theirs: range) -> range:
    """The cells in both; each is a run of cells of the same shard."""
    start, stop = max(ours.start, theirs.start), min(ours.stop, theirs.stop)
    return range(start, max(start, stop), ours.step)


def offsets(lengths: Sequence[int]) -> list[int]:
    """Where each of some parts begins that follow each other, and at last where they end."""
    return list(accumulate(lengths, initial=0))
