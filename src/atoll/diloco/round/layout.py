"""How the values of a run are cut: fragments, cells dealt to shards in turn, spans of processes.

A fragment is one float32 vector. It is cut into cells, the least that is encoded and checked by
itself; cell `t` belongs to shard `t % shards`. Process `q` of `P` carries cells `K*q//P` to
`K*(q+1)//P` of the K cells of every shard, which is one span of the vector. The cut follows from
size, world and codecs alone, so replicas of any number of processes read each other's objects.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    `outer` names the outer rule and its settings.
    """

    fragments: tuple[tuple[TensorSpec, ...], ...]
    world: int
    codec: str
    mean_codec: str
    outer: str = ""

    @cached_property
    def digest(self) -> str:
        return digest(encode(self))

    def difference(self, other: RunLayout) -> str:
        """One sentence on the first difference; tensors are compared first."""
        for number, (ours, theirs) in enumerate(zip(self.fragments, other.fragments, strict=False)):
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


class Cut:
    """The cells of one fragment of `size` values, dealt to `shards` in turn."""

    def __init__(self, size: int, world: int, codecs: Sequence[Codec]) -> None:
        self.size = size
        self.shards = world
        self.per_shard = cells_per_shard(size // self.shards, codecs)
        self.cells = self.shards * self.per_shard

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
    return max(count, min(16, shard_size // (2 * UNIT)), min(4, shard_size // 64))


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

    def cells_of(self, shard: int) -> range:
        return self.cut.span(shard, self.process, self.processes)

    def slice_of(self, cell: int) -> slice:
        """Where a carried cell lies in the row."""
        bounds = self.cut.bounds
        return slice(bounds[cell] - self.start, bounds[cell + 1] - self.start)


def overlap(ours: range, theirs: range) -> range:
    """The cells in both; each is a run of cells of the same shard."""
    start, stop = max(ours.start, theirs.start), min(ours.stop, theirs.stop)
    return range(start, max(start, stop), ours.step)


def offsets(lengths: Sequence[int]) -> list[int]:
    """Where each of some parts begins that follow each other, and at last where they end."""
    return list(accumulate(lengths, initial=0))
