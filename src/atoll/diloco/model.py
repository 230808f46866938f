"""The model of a replica, in one process or cut over several: values out of it, and into it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from atoll.diloco.allreduce.share import Share
from atoll.diloco.allreduce.team import Solo, together
from atoll.diloco.group import ProcessTeam
from atoll.diloco.moves import SLICE, Moves
from atoll.diloco.outer import Floats, Fragment
from atoll.diloco.pieces import (
    check_alike,
    check_pieces,
    fingerprint,
    local_tensor,
    read_parameters,
    read_piece,
)
from atoll.diloco.staging import Staging

if TYPE_CHECKING:
    import torch


class ReplicaModel:
    """The trained parameters of a model. All processes of the replica call the same methods."""

    def __init__(self, model: torch.nn.Module, team: Solo | ProcessTeam) -> None:
        """Raises ValidationError naming the parameter that cannot be synchronised, and why."""
        self._team = team
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
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        return [(name, piece.shape) for name, piece in self._pieces[0].items()]

    def check_alike(self) -> None:
        """Raises ValidationError if processes that hold the same piece have other values in it."""
        if self._team.processes == 1:
            return

        def read() -> dict[str, Any]:
            return {name: fingerprint(self._local(name)) for name in self._parameters}

        check_alike(self._pieces, together(self._team, read))

    def take(self, fragment: Fragment, row: Floats) -> None:
        """`row` holds the values of the model that this process carries."""
        moves = self._moves_of(fragment)
        if moves is not None:
            moves.take(self._local, row)
            return
        for slots in _batches(fragment):
            flat = [self._local(slot.name).reshape(-1) for slot in slots]
            row[slots[0].start : slots[-1].stop] = self._staging.fetch(flat).numpy()

    def movement(self, fragment: Fragment) -> Floats:
        """How far the model is from the global values, rounded as in the model: rounding must not
        count as movement.
        """
        import torch

        row = np.empty(fragment.share.size, np.float32)
        self.take(fragment, row)
        for slot, first, last in fragment.spans():
            dtype = self._parameters[slot.name].dtype
            for start in range(first, last, SLICE):
                part = slice(start, min(start + SLICE, last))
                values = fragment.values[part]
                if dtype != torch.float32:
                    values = torch.from_numpy(values).to(dtype).float().numpy()
                np.subtract(values, row[part], out=row[part])
        return row

    def apply(self, fragment: Fragment, mix: float) -> None:
        """The model holds the global values, and `mix` of its own."""
        import torch

        # What fully_shard has gathered for a forward pass would hide the new values.
        for module in self._modules:
            module.reshard()  # type: ignore[operator]
        with torch.no_grad():
            moves = self._moves_of(fragment)
            if moves is not None:
                moves.give(fragment.values, partial(self._write, mix))
                return
            for slot, row in zip(fragment.slots, fragment.rows(fragment.values), strict=True):
                self._write(mix, slot.name, 0, torch.from_numpy(row).reshape(-1))

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
        if mix:
            part.lerp_(self._staging.send(values, part), 1 - mix)
        elif part.device.type == "cpu":
            part.copy_(values)
        else:
            part.copy_(self._staging.send(values, part))

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


def _batches(fragment: Fragment) -> list[Sequence[Any]]:
    """The parameters in runs of about SLICE values: one copy from the device for each."""
    batches: list[list[Any]] = [[]]
    for slot in fragment.slots:
        if batches[-1] and slot.stop - batches[-1][0].start > SLICE:
            batches.append([])
        batches[-1].append(slot)
    return list(batches)
