"""Values between a model cut in any way and the rows of its processes, by threads as processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from atoll.diloco import moves
from atoll.diloco.allreduce.layout import Layout
from atoll.diloco.allreduce.share import Share
from atoll.diloco.moves import Moves
from atoll.diloco.outer import Slot
from atoll.diloco.packing import TensorSpec
from atoll.diloco.pieces import Piece
from atoll.diloco.staging import Staging
from tests.allreduce.teams import ThreadTeam, thread_team

SHAPES = {"a": (7, 5), "b": (3,), "c": (4, 6, 2), "d": (1, 9)}


class MovingTeam:
    """A team of threads that can also exchange tensors."""

    def __init__(self, team: ThreadTeam) -> None:
        self.process, self.processes, self._share = team.process, team.processes, team.share

    def all_to_all(
        self,
        counts: Sequence[int],
        fill: Callable[[int, torch.Tensor], None],
        sizes: Sequence[int],
    ) -> list[torch.Tensor]:
        parts = [torch.full((count,), torch.nan) for count in counts]
        for process, part in enumerate(parts):
            fill(process, part)
        messages = self._share(parts)
        mine = [message[self.process] for message in messages]
        assert [part.numel() for part in mine] == list(sizes)
        return mine

    def all_gather(self, part: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        parts = self._share(part.clone())
        assert [each.numel() for each in parts] == list(sizes)
        return list(parts)


def complete(shape: tuple[int, ...]) -> Piece:
    return Piece(shape, (0,) * len(shape), shape, "float32")


def along(shape: tuple[int, ...], dim: int, process: int, processes: int) -> Piece:
    """The chunk that Shard(dim) gives a process: the last ones may be short, or empty."""
    chunk = -(-shape[dim] // processes)
    start = min(shape[dim], process * chunk)
    length = min(shape[dim], start + chunk) - start
    piece = complete(shape)
    offset, lengths = list(piece.offset), list(piece.lengths)
    offset[dim], lengths[dim] = start, length
    return piece._replace(offset=tuple(offset), lengths=tuple(lengths))


def pieces_of(kind: str, process: int, processes: int) -> dict[str, Piece]:
    if kind == "ddp":
        return {name: complete(shape) for name, shape in SHAPES.items()}
    if kind == "rows":
        return {n: along(s, 0, process, processes) for n, s in SHAPES.items()}
    if kind == "columns":  # and the short one on every process
        return {
            n: along(s, len(s) - 1, process, processes) if len(s) > 1 else complete(s)
            for n, s in SHAPES.items()
        }
    # Two halves of the processes hold the same.
    return {n: along(s, 0, process % 2, 2) for n, s in SHAPES.items()}


@pytest.mark.parametrize("kind", ["ddp", "rows", "columns", "twice"])
@pytest.mark.parametrize("processes", [2, 4])
def test_values_come_out_of_any_cut_and_go_back(
    kind: str, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moves, "SLICE", 13)
    slots, at = [], 0
    for name, shape in SHAPES.items():
        slots.append(Slot(name, shape, at, at + int(np.prod(shape))))
        at = slots[-1].stop
    vector = np.arange(at, dtype="f4") + 1
    layout = Layout((TensorSpec("float32", (at,)),), 3, "fp32", "fp32", "", 4)
    shares = [Share(layout, process, processes) for process in range(processes)]
    pieces = [pieces_of(kind, process, processes) for process in range(processes)]
    errors: list[BaseException] = []

    def go(team: ThreadTeam) -> None:
        me = team.process
        local = {}
        for slot in slots:
            piece = pieces[me][slot.name]
            cut = [slice(o, o + n) for o, n in zip(piece.offset, piece.lengths, strict=True)]
            values = vector[slot.start : slot.stop].reshape(slot.shape)[tuple(cut)]
            local[slot.name] = torch.from_numpy(values.copy())
        mover = Moves(MovingTeam(team), slots, shares, pieces, Staging())  # type: ignore[arg-type]
        row = np.zeros(shares[me].size, "f4")
        flats = [local[slot.name].reshape(-1) for slot in slots]
        for start, part in mover.parts(flats):
            row[start : start + part.size] = part
        mine = np.concatenate([vector[a:b] for a, b in shares[me].intervals])
        np.testing.assert_array_equal(row, mine)
        fresh = {name: torch.zeros_like(value) for name, value in local.items()}

        def write(parts: list[torch.Tensor], values: torch.Tensor) -> None:
            for part, each in zip(
                parts, torch.split(values, [p.numel() for p in parts]), strict=True
            ):
                part += each  # twice would show

        mover.give(row, [fresh[slot.name].view(-1) for slot in slots], write)
        for name, value in local.items():
            assert torch.equal(fresh[name], value), name
        gathered = np.zeros_like(vector)
        mover.gather(row, gathered)
        np.testing.assert_array_equal(gathered, vector)

    def run(team: ThreadTeam) -> None:
        try:
            go(team)
        except BaseException as error:
            errors.append(error)
            team.die()

    threads = [threading.Thread(target=run, args=(team,)) for team in thread_team(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    causes: list[Any] = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    assert not causes, causes[0]
    assert not errors
