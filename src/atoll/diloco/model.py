"""The model of a replica, in one process or cut over several: values out of it, and into it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from atoll.diloco.allreduce.share import Share
from atoll.diloco.allreduce.team import Solo, together
from atoll.diloco.allreduce.work import Take
from atoll.diloco.group import ProcessTeam
from atoll.diloco.moves import Moves
from atoll.diloco.outer import Floats, Fragment, Slot
from atoll.diloco.pieces import (
    check_equal,
    check_pieces,
    fingerprint,
    local_tensor,
    read_parameters,
    read_piece,
    shared_twice,
)
from atoll.diloco.staging import Staging

if TYPE_CHECKING:
    import torch

PART = 1 << 18  # values in host memory that are worked on at a time: they stay in the cache
STAGED = 1 << 20  # values of one copy from a device


class ReplicaModel:
    """The trained parameters of a model. All processes of the replica call the same methods."""

    def __init__(self, model: torch.nn.Module, team: Solo | ProcessTeam) -> None:
        """Raises ValidationError naming the parameter that cannot be synchronised, and why."""
        self._team = team
        self.module = model
        self._modules = [each for each in model.modules() if _is_sharded(each)]
        ranks = team.ranks if isinstance(team, ProcessTeam) else _own_rank()

        def read() -> dict[str, Any]:
            self._parameters = read_parameters(model)
            items = self._parameters.items()
            return {name: read_piece(name, value, ranks) for name, value in items}

        self._pieces = together(team, read)
        check_pieces(self._pieces)
        self._staging = Staging.of([self._local(name) for name in self._parameters])
        self._moves: dict[int, Moves] = {}
        self._batches: dict[int, list[_Batch]] = {}
        self._wholes: dict[int, _Batch] = {}

    @property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """Those that are trained, by their plain names."""
        return self._parameters

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, piece.shape) for name, piece in self._pieces[0].items()]

    def check_equal(self) -> None:
        """Raises ValidationError if processes that hold the same piece have other values in it."""
        if self._team.processes == 1:
            return

        def read() -> dict[str, Any]:
            return {name: fingerprint(self._local(name)) for name in shared_twice(self._pieces)}

        check_equal(self._pieces, together(self._team, read))

    def take(self, fragment: Fragment, row: Floats) -> None:
        """`row` holds the values of the model that this process carries."""
        for start, part in self._parts(fragment):
            row[start : start + part.size] = part

    def pseudo_gradient(self, fragment: Fragment, row: Floats) -> None:
        """`row` holds how far the model is from the global values."""

        def take(start: int, part: Floats) -> None:
            row[start : start + part.size] = part

        self.pseudo_gradient_parts(fragment, take)

    def pseudo_gradient_parts(self, fragment: Fragment, take: Take) -> None:
        """`take` gets how far the model is from the global values, slice by slice.

        Those are rounded as in the model: rounding must not count as movement.
        """
        import torch

        types = {parameter.dtype for parameter in self._parameters.values()}
        spans = [] if types == {torch.float32} else list(fragment.spans())
        firsts = [first for _, first, _ in spans]
        for start, part in self._parts(fragment):
            values = fragment.values[start : start + part.size]
            if spans:
                values = values.copy()
                at = bisect_right(firsts, start) - 1
                for slot, first, last in spans[at:]:
                    if first >= start + part.size:
                        break
                    cut = values[max(first - start, 0) : last - start]
                    dtype = self._parameters[slot.name].dtype
                    cut[:] = torch.from_numpy(cut).to(dtype).float().numpy()
            np.subtract(values, part, out=part)
            take(start, part)

    def _parts(self, fragment: Fragment) -> Iterator[tuple[int, Floats]]:
        """The values of the model that this process carries, slice by slice; copies."""
        import torch

        moves = self._moves_of(fragment)
        if moves is not None:
            yield from moves.parts(self._known(fragment).flats()[0])
            return
        room = np.empty(0, np.float32)
        for start, stop, flats, _ in self._runs(fragment):
            room = room if room.size >= stop - start else np.empty(stop - start, np.float32)
            part = room[: stop - start]
            self._staging.fetch(flats, torch.from_numpy(part))
            yield start, part

    def apply(self, fragment: Fragment, mix: float, values: Floats | None = None) -> None:
        """The model holds the global values, or `values`, and `mix` of its own."""
        import torch

        values = fragment.values if values is None else values

        # What fully_shard has gathered for a forward pass would hide the new values.
        for module in self._modules:
            module.reshard()  # type: ignore[operator]
        with torch.no_grad():
            moves = self._moves_of(fragment)
            if moves is not None:
                flats, copies = self._known(fragment).flats()
                moves.give(values, flats, partial(self._mix, mix))
                _write_back(copies)
                return
            row = torch.from_numpy(values)
            for start, stop, flats, copies in self._runs(fragment):
                self._mix(mix, flats, row[start:stop])
                _write_back(copies)

    def take_copy(self, fragment: Fragment, room: Floats | None) -> Floats:
        """The values of the model that this process carries, in `room` if they fit there."""
        size = fragment.share.size
        row = room if room is not None and room.size == size else np.empty(size, np.float32)
        self.take(fragment, row)
        return row

    def move_on(self, fragment: Fragment, sent: Floats) -> None:
        """The model holds the global values and what it has moved since it held `sent`.

        The memory of `sent` is used.
        """
        for start, part in self._parts(fragment):
            at = slice(start, start + part.size)
            np.subtract(part, sent[at], out=sent[at])
            sent[at] += fragment.values[at]
        self.apply(fragment, 0.0, sent)

    def gather(self, fragment: Fragment) -> Floats:
        """All values of the fragment, on every process."""
        moves = self._moves_of(fragment)
        if moves is None:
            return fragment.values
        vector = np.empty(fragment.share.layout.size, np.float32)
        moves.gather(fragment.values, vector)
        return vector

    def _local(self, name: str) -> torch.Tensor:
        return local_tensor(self._parameters[name])

    def _runs(self, fragment: Fragment) -> Iterator[_Run]:
        """All parameters, of which this process has the whole: many small ones are one run."""
        most = STAGED if self._staging.is_needed else PART
        if id(fragment) not in self._batches:
            self._batches[id(fragment)] = [
                _Batch(slots, [self._parameters[slot.name] for slot in slots])
                for slots in _cut(fragment, most)
            ]
        for batch in self._batches[id(fragment)]:
            start, stop = batch.start, batch.stop
            flats, copies = batch.flats()
            if len(flats) > 1:
                yield _Run(start, stop, flats, copies)
                continue
            for first in range(start, stop, most):
                last = min(first + most, stop)
                part = flats[0][first - start : last - start]
                yield _Run(first, last, [part], copies if last == stop else [])

    def _known(self, fragment: Fragment) -> _Batch:
        """All parameters of the fragment."""
        known = self._wholes.get(id(fragment))
        if known is None:
            ours = [self._parameters[slot.name] for slot in fragment.slots]
            known = self._wholes[id(fragment)] = _Batch(fragment.slots, ours)
        return known

    def _mix(self, mix: float, parts: list[torch.Tensor], values: torch.Tensor) -> None:
        """The parts hold the values, one after the other, and `mix` of their own."""
        import torch

        if self._staging.is_needed:
            values = self._staging.send(values, parts[0].device)
        rows = torch.split(values, [part.numel() for part in parts])
        if mix:
            rows = tuple(row.to(part) for row, part in zip(rows, parts, strict=True))
            torch._foreach_lerp_(parts, rows, 1 - mix)
        else:
            torch._foreach_copy_(parts, rows)

    def _moves_of(self, fragment: Fragment) -> Moves | None:
        if not isinstance(self._team, ProcessTeam):
            return None
        known = self._moves.get(id(fragment))
        if known is None:
            share, count = fragment.share, self._team.processes
            shares = [Share(share.layout, process, count) for process in range(count)]
            known = Moves(self._team, fragment.slots, shares, self._pieces, self._staging)
            self._moves[id(fragment)] = known
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

    def __init__(self, slots: Sequence[Slot], parameters: list[torch.nn.Parameter]) -> None:
        self.start, self.stop = slots[0].start, slots[-1].stop
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


def _cut(fragment: Fragment, size: int) -> list[list[Slot]]:
    """The parameters in runs of about `size` values."""
    batches: list[list[Slot]] = [[]]
    for slot in fragment.slots:
        if batches[-1] and slot.stop - batches[-1][0].start > size:
            batches.append([])
        batches[-1].append(slot)
    return batches
