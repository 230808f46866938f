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
from atoll.diloco.pieces import Dim, Piece, before, locations
from atoll.diloco.staging import Staging

if TYPE_CHECKING:
    import torch

Write = Callable[[list["torch.Tensor"], "torch.Tensor"], None]

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
            row[self.row + locations(self.dims, self.start, self.stop) - self.low] = values

    def get(self, row: Floats) -> Floats:
        if self.dims is None:
            return row[self.row : self.row + self.size]
        return row[self.row + locations(self.dims, self.start, self.stop) - self.low]


class _Plan(NamedTuple):
    """What this process sends to each process in one step, and what it receives."""

    send: list[list[Run]]
    receive: list[list[Run]]
    counts: list[int]  # values that are sent
    sizes: list[int]  # values that are received


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
        self._is_complete = all(piece.is_complete for each in self._pieces for piece in each)
        self._plans: dict[tuple[int, bool], _Plan] = {}

    def parts(self, flats: Sequence[torch.Tensor]) -> Iterator[tuple[int, Floats]]:
        """The values of the model that this process carries, slice by slice of its row.

        `flats` are the local tensors of the slots, as one dimension. A slice is in memory that the
        next one uses again.
        """
        import torch

        me = self._team.process
        row = np.empty(min(SLICE, self._shares[me].size), np.float32)
        for step in range(self._steps):
            begin, end = self._span(self._shares[me], step)
            part, plan = row[: end - begin], self._plan(step, is_taken=True)
            if self._is_complete:
                self._read(flats, plan.receive[me], torch.from_numpy(part))
                yield begin, part
                continue
            arrived = self._team.all_to_all(
                plan.counts,
                lambda q, room: self._read(flats, plan.send[q], room),  # noqa: B023
                plan.sizes,
            )
            for runs, values in zip(plan.receive, arrived, strict=True):
                self._fill(part, begin, runs, values)
            yield begin, part

    def give(self, row: Floats, flats: Sequence[torch.Tensor], write: Write) -> None:
        """`write` gets parts of `flats`, all that this process holds, and their values."""
        for step in range(self._steps):
            plan = self._plan(step, is_taken=False)
            for runs, values in zip(plan.receive, self._arrivals(row, step, plan), strict=True):
                if runs:
                    write([_part_of(flats[run.slot], run) for run in runs], values)

    def gather(self, row: Floats, vector: Floats) -> None:
        """`vector` holds the rows of all processes, each value in its place."""
        import torch

        for step in range(self._steps):
            spans = [self._span(share, step) for share in self._shares]
            part = torch.from_numpy(row[slice(*spans[self._team.process])])
            sizes = [stop - start for start, stop in spans]
            rows = self._team.all_gather(part, sizes)
            for share, (begin, _), values in zip(self._shares, spans, rows, strict=True):
                for start, stop, at in share.locations(*self._span(share, step)):
                    first = at - begin
                    vector[start:stop] = values[first : first + stop - start].numpy()

    def _arrivals(self, row: Floats, step: int, plan: _Plan) -> list[torch.Tensor]:
        """What each process has for this one."""
        import torch

        if self._is_complete:  # all need the same
            spans = [self._span(share, step) for share in self._shares]
            part = torch.from_numpy(row[slice(*spans[self._team.process])])
            return self._team.all_gather(part, [stop - start for start, stop in spans])

        def fill(r: int, room: torch.Tensor) -> None:
            at, values = 0, room.numpy()
            for run in plan.send[r]:
                values[at : at + run.size] = run.get(row)
                at += run.size

        return self._team.all_to_all(plan.counts, fill, plan.sizes)

    def _read(self, flats: Sequence[torch.Tensor], runs: Sequence[Run], room: torch.Tensor) -> None:
        self._staging.fetch([_part_of(flats[run.slot], run) for run in runs], room)

    def _plan(self, step: int, *, is_taken: bool) -> _Plan:
        """What moves in a step: out of the model into rows if `is_taken`, else back."""
        plan = self._plans.get((step, is_taken))
        if plan is None:
            me, everyone = self._team.process, range(self._team.processes)

            def runs(carrier: int, holder: int) -> list[Run]:
                pairs = self._runs(carrier, step, holder=holder)
                return [run for run, source in pairs if not is_taken or source == holder]

            carried = [runs(me, each) for each in everyone]
            stored = [runs(each, me) for each in everyone]
            send, receive = (stored, carried) if is_taken else (carried, stored)
            counts, sizes = (
                [sum(r.size for r in runs) for runs in each] for each in (send, receive)
            )
            plan = self._plans[step, is_taken] = _Plan(send, receive, counts, sizes)
        return plan

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
        for start, stop, row in share.locations(*self._span(share, step)):
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


def _part_of(flat: torch.Tensor, run: Run) -> torch.Tensor:
    return flat if run.size == flat.numel() else flat[run.start : run.stop]
