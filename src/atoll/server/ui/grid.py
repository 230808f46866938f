"""Outer rounds as a grid of replicas and rounds: one letter a cell, bounded in size."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Annotated, TypeVar

from msgspec import Meta

from atoll.core.errors import NotFound
from atoll.core.model import Model
from atoll.core.rank_ranges import spans
from atoll.core.rounds import (
    ABSENT,
    BAD,
    HANDED_IN,
    IN,
    JOINED,
    LATE,
    LEFT,
    MISSING,
    WAITED_FOR,
    RoundItem,
    RoundSummary,
    states,
    with_absent,
)
from atoll.core.status import Training
from atoll.metrics.rounds import RoundTable
from atoll.server.handlers.rounds import RoundNumber, RoundsQuery, describe_source, select_rounds
from atoll.server.http.operations import Answer, ApiCall, Query, json_answer

N = TypeVar("N", int, float)

MAX_COLUMNS = 400  # 5 px each on a screen of 2,000 px
MAX_ROWS = 128  # 7 px each on a screen of 900 px
# The worst state of all cells that share one.
WORST = (BAD, MISSING, LATE, LEFT, JOINED, WAITED_FOR, HANDED_IN, IN, ABSENT)


class GridQuery(Query, frozen=True, rename={"from_": "from"}):
    from_: RoundNumber = 0
    to: RoundNumber | None = None
    columns: Annotated[int, Meta(ge=10, le=MAX_COLUMNS)] = MAX_COLUMNS
    uid: str | None = None


class GridColumn(Model, frozen=True, omit_defaults=False):
    """One round of a fragment, or all rounds from `first` to `last`."""

    first: int
    last: int
    fragment: int | None  # None: several
    at: float | None
    members: int  # the fewest of these rounds
    share: float  # of the expected replicas that were members
    bytes_up: int | None
    bytes_down: int | None
    hidden_s: float | None
    blocked_s: float | None
    is_open: bool = False


class RoundGrid(Model, frozen=True, omit_defaults=False):
    """`cells` has one string a row with one letter a column."""

    rows: list[str]
    columns: list[GridColumn]
    cells: list[str]
    message: str
    source: str
    summary: RoundSummary | None
    dropped: int = 0


async def rounds(call: ApiCall) -> Answer:
    query: GridQuery = call.query
    training = await call.plane.store.get(call.key)
    if query.uid not in (None, training.uid):
        raise NotFound("training", call.name)
    if call.plane.metrics is None:
        return json_answer(
            grid_of([], None, "this control plane does not store rounds", MAX_COLUMNS)
        )
    table = call.plane.metrics.rounds
    return json_answer(await asyncio.to_thread(_grid, table, training, query))


def _grid(table: RoundTable, training: Training, query: GridQuery) -> RoundGrid:
    uid = training.uid
    run = table.run_of(uid)
    summary, source = (
        with_absent(table.summary(uid), training),
        describe_source(table.observation(uid)),
    )
    if run is None:
        return grid_of([], summary, source, query.columns)
    selection = RoundsQuery(from_=query.from_, to=query.to)
    items = select_rounds(table, uid, run, selection)
    return grid_of(items, summary, source, query.columns, table.dropped(uid, run)[0])


def grid_of(
    items: Sequence[RoundItem],
    summary: RoundSummary | None,
    source: str,
    most: int,
    dropped: int = 0,
) -> RoundGrid:
    letters = [states(item) for item in items]
    wide = -(-len(items) // most) if items else 1
    bins = [slice(at, at + wide) for at in range(0, len(items), wide)]
    columns = [_column(items[each], letters[each]) for each in bins]
    merged = [_merge(letters[each]) for each in bins]
    if summary is not None and summary.uploaded:
        columns.append(_open_column(summary))
        merged.append(
            dict.fromkeys(summary.waited_for, WAITED_FOR)
            | dict.fromkeys(summary.uploaded, HANDED_IN)
        )
    ranks = sorted({rank for each in merged for rank in each})
    tall = -(-len(ranks) // MAX_ROWS) if ranks else 1
    groups = [ranks[at : at + tall] for at in range(0, len(ranks), tall)]
    cells = [
        "".join(_worst(each.get(rank, ABSENT) for rank in group) for each in merged)
        for group in groups
    ]
    message = "no round yet" if summary is None else summary.words
    return RoundGrid(
        rows=[spans(group) for group in groups],
        columns=columns,
        cells=cells,
        message=message,
        source=source,
        summary=summary,
        dropped=dropped,
    )


def _merge(letters: Sequence[dict[int, str]]) -> dict[int, str]:
    ranks = {rank for each in letters for rank in each}
    return {rank: _worst(each.get(rank, ABSENT) for each in letters) for rank in ranks}


def _worst(letters: Iterable[str]) -> str:
    return min(letters, key=WORST.index)


def _column(items: Sequence[RoundItem], letters: Sequence[dict[int, str]]) -> GridColumn:
    fragments = {item.fragment for item in items}
    expected = sum(sum(letter != LEFT for letter in each.values()) for each in letters)
    return GridColumn(
        first=items[0].round,
        last=items[-1].round,
        fragment=fragments.pop() if len(fragments) == 1 else None,
        at=items[-1].at,
        members=min(len(item.members) for item in items),
        share=sum(len(item.members) for item in items) / expected if expected else 0.0,
        bytes_up=_max_or_none([item.bytes_up for item in items]),
        bytes_down=_max_or_none([item.bytes_down for item in items]),
        hidden_s=_max_or_none([item.hidden_s for item in items]),
        blocked_s=_max_or_none([item.blocked_s for item in items]),
    )


def _max_or_none(values: Iterable[N | None]) -> N | None:
    return max((value for value in values if value is not None), default=None)


def _open_column(summary: RoundSummary) -> GridColumn:
    number = 0 if summary.round is None else summary.round + 1
    everyone = len({*summary.uploaded, *summary.waited_for})
    return GridColumn(
        first=number,
        last=number,
        fragment=None,
        at=None,
        members=len(summary.uploaded),
        share=len(summary.uploaded) / max(1, everyone),
        bytes_up=None,
        bytes_down=None,
        hidden_s=None,
        blocked_s=None,
        is_open=True,
    )
