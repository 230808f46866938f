"""Values on their way between the model and the rows that the processes of a replica carry.

A model is cut as its trainer likes; a row has what its process carries to the store. Values move
in slices: one exchange between the processes for each, so no process ever needs room for more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from atoll.diloco.allreduce.share import Share
from atoll.diloco.group import ProcessTeam
from atoll.diloco.outer import Floats, Slot
from atoll.diloco.pieces import Dim, Piece, before, places
from atoll.diloco.staging import Staging

if TYPE_CHECKING:
    import torch

SLICE = 1 << 17  # values of a row that are on their way at a time


class Run(NamedTuple):
    """Values `start:stop` of the piece of a slot; they belong into a row from `row` on.

    `dims` is None where they lie side by side there; else `low` is the place of the slot at `row`.
    """

    slot: int
    start: int
    stop: int
    row: int
    low: int = 0
    dims: tuple[Dim, ...] | None = None

    @property
    def size(self) -> int:
        return self.stop - self.start

    def put(self, row: Floats, values: Floats) -> None:
        if self.dims is None:
            row[self.row : self.row + self.size] = values
        else:
            row[self.row + places(self.dims, self.start, self.stop) - self.low] = values

    def get(self, row: Floats) -> Floats:
        if self.dims is None:
            return row[self.row : self.row + self.size]
        return row[self.row + places(self.dims, self.start, self.stop) - self.low]


class Moves:
    """Takes the rows out of the model and gives them back; collective over the team."""

    def __init__(
        self,
        team: ProcessTeam,
        slots: Sequence[Slot],
        shares: Sequence[Share],
        pieces: Sequence[dict[str, Piece]],
        staging: Staging,
    ) -> None:
        self._team = team
        self._slots = slots
        self._starts = [slot.start for slot in slots]
        self._shares = shares
        self._pieces = [[each[slot.name] for slot in slots] for each in pieces]
        self._staging = staging
        self._steps = max(-(-share.size // SLICE) for share in shares)
        # Where every process has all of the model, it has its own row too.
        self._is_whole = all(piece.is_whole for each in self._pieces for piece in each)

    def take(self, local: Callable[[str], torch.Tensor], row: Floats) -> None:
        """`row` holds the values of the model that this process carries."""
        for start, part in self.parts(local):
            row[start : start + part.size] = part

    def parts(self, local: Callable[[str], torch.Tensor]) -> Iterator[tuple[int, Floats]]:
        """The values of the model that this process carries, slice by slice of its row.

        A slice is in memory that the next one uses again.
        """
        import torch

        me, everyone = self._team.process, range(self._team.processes)
        row = np.empty(min(SLICE, self._shares[me].size), np.float32)
        for step in range(self._steps):
            begin, end = self._span(self._shares[me], step)
            part = row[: end - begin]
            if self._is_whole:
                runs = [run for run, _ in self._runs(me, step, holder=me)]
                self._read(local, runs, torch.from_numpy(part))
                yield begin, part
                continue
            send = [
                [run for run, source in self._runs(q, step, holder=me) if source == me]
                for q in everyone
            ]
            receive = [
                [run for run, source in self._runs(me, step, holder=r) if source == r]
                for r in everyone
            ]
            arrived = self._team.all_to_all(
                [_size(runs) for runs in send],
                lambda q, room: self._read(local, send[q], room),  # noqa: B023
                [_size(runs) for runs in receive],
            )
            for runs, values in zip(receive, arrived, strict=True):
                self._fill(part, begin, runs, values)
            yield begin, part

    def give(self, row: Floats, write: Callable[[str, int, torch.Tensor], None]) -> None:
        """`write` is called with name, start and values, for all that this process holds."""
        for step in range(self._steps):
            for runs, values in self._arrivals(row, step):
                at = 0
                for run in runs:
                    write(self._slots[run.slot].name, run.start, values[at : at + run.size])
                    at += run.size

    def gather(self, row: Floats, vector: Floats) -> None:
        """`vector` holds the rows of all processes, each value in its place."""
        import torch

        for step in range(self._steps):
            spans = [self._span(share, step) for share in self._shares]
            part = torch.from_numpy(row[slice(*spans[self._team.process])])
            sizes = [stop - start for start, stop in spans]
            rows = self._team.all_gather(part, sizes)
            for share, (begin, _), values in zip(self._shares, spans, rows, strict=True):
                for start, stop, at in share.places(*self._span(share, step)):
                    first = at - begin
                    vector[start:stop] = values[first : first + stop - start].numpy()

    def _arrivals(self, row: Floats, step: int) -> Iterator[tuple[list[Run], torch.Tensor]]:
        import torch

        me, everyone = self._team.process, range(self._team.processes)
        receive = [[run for run, _ in self._runs(q, step, holder=me)] for q in everyone]
        if self._is_whole:  # all need the same
            spans = [self._span(share, step) for share in self._shares]
            part = torch.from_numpy(row[slice(*spans[me])])
            yield from zip(
                receive,
                self._team.all_gather(part, [stop - start for start, stop in spans]),
                strict=True,
            )
            return
        send = [[run for run, _ in self._runs(me, step, holder=r)] for r in everyone]

        def fill(r: int, room: torch.Tensor) -> None:
            at, values = 0, room.numpy()
            for run in send[r]:
                values[at : at + run.size] = run.get(row)
                at += run.size

        sizes = [_size(runs) for runs in receive]
        arrived = self._team.all_to_all([_size(runs) for runs in send], fill, sizes)
        yield from zip(receive, arrived, strict=True)

    def _read(
        self, local: Callable[[str], torch.Tensor], runs: Sequence[Run], room: torch.Tensor
    ) -> None:
        pieces = (local(self._slots[run.slot].name).reshape(-1) for run in runs)
        slices = [piece[run.start : run.stop] for piece, run in zip(pieces, runs, strict=True)]
        self._staging.fetch(slices, room)

    def _fill(self, part: Floats, begin: int, runs: Sequence[Run], values: torch.Tensor) -> None:
        """The values are in their places of `part`, which begins at place `begin` of the row."""
        array, at = values.numpy(), 0
        for run in runs:
            run._replace(row=run.row - begin).put(part, array[at : at + run.size])
            at += run.size

    def _span(self, share: Share, step: int) -> tuple[int, int]:
        return min(step * SLICE, share.size), min((step + 1) * SLICE, share.size)

    def _runs(self, carrier: int, step: int, *, holder: int) -> Iterator[tuple[Run, int]]:
        """What the piece of `holder` has in a slice of the carrier's row, and who is to send it."""
        share = self._shares[carrier]
        for start, stop, row in share.places(*self._span(share, step)):
            at = max(0, bisect_right(self._starts, start) - 1)
            while at < len(self._slots) and self._slots[at].start < stop:
                slot = self._slots[at]
                low, high = max(start, slot.start) - slot.start, min(stop, slot.stop) - slot.start
                run = self._run(at, holder, low, high, row + low + slot.start - start)
                if run is not None:
                    yield run, self._source(at, holder, carrier)
                at += 1

    def _run(self, slot: int, holder: int, low: int, high: int, row: int) -> Run | None:
        dims = self._pieces[holder][slot].dims
        first, last = before(dims, low), before(dims, high)
        if last <= first:
            return None
        if len(dims) > 1:
            return Run(slot, first, last, row, low, dims)
        # One dimension: the values lie side by side, from where the piece begins.
        return Run(slot, first, last, row + max(0, dims[0].offset - low))

    def _source(self, slot: int, holder: int, carrier: int) -> int:
        """Who sends a piece that several hold: the carrier if it can, else they take turns."""
        piece = self._pieces[holder][slot]
        holders = [p for p, each in enumerate(self._pieces) if each[slot] == piece]
        return carrier if carrier in holders else holders[carrier % len(holders)]


def _size(runs: Sequence[Run]) -> int:
    return sum(run.size for run in runs)
