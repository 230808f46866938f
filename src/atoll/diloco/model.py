"""The model of a replica, in one process or cut over several: values out of it, and into it.

A fragment is some of its parameters that sync together, as one float32 vector. This process carries
one span of each: a row.
"""

from __future__ import annotations

import math
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from atoll.core.errors import ValidationError
from atoll.diloco.group import Processes, ReplicaGroup, gather
from atoll.diloco.outer import Floats, OuterRows
from atoll.diloco.packing import TensorSpec
from atoll.diloco.parameters import local_tensor, plain_parameters, read_parameters
from atoll.diloco.pinned import PinnedBuffer
from atoll.diloco.round.cells import RunLayout, Share
from atoll.diloco.round.reduce import Fragment
from atoll.diloco.sharding import (
    ParameterSpan,
    ValueExchange,
    check_blocks,
    check_equal,
    fingerprint,
    read_block,
    shared_twice,
)

if TYPE_CHECKING:
    import torch

PART = 1 << 18  # values in host memory that are worked on at a time: they stay in the cache
STAGED = 1 << 20  # values of one copy from a device

Take = Callable[[int, Floats], None]  # gets the place in the row, and the values from there on


class ModelFragment:
    """Some parameters that sync together, and what this process carries of them."""

    def __init__(self, spans: Sequence[ParameterSpan]) -> None:
        self.spans = tuple(spans)
        self.size = self.spans[-1].stop
        self._starts = [span.start for span in self.spans]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(span.name for span in self.spans)

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Of the vector: replicas may train in other types, values travel and are kept in fp32."""
        return tuple(TensorSpec("float32", span.shape) for span in self.spans)

    def carry(self, share: Share, outer: OuterRows) -> None:
        """From here on the rows hold `share` of the values."""
        self.share, self.outer = share, outer
        self.upload = Fragment(share, outer)

    @property
    def values(self) -> Floats:
        """The global values that this process carries."""
        return self.outer.values

    def carried(self) -> Iterator[tuple[ParameterSpan, int, int]]:
        """Each parameter of which the row holds something, and where."""
        for span in self.spans[self.index_at(self.share.start) :]:
            start, stop = max(span.start, self.share.start), min(span.stop, self.share.stop)
            if span.start >= self.share.stop:
                return
            if stop > start:
                yield span, start - self.share.start, stop - self.share.start

    def index_at(self, location: int) -> int:
        """Which parameter has this place of the vector."""
        return max(0, bisect_right(self._starts, location) - 1)


def split(shapes: Sequence[tuple[str, tuple[int, ...]]], parts: int) -> list[ModelFragment]:
    """Fragments of about equal size; every parameter is in exactly one of them."""
    sizes = [int(np.prod(shape)) for _, shape in shapes]
    members: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    # Largest first to the emptiest: within a few percent of even for real models.
    for at in sorted(range(len(shapes)), key=lambda at: (-sizes[at], at)):
        emptiest = loads.index(min(loads))
        members[emptiest].append(at)
        loads[emptiest] += sizes[at]
    if not all(members):
        raise ValidationError(
            "fragments", parts, f"expected at most {len(shapes)}, one for each parameter"
        )
    fragments = []
    for indexes in members:
        spans, start = [], 0
        for at in sorted(indexes):
            name, shape = shapes[at]
            spans.append(ParameterSpan(name, tuple(shape), start, start + sizes[at]))
            start += sizes[at]
        fragments.append(ModelFragment(spans))
    return fragments


def check_layout(theirs: RunLayout, fragments: Sequence[ModelFragment], run: str) -> None:
    """Raises ValidationError naming the first thing in which the model is not that of the run."""
    if not theirs.names:
        expected = "an all-reduce without a model uses this run_id: choose another one"
        raise ValidationError("run_id", run, expected)
    if len(theirs.names) != len(fragments):
        expected = f"the run {run!r} has {len(theirs.names)}"
        raise ValidationError("fragments", len(fragments), expected)
    advice = f"; run_id {run!r} is in use, another model needs another one"
    for fragment, names, specs in zip(fragments, theirs.names, theirs.fragments, strict=True):
        for span, name, spec in zip(fragment.spans, names, specs, strict=False):
            if (span.name, span.shape) != (name, spec.shape):
                ours, other = f"{span.name} {list(span.shape)}", f"{name} {list(spec.shape)}"
                raise ValidationError("model", ours, f"the run has {other} there{advice}")
        if len(fragment.spans) != len(names):
            count, total = sum(len(each.spans) for each in fragments), sum(map(len, theirs.names))
            raise ValidationError("model", count, f"the run has {total} parameters{advice}")


class ReplicaModel:
    """The trained parameters of a model. All processes of the replica call the same methods."""

    def __init__(self, model: torch.nn.Module, group: Processes) -> None:
        """Raises ValidationError naming the parameter that cannot be synchronised, and why."""
        self._group = group
        self.module = model
        self._modules = [each for each in model.modules() if _is_sharded(each)]
        ranks = group.ranks if isinstance(group, ReplicaGroup) else _own_rank()

        def read() -> dict[str, Any]:
            self._parameters = read_parameters(model)
            items = self._parameters.items()
            return {name: read_block(name, value, ranks) for name, value in items}

        self._blocks = gather(group, read)
        check_blocks(self._blocks)
        self._known = self._read_known()
        self._pinned = PinnedBuffer.of([self._local(name) for name in self._parameters])
        self._exchanges: dict[int, ValueExchange] = {}
        self._batches: dict[int, list[_Batch]] = {}

    @property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """Those that are trained, by their plain names."""
        return self._parameters

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, block.shape) for name, block in self._blocks[0].items()]

    def find_change(self) -> str:
        """What of the model is not as it was when this was made, in a sentence; empty: nothing.

        Parameters that are frozen meanwhile stay in the rounds: they do not move.
        """
        known = self._read_known()
        if known == self._known:
            return ""
        current = plain_parameters(self.module)
        for name, value in current.items():
            if value.requires_grad and name not in self._parameters:
                return f"{name} is trained, and was not when DiLoCo was made"
        for name, value in self._parameters.items():
            if name not in current:
                return f"{name} was in the model when DiLoCo was made, and is not now"
            if current[name] is not value:
                return f"{name} is another parameter than when DiLoCo was made"
            shape = self._blocks[0][name].shape
            if tuple(value.shape) != shape:
                return f"{name} is {list(value.shape)}, and was {list(shape)}"
        self._known = known
        return ""

    def _read_known(self) -> list[tuple[int, bool, Any]]:
        return [(id(each), each.requires_grad, each.shape) for each in self.module.parameters()]

    def check_equal(self) -> None:
        """Raises ValidationError if processes that hold the same block have other values in it."""
        if self._group.processes == 1:
            return

        def read() -> dict[str, Any]:
            return {name: fingerprint(self._local(name)) for name in shared_twice(self._blocks)}

        check_equal(self._blocks, gather(self._group, read))

    def take(self, fragment: ModelFragment, row: Floats) -> None:
        """Copy the values of the model that this process carries into `row`."""
        for start, part in self._parts(fragment):
            row[start : start + part.size] = part

    def pseudo_gradient(self, fragment: ModelFragment, take: Take) -> None:
        """`take` gets how far the model is from the global values, slice by slice.

        Those are rounded as in the model: rounding must not count as training.
        """
        import torch

        types = {parameter.dtype for parameter in self._parameters.values()}
        spans = [] if types == {torch.float32} else list(fragment.carried())
        firsts = [first for _, first, _ in spans]
        for start, part in self._parts(fragment):
            values = fragment.values[start : start + part.size]
            if spans:
                values = values.copy()
                at = bisect_right(firsts, start) - 1
                for span, first, last in spans[at:]:
                    if first >= start + part.size:
                        break
                    cut = values[max(first - start, 0) : last - start]
                    dtype = self._parameters[span.name].dtype
                    cut[:] = torch.from_numpy(cut).to(dtype).float().numpy()
            np.subtract(values, part, out=part)
            take(start, part)

    def add_pseudo_gradient(self, fragment: ModelFragment, check: Take) -> None:
        """Add how far the model is from the global values to the row of the fragment.

        `check` gets each slice of it, too.
        """
        upload = fragment.upload

        def write(row: Floats) -> None:
            def put(start: int, part: Floats) -> None:
                check(start, part)
                row[start : start + part.size] = part

            self.pseudo_gradient(fragment, put)

        def add(start: int, part: Floats) -> None:
            check(start, part)
            upload.add(start, part)

        if upload.is_clear:
            upload.fill(write)
        else:
            self.pseudo_gradient(fragment, add)

    def _parts(self, fragment: ModelFragment) -> Iterator[tuple[int, Floats]]:
        """The values of the model that this process carries, slice by slice; copies."""
        import torch

        exchange = self._exchange_of(fragment)
        if exchange is not None:
            yield from exchange.parts(self._batches_of(fragment)[0].flats()[0])
            return
        room = np.empty(0, np.float32)
        for start, stop, flats, _ in self._runs(fragment):
            room = room if room.size >= stop - start else np.empty(stop - start, np.float32)
            part = room[: stop - start]
            self._pinned.fetch(flats, torch.from_numpy(part))
            yield start, part

    def apply(
        self, fragment: ModelFragment, mix: float = 0.0, values: Floats | None = None
    ) -> None:
        """The model holds the global values, or `values`, and `mix` of its own."""
        import torch

        values = fragment.values if values is None else values

        # What fully_shard has gathered for a forward pass would hide the new values.
        for module in self._modules:
            module.reshard()  # type: ignore[operator]
        with torch.no_grad():
            exchange = self._exchange_of(fragment)
            if exchange is not None:
                flats, copies = self._batches_of(fragment)[0].flats()
                exchange.give(values, flats, partial(self._mix, mix))
                _write_back(copies)
                return
            row = torch.from_numpy(values)
            for start, stop, flats, copies in self._runs(fragment):
                self._mix(mix, flats, row[start:stop])
                _write_back(copies)

    def take_copy(self, fragment: ModelFragment, room: Floats | None) -> Floats:
        """The values of the model that this process carries, in `room` if they fit there."""
        size = fragment.share.size
        row = room if room is not None and room.size == size else np.empty(size, np.float32)
        self.take(fragment, row)
        return row

    def move_on(self, fragment: ModelFragment, sent: Floats) -> None:
        """The model holds the global values and what it has trained since it held `sent`.

        The memory of `sent` is used.
        """
        for start, part in self._parts(fragment):
            at = slice(start, start + part.size)
            np.subtract(part, sent[at], out=sent[at])
            sent[at] += fragment.values[at]
        self.apply(fragment, 0.0, sent)

    def keep_distance(self, fragments: Sequence[ModelFragment]) -> Callable[[], None]:
        """Remember how far the model is from the global values, which are about to change.

        The function that is returned brings the model as far from those that are there then. It is
        kept in an unnamed file that is mapped: the system can write its pages out, where another
        row in memory would break the promise about it.
        """
        rows = []
        for fragment in fragments:
            with tempfile.TemporaryFile(prefix="atoll-distance-") as file:
                size = fragment.share.size
                mapped = np.memmap(file, np.float32, "w+", shape=max(1, size))
                rows.append(np.asarray(mapped[:size]))

            def put(start: int, part: Floats, row: Floats = rows[-1]) -> None:
                row[start : start + part.size] = part

            self.pseudo_gradient(fragment, put)

        def restore() -> None:
            for fragment, row in zip(fragments, rows, strict=True):
                np.subtract(fragment.values, row, out=row)
                self.apply(fragment, 0.0, row)

        return restore

    def gather(self, fragment: ModelFragment, start: int, stop: int) -> Floats:
        """The global values from `start` to `stop` of the fragment, on every process."""
        exchange = self._exchange_of(fragment)
        if exchange is None:
            return fragment.values[start:stop].copy()
        out = np.empty(stop - start, np.float32)
        exchange.gather(fragment.values, start, stop, out)
        return out

    def gather_all(self, fragments: Sequence[ModelFragment]) -> dict[str, Floats]:
        """Copies of all global values by the names of their parameters, on every process."""
        rows: dict[str, Floats] = {}
        for fragment in fragments:
            vector = self.gather(fragment, 0, fragment.size)
            for span in fragment.spans:
                rows[span.name] = vector[span.start : span.stop].reshape(span.shape).copy()
        return rows

    def _local(self, name: str) -> torch.Tensor:
        return local_tensor(self._parameters[name])

    def _runs(self, fragment: ModelFragment) -> Iterator[_Run]:
        """All parameters, of which this process has the whole: many small ones are one run."""
        most = STAGED if self._pinned.is_needed else PART
        for batch in self._batches_of(fragment, most):
            start, stop = batch.start, batch.stop
            flats, copies = batch.flats()
            if len(flats) > 1:
                yield _Run(start, stop, flats, copies)
                continue
            for first in range(start, stop, most):
                last = min(first + most, stop)
                part = flats[0][first - start : last - start]
                yield _Run(first, last, [part], copies if last == stop else [])

    def _batches_of(self, fragment: ModelFragment, most: float = math.inf) -> list[_Batch]:
        """Its parameters in runs of about `most` values."""
        if id(fragment) not in self._batches:
            self._batches[id(fragment)] = [
                _Batch(spans, [self._parameters[span.name] for span in spans])
                for spans in _cut(fragment, most)
            ]
        return self._batches[id(fragment)]

    def _mix(self, mix: float, parts: list[torch.Tensor], values: torch.Tensor) -> None:
        """The parts hold the values, one after the other, and `mix` of their own."""
        import torch

        if self._pinned.is_needed:
            values = self._pinned.send(values, parts[0].device)
        rows = torch.split(values, [part.numel() for part in parts])
        if mix:
            rows = tuple(row.to(part) for row, part in zip(rows, parts, strict=True))
            torch._foreach_lerp_(parts, rows, 1 - mix)
        else:
            torch._foreach_copy_(parts, rows)

    def _exchange_of(self, fragment: ModelFragment) -> ValueExchange | None:
        if not isinstance(self._group, ReplicaGroup):
            return None
        known = self._exchanges.get(id(fragment))
        if known is None:
            cut, count = fragment.share.cut, self._group.processes
            shares = [Share(cut, process, count) for process in range(count)]
            known = ValueExchange(self._group, fragment.spans, shares, self._blocks, self._pinned)
            self._exchanges[id(fragment)] = known
        return known


def _is_sharded(module: torch.nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def _own_rank() -> list[int]:
    import torch.distributed as dist

    is_up = dist.is_available() and dist.is_initialized()
    return [dist.get_rank()] if is_up else [0]


class _Run(NamedTuple):
    """Values `start:stop` of a row, and the flat tensors that have them in the model.

    `copies`: tensors whose values do not lie side by side, each with its flat copy.
    """

    start: int
    stop: int
    flats: list[torch.Tensor]
    copies: list[tuple[torch.Tensor, torch.Tensor]]


class _Batch:
    """Parameters that follow each other in a row, and what is known of their memory."""

    def __init__(
        self, spans: Sequence[ParameterSpan], parameters: list[torch.nn.Parameter]
    ) -> None:
        self.start, self.stop = spans[0].start, spans[-1].stop
        self._parameters = parameters
        self._flats: list[torch.Tensor] = []
        self._addresses: list[int] = []

    def flats(self) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
        """The local tensors as one dimension; with them, those that are copies of their values."""
        import torch

        # A view keeps its memory alive, so no other tensor can have come to its address.
        ours = self._parameters
        if (
            self._addresses
            and list(map(torch.Tensor.data_ptr, ours)) == self._addresses
            and all(map(torch.Tensor.is_contiguous, ours))
            and all(a.dtype == b.dtype for a, b in zip(ours, self._flats, strict=True))
        ):
            return self._flats, []
        tensors = [local_tensor(parameter) for parameter in ours]
        flats = [each.reshape(-1) for each in tensors]
        copies = [
            (local, flat)
            for local, flat in zip(tensors, flats, strict=True)
            if not local.is_contiguous()
        ]
        self._addresses = []
        if not copies and not any(hasattr(each, "to_local") for each in ours):
            self._flats, self._addresses = flats, [each.data_ptr() for each in flats]
        return flats, copies


def _write_back(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for local, copy in copies:
        local.copy_(copy.view(local.shape))


def _cut(fragment: ModelFragment, size: float) -> list[list[ParameterSpan]]:
    """The parameters in runs of about `size` values."""
    batches: list[list[ParameterSpan]] = [[]]
    for span in fragment.spans:
        if batches[-1] and span.stop - batches[-1][0].start > size:
            batches.append([])
        batches[-1].append(span)
    return batches
