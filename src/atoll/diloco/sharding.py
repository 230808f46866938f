"""A replica of many processes: the blocks of its parameters that each holds, and how values move.

A model is cut into blocks as its trainer likes: an interval in each dimension. To the store each
process carries one span of every fragment's vector. The values of a block, in their own order, are
in the order of the whole too, so what lies between two places of the whole is one slice of the
block. Values move in slices: one exchange between the processes for each, so no process ever needs
room for more.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import ValidationError
from atoll.diloco.group import ReplicaGroup
from atoll.diloco.outer import Floats
from atoll.diloco.parameters import local_tensor
from atoll.diloco.pinned import PinnedBuffer
from atoll.diloco.round.cells import Share

if TYPE_CHECKING:
    import torch

Write = Callable[[list["torch.Tensor"], "torch.Tensor"], None]

SLICE = 1 << 17  # values of a row that are on their way at a time: half a megabyte
_SUMMED = 1 << 16  # values at a time; even, so that the odd places stay odd


class ParameterSpan(NamedTuple):
    """Where one parameter lies in the vector of its fragment."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


# -- Blocks ---------------------------------------------------------------------------------------


class Dim(NamedTuple):
    """One dimension of the whole, and the interval of it that a block has."""

    size: int
    offset: int
    length: int


class Block(NamedTuple):
    """What one process holds of a parameter."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.lengths)

    @property
    def is_complete(self) -> bool:
        return self.lengths == self.shape

    @property
    def dims(self) -> tuple[Dim, ...]:
        return collapsed(self.shape, self.offset, self.lengths)


@lru_cache(maxsize=100_000)
def collapsed(
    shape: tuple[int, ...], offset: tuple[int, ...], lengths: tuple[int, ...]
) -> tuple[Dim, ...]:
    """The dimensions of a block, outermost first. One that is whole is part of the one outside.

    So a block of rows has one dimension, a block of columns two.
    """
    dims = [Dim(1, 0, 1)]
    for dim in map(Dim._make, zip(shape, offset, lengths, strict=True)):
        outer = dims[-1]
        if dim.length == dim.size:
            dims[-1] = Dim(outer.size * dim.size, outer.offset * dim.size, outer.length * dim.size)
        elif outer == (1, 0, 1):
            dims[-1] = dim
        else:
            dims.append(dim)
    return tuple(dims)


def before(dims: Sequence[Dim], location: int) -> int:
    """How many values of the block lie before `location` of the whole."""
    stride, inner = math.prod(d.size for d in dims), math.prod(d.length for d in dims)
    if location >= stride:
        return inner
    count = 0
    for dim in dims:
        if not inner:
            return 0
        stride, inner = stride // dim.size, inner // dim.length
        digit, location = divmod(location, stride)
        row = digit - dim.offset
        if row < 0:
            return count
        if row >= dim.length:
            return count + dim.length * inner
        count += row * inner
    return count


def locations(dims: Sequence[Dim], start: int, stop: int) -> NDArray[np.int64]:
    """The places in the whole of the values `start:stop` of the block."""
    remainder = np.arange(start, stop, dtype=np.int64)
    out = np.zeros(stop - start, np.int64)
    if stop <= start:
        return out
    stride, inner = math.prod(d.size for d in dims), math.prod(d.length for d in dims)
    for dim in dims:
        stride, inner = stride // dim.size, inner // dim.length
        digit, remainder = np.divmod(remainder, inner)
        out += (digit + dim.offset) * stride
    return out


def read_block(name: str, parameter: torch.Tensor, ranks: Sequence[int]) -> Block:
    """What this process holds of the parameter; `ranks` are the processes of the replica.

    Raises ValidationError that says what it is about the parameter that cannot be handled.
    """
    shape, dtype = tuple(parameter.shape), str(parameter.dtype).removeprefix("torch.")
    if not hasattr(parameter, "placements"):
        return Block(shape, (0,) * len(shape), shape, dtype)
    where = f"model.{name}"
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    foreign = sorted(set(mesh.mesh.flatten().tolist()) - set(ranks))
    if foreign:
        raise ValidationError(
            where, f"on ranks {foreign}", f"expected a mesh within the replica, ranks {list(ranks)}"
        )
    for placement in parameter.placements:
        if not (placement.is_replicate() or _is_shard(placement)):
            raise ValidationError(
                where, repr(placement), "expected Shard or Replicate: no process has its values"
            )
    local = tuple(local_tensor(parameter).shape)
    lengths, offset = _block(parameter)
    if lengths != local:
        raise ValidationError(
            where, str(parameter.placements), f"expected a block of {lengths}, found {local}"
        )
    return Block(shape, offset, lengths, dtype)


def _is_shard(placement: Any) -> bool:
    return bool(placement.is_shard()) or type(placement).__name__ == "_StridedShard"


def _block(parameter: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    # Not public; what it says is checked against the local tensor, and the values by tests.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    lengths, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(int(n) for n in lengths), tuple(int(n) for n in offset)


def check_blocks(blocks: Sequence[dict[str, Block]]) -> None:
    """Raises ValidationError unless the blocks of all processes make every parameter once."""
    first = blocks[0]
    for process, each in enumerate(blocks[1:], 1):
        if list(each) != list(first):
            both = zip([*each, None], [*first, None], strict=False)
            name = next(ours or theirs for ours, theirs in both if ours != theirs)
            raise ValidationError(
                f"model.{name}",
                f"process {process}",
                "expected all processes of a replica to have the same parameters, in one order "
                "(stages of a pipeline cannot be one replica)",
            )
    for name, block in first.items():
        stored = [each[name] for each in blocks]
        for process, other in enumerate(stored):
            if (other.shape, other.dtype) != (block.shape, block.dtype):
                raise ValidationError(
                    f"model.{name}",
                    f"{other.dtype}{list(other.shape)} in process {process}",
                    f"expected {block.dtype}{list(block.shape)}, as in process 0",
                )
        distinct = {(other.offset, other.lengths) for other in stored if other.size}
        size = math.prod(block.shape)
        total = sum(math.prod(lengths) for _, lengths in distinct)
        if total != size:
            raise ValidationError(
                f"model.{name}",
                f"{total} of {size} values",
                f"expected the blocks of {len(blocks)} processes to make the whole once",
            )


def fingerprint(local: torch.Tensor) -> tuple[int, int]:
    """Two sums over the bits of the values: processes that hold the same have the same."""
    import torch

    if not local.numel():
        return 0, 0
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = local.contiguous().view(-1).view(kinds[local.element_size()])
    total = odd = 0
    # In parts: a sum in another type copies what it sums.
    for part in torch.split(bits, _SUMMED if local.device.type == "cpu" else bits.numel()):
        total += int(part.sum(dtype=torch.int64))
        odd += int(part[1::2].sum(dtype=torch.int64))
    return _signed(total), _signed(odd)


def _signed(total: int) -> int:
    """As a sum in 64 bits has it."""
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def shared_twice(blocks: Sequence[dict[str, Block]]) -> list[str]:
    """The parameters of which two processes hold the same block."""
    return [
        name
        for name in blocks[0]
        if len({(each[name].offset, each[name].lengths) for each in blocks}) < len(blocks)
    ]


def check_equal(blocks: Sequence[dict[str, Block]], sums: Sequence[dict[str, Any]]) -> None:
    """Raises ValidationError for a block that two processes hold with different values."""
    for name in shared_twice(blocks):
        known: dict[Any, tuple[int, Any]] = {}
        for process, each in enumerate(blocks):
            block = each[name]
            other, value = known.setdefault(
                (block.offset, block.lengths), (process, sums[process][name])
            )
            if value != sums[process][name]:
                raise ValidationError(
                    f"model.{name}",
                    f"of process {process}",
                    f"expected the values of process {other}, as both hold the same block: wrap "
                    "the model in DistributedDataParallel or fully_shard, so that it trains as one",
                )


# -- Movement -------------------------------------------------------------------------------------


class BlockSlice(NamedTuple):
    """Values `start:stop` of a block; they belong into a row from `row` on.

    `parameter`: its number in the fragment. `dims` is None where the values lie side by side in the
    row; else `low` is the place of the parameter at `row`.
    """

    parameter: int
    start: int
    stop: int
    row: int
    low: int = 0
    dims: tuple[Dim, ...] | None = None

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def index(self) -> Any:
        """Where the values lie in the row."""
        if self.dims is None:
            return slice(self.row, self.row + self.size)
        return self.row + locations(self.dims, self.start, self.stop) - self.low


class _Plan(NamedTuple):
    """What this process sends to each process in one step, and what it receives."""

    send: list[list[BlockSlice]]
    receive: list[list[BlockSlice]]
    counts: list[int]  # values that are sent
    sizes: list[int]  # values that are received


class ValueExchange:
    """Takes the rows of one fragment out of the model and gives them back; all processes call."""

    def __init__(
        self,
        group: ReplicaGroup,
        parameters: Sequence[ParameterSpan],
        shares: Sequence[Share],
        blocks: Sequence[dict[str, Block]],
        pinned: PinnedBuffer,
    ) -> None:
        self._group, self._parameters, self._shares = group, parameters, shares
        self._starts = [each.start for each in parameters]
        self._blocks = [[each[parameter.name] for parameter in parameters] for each in blocks]
        self._pinned = pinned
        self._steps = max(-(-share.size // SLICE) for share in shares)
        # Where every process has all of the model, it has its own row too.
        self._is_complete = all(block.is_complete for each in self._blocks for block in each)
        self._plans: dict[tuple[int, bool], _Plan] = {}

    def parts(self, flats: Sequence[torch.Tensor]) -> Iterator[tuple[int, Floats]]:
        """The values of the model that this process carries, slice by slice of its row.

        `flats` are the local tensors of the parameters, as one dimension. A slice is in memory that
        the next one uses again.
        """
        import torch

        me = self._group.process
        row = np.empty(min(SLICE, self._shares[me].size), np.float32)
        for step in range(self._steps):
            begin, end = _step_of(self._shares[me], step)
            part, plan = row[: end - begin], self._plan(step, is_taken=True)
            if self._is_complete:
                self._read(flats, plan.receive[me], torch.from_numpy(part))
                yield begin, part
                continue
            arrived = self._group.all_to_all(
                plan.counts,
                lambda q, room: self._read(flats, plan.send[q], room),  # noqa: B023
                plan.sizes,
            )
            for slices, values in zip(plan.receive, arrived, strict=True):
                array, at = values.numpy(), 0
                for each in slices:
                    index = each._replace(row=each.row - begin).index
                    part[index] = array[at : at + each.size]
                    at += each.size
            yield begin, part

    def give(self, row: Floats, flats: Sequence[torch.Tensor], write: Write) -> None:
        """`write` gets parts of `flats`, all that this process holds, and their values."""
        for step in range(self._steps):
            plan = self._plan(step, is_taken=False)
            for slices, values in zip(plan.receive, self._arrivals(row, step, plan), strict=True):
                if slices:
                    write([_part_of(flats[each.parameter], each) for each in slices], values)

    def gather(self, row: Floats, start: int, stop: int, out: Floats) -> None:
        """Bring the values from `start` to `stop` of the fragment, of all processes, into `out`."""
        import torch

        for first in range(start, stop, SLICE):
            last = min(first + SLICE, stop)
            spans = [
                (max(first, share.start), max(first, share.start, min(last, share.stop)))
                for share in self._shares
            ]
            own = self._shares[self._group.process].start
            low, high = spans[self._group.process]
            part = torch.from_numpy(row[low - own : high - own] if high > low else row[:0])
            gathered = self._group.all_gather(part, [high - low for low, high in spans])
            for (low, high), values in zip(spans, gathered, strict=True):
                if high > low:
                    out[low - start : high - start] = values.numpy()

    def _arrivals(self, row: Floats, step: int, plan: _Plan) -> list[torch.Tensor]:
        """What each process has for this one."""
        import torch

        if self._is_complete:  # all need the same
            spans = [_step_of(share, step) for share in self._shares]
            part = torch.from_numpy(row[slice(*spans[self._group.process])])
            return self._group.all_gather(part, [stop - start for start, stop in spans])

        def fill(process: int, room: torch.Tensor) -> None:
            at, values = 0, room.numpy()
            for each in plan.send[process]:
                values[at : at + each.size] = row[each.index]
                at += each.size

        return self._group.all_to_all(plan.counts, fill, plan.sizes)

    def _read(
        self, flats: Sequence[torch.Tensor], slices: Sequence[BlockSlice], room: torch.Tensor
    ) -> None:
        self._pinned.fetch([_part_of(flats[each.parameter], each) for each in slices], room)

    def _plan(self, step: int, *, is_taken: bool) -> _Plan:
        """What moves in a step: out of the model into rows if `is_taken`, else back."""
        plan = self._plans.get((step, is_taken))
        if plan is None:
            me, everyone = self._group.process, range(self._group.processes)

            def find(carrier: int, holder: int) -> list[BlockSlice]:
                pairs = self._find_slices(carrier, step, holder=holder)
                return [each for each, source in pairs if not is_taken or source == holder]

            carried = [find(me, each) for each in everyone]
            stored = [find(each, me) for each in everyone]
            send, receive = (stored, carried) if is_taken else (carried, stored)
            counts, sizes = (
                [sum(part.size for part in parts) for parts in each] for each in (send, receive)
            )
            plan = self._plans[step, is_taken] = _Plan(send, receive, counts, sizes)
        return plan

    def _find_slices(
        self, carrier: int, step: int, *, holder: int
    ) -> Iterator[tuple[BlockSlice, int]]:
        """What the blocks of `holder` have of a slice of the carrier's row, and who sends it."""
        share = self._shares[carrier]
        begin, end = _step_of(share, step)
        start, stop = share.start + begin, share.start + end
        at = max(0, bisect_right(self._starts, start) - 1)
        while at < len(self._parameters) and self._parameters[at].start < stop:
            parameter = self._parameters[at]
            low = max(start, parameter.start) - parameter.start
            high = min(stop, parameter.stop) - parameter.start
            part = self._find_slice(at, holder, low, high, low + parameter.start - share.start)
            if part is not None:
                yield part, self._source(at, holder, carrier)
            at += 1

    def _find_slice(
        self, parameter: int, holder: int, low: int, high: int, row: int
    ) -> BlockSlice | None:
        dims = self._blocks[holder][parameter].dims
        first, last = before(dims, low), before(dims, high)
        if last <= first:
            return None
        if len(dims) > 1:
            return BlockSlice(parameter, first, last, row, low, dims)
        # One dimension: the values lie side by side, from where the block begins.
        return BlockSlice(parameter, first, last, row + max(0, dims[0].offset - low))

    def _source(self, parameter: int, holder: int, carrier: int) -> int:
        """Who sends a block that several hold: the carrier if it can, else they take turns."""
        block = self._blocks[holder][parameter]
        holders = [p for p, each in enumerate(self._blocks) if each[parameter] == block]
        return carrier if carrier in holders else holders[carrier % len(holders)]


def _step_of(share: Share, step: int) -> tuple[int, int]:
    """The slice of a row that moves in a step."""
    return min(step * SLICE, share.size), min((step + 1) * SLICE, share.size)


def _part_of(flat: torch.Tensor, part: BlockSlice) -> torch.Tensor:
    return flat if part.size == flat.numel() else flat[part.start : part.stop]
