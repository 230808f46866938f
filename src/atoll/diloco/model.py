"""The model of a replica, in one process or cut over several: values out of it, and into it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.diloco.allreduce.share import Share
from atoll.diloco.allreduce.team import Solo, together
from atoll.diloco.allreduce.work import Take
from atoll.diloco.group import ProcessTeam
from atoll.diloco.moves import Moves
from atoll.diloco.outer import Floats, Fragment
from atoll.diloco.pieces import (
    check_alike,
    check_pieces,
    fingerprint,
    held_twice,
    local_tensor,
    read_parameters,
    read_piece,
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

    @property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]:
        """Those that are trained, by their plain names."""
        return self._parameters

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, piece.shape) for name, piece in self._pieces[0].items()]

    def check_alike(self) -> None:
        """Raises ValidationError if processes that hold the same piece have other values in it."""
        if self._team.processes == 1:
            return

        def read() -> dict[str, Any]:
            return {name: fingerprint(self._local(name)) for name in held_twice(self._pieces)}

        check_alike(self._pieces, together(self._team, read))

    def take(self, fragment: Fragment, row: Floats) -> None:
        """`row` holds the values of the model that this process carries."""
        for start, part in self._parts(fragment):
            row[start : start + part.size] = part

    def movement(self, fragment: Fragment, row: Floats) -> None:
        """`row` holds how far the model is from the global values."""

        def take(start: int, part: Floats) -> None:
            row[start : start + part.size] = part

        self.movement_parts(fragment, take)

    def movement_parts(self, fragment: Fragment, take: Take) -> None:
        """`take` gets how far the model is from the global values, slice by slice.

        Those are rounded as in the model: rounding must not count as movement.
        """
        import torch

        types = {self._parameters[slot.name].dtype for slot in fragment.slots}
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
            yield from moves.parts(self._local)
            return
        room, size = np.empty(0, np.float32), STAGED if self._staging.is_needed else PART
        for slots in _batches(fragment, size):
            tensors = [self._local(slot.name).detach() for slot in slots]
            slices = [each.reshape(-1) for each in tensors]
            runs = [(slots[0].start, slices)]
            if len(slots) == 1:
                cuts = range(0, slices[0].numel(), size)
                runs = [(slots[0].start + at, [slices[0][at : at + size]]) for at in cuts]
            for start, run in runs:
                count = sum(each.numel() for each in run)
                room = room if room.size >= count else np.empty(count, np.float32)
                self._staging.fetch(run, torch.from_numpy(room[:count]))
                yield start, room[:count]

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
                moves.give(values, partial(self._write, mix))
                return
            for slot, row in zip(fragment.slots, fragment.rows(values), strict=True):
                self._write(mix, slot.name, 0, torch.from_numpy(row).reshape(-1))

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

    def _write(self, mix: float, name: str, start: int, values: torch.Tensor) -> None:
        local = self._local(name)
        if not local.is_contiguous():
            flat = local.reshape(-1)
            self._mix(flat[start : start + values.numel()], values, mix)
            local.copy_(flat.view(local.shape))
        else:
            self._mix(local.view(-1)[start : start + values.numel()], values, mix)

    def _mix(self, part: torch.Tensor, values: torch.Tensor, mix: float) -> None:
        import torch

        # A large parameter goes to a device in several copies: their buffer stays small.
        cuts = (torch.split(each, STAGED) for each in (part, values))
        for own, new in zip(*cuts, strict=True):
            moved = new if own.device.type == "cpu" else self._staging.send(new, own)
            if mix:
                own.lerp_(moved.to(own), 1 - mix)
            else:
                own.copy_(moved)

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


def _batches(fragment: Fragment, size: int) -> list[Sequence[Any]]:
    """The parameters in runs of about `size` values: one copy from the device for each."""
    batches: list[list[Any]] = [[]]
    for slot in fragment.slots:
        if batches[-1] and slot.stop - batches[-1][0].start > size:
            batches.append([])
        batches[-1].append(slot)
    return list(batches)
