"""Values between a model cut in any way and the rows of its processes, by threads as processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from atoll.diloco import sharding
from atoll.diloco.pinned import PinnedBuffer
from atoll.diloco.round.cells import Cut, Share
from atoll.diloco.sharding import Block, ParameterSpan, ValueExchange

SHAPES = {"a": (7, 5), "b": (3,), "c": (4, 6, 2), "d": (1, 9)}


class ThreadGroup:
    """Threads as the processes of a replica, with the exchanges of a training group."""

    def __init__(self, process: int, barrier: threading.Barrier, table: dict[int, Any]) -> None:
        self.process, self.processes = process, barrier.parties
        self._barrier, self._table = barrier, table

    def _share(self, message: Any) -> list[Any]:
        self._table[self.process] = message
        self._barrier.wait()
        found = [self._table[process] for process in range(self.processes)]
        self._barrier.wait()
        return found

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


def complete(shape: tuple[int, ...]) -> Block:
    return Block(shape, (0,) * len(shape), shape, "float32")


def along(shape: tuple[int, ...], dim: int, process: int, processes: int) -> Block:
    """The chunk that Shard(dim) gives a process: the last ones may be short, or empty."""
    chunk = -(-shape[dim] // processes)
    start = min(shape[dim], process * chunk)
    length = min(shape[dim], start + chunk) - start
    block = complete(shape)
    offset, lengths = list(block.offset), list(block.lengths)
    offset[dim], lengths[dim] = start, length
    return block._replace(offset=tuple(offset), lengths=tuple(lengths))


def blocks_of(kind: str, process: int, processes: int) -> dict[str, Block]:
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
    monkeypatch.setattr(sharding, "SLICE", 13)
    slots, at = [], 0
    for name, shape in SHAPES.items():
        slots.append(ParameterSpan(name, shape, at, at + int(np.prod(shape))))
        at = slots[-1].stop
    vector = np.arange(at, dtype="f4") + 1
    cut = Cut(at, 3, 12)
    shares = [Share(cut, process, processes) for process in range(processes)]
    blocks = [blocks_of(kind, process, processes) for process in range(processes)]
    errors: list[BaseException] = []

    def go(team: ThreadGroup) -> None:
        me = team.process
        local = {}
        for slot in slots:
            block = blocks[me][slot.name]
            part = [slice(o, o + n) for o, n in zip(block.offset, block.lengths, strict=True)]
            values = vector[slot.start : slot.stop].reshape(slot.shape)[tuple(part)]
            local[slot.name] = torch.from_numpy(values.copy())
        mover = ValueExchange(team, slots, shares, blocks, PinnedBuffer())  # type: ignore[arg-type]
        row = np.zeros(shares[me].size, "f4")
        flats = [local[slot.name].reshape(-1) for slot in slots]
        for start, part in mover.parts(flats):
            row[start : start + part.size] = part
        np.testing.assert_array_equal(row, vector[shares[me].start : shares[me].stop])
        fresh = {name: torch.zeros_like(value) for name, value in local.items()}

        def write(parts: list[torch.Tensor], values: torch.Tensor) -> None:
            for part, each in zip(
                parts, torch.split(values, [p.numel() for p in parts]), strict=True
            ):
                part += each  # twice would show

        mover.give(row, [fresh[slot.name].view(-1) for slot in slots], write)
        for name, value in local.items():
            assert torch.equal(fresh[name], value), name
        for first, last in ((0, vector.size), (5, 40)):
            gathered = np.zeros(last - first, "f4")
            mover.gather(row, first, last, gathered)
            np.testing.assert_array_equal(gathered, vector[first:last])

    def run(team: ThreadGroup) -> None:
        try:
            go(team)
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    barrier, table = threading.Barrier(processes, timeout=60), dict[int, Any]()
    groups = [ThreadGroup(process, barrier, table) for process in range(processes)]
    threads = [threading.Thread(target=run, args=(each,)) for each in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    causes: list[Any] = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
    assert not causes, causes[0]
    assert not errors
