"""The data that pages of the dashboard read: rows, one training, metrics, and what has changed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Sequence
from math import fsum, isfinite, isnan
from typing import Annotated, NamedTuple, TypeVar

from msgspec import Meta
from msgspec.structs import replace

from atoll.core.errors import Temporary, ValidationError
from atoll.core.executors import LOCAL
from atoll.core.metrics import MetricValue
from atoll.core.model import Model, encode
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
from atoll.core.spec import RankNumber
from atoll.core.status import Training
from atoll.core.text import spans
from atoll.metrics.axes import Axis, AxisSource, has_steps, positions
from atoll.metrics.rounds import RoundTable
from atoll.metrics.series import AT, MEAN, Series, band_of
from atoll.metrics.store import LabeledSeries, MetricStore
from atoll.server.handlers.logs import Timestamp
from atoll.server.handlers.metrics import (
    RoundNumber,
    RoundsQuery,
    describe_source,
    select_rounds,
    spark_of,
)
from atoll.server.http.operations import (
    JSON,
    NDJSON,
    Answer,
    ApiCall,
    Query,
    json_answer,
    stream_answer,
)
from atoll.server.ui.page import MetricName, RankLine, TrainingPage, page_of, rank_lines
from atoll.server.ui.rows import TrainingRow, with_spark

FRAMES_S = 0.25  # between two messages of a stream: people do not see more
LOSS = "loss"
# What one page draws at most: charts, lines in a chart, lanes of ranks.
MAX_CURVES = 12
MAX_LINES = 8
MAX_RANKS = 64
MIN_SPREAD = 1e-6  # of the mean: ranks that differ less differ by rounding


class RowsQuery(Query, frozen=True):
    q: Annotated[str, Meta(max_length=200)] = ""
    phase: Annotated[str, Meta(max_length=20)] = ""
    sort: Annotated[str, Meta(max_length=20)] = ""
    offset: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    limit: Annotated[int, Meta(ge=1, le=200)] = 60
    group: Annotated[str, Meta(max_length=200)] = ""
    open: list[str] = []  # groups whose trainings are listed


class PageQuery(Query, frozen=True):
    uid: str | None = None


class RanksQuery(Query, frozen=True):
    ranks: Annotated[str, Meta(min_length=1, max_length=400)]
    uid: str | None = None


class RankLines(Model, frozen=True, omit_defaults=False):
    items: list[RankLine]


class MetricBandsQuery(Query, frozen=True):
    name: list[str] = []
    rank: list[RankNumber] = []  # ranks to draw as single lines
    # Without `rank`: how many to draw, those furthest from the mean.
    furthest: Annotated[int, Meta(ge=0, le=8)] = 0
    bins: Annotated[int, Meta(ge=10, le=2_000)] = 600
    x: Axis = "time"
    start: Timestamp | None = None  # or the first position on another axis
    end: Timestamp | None = None
    uid: str | None = None


class StreamQuery(Query, frozen=True):
    after: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0


class MetricBand(Model, frozen=True, omit_defaults=False):
    """One metric over an axis: the band of all ranks, or one rank, which has only a mean."""

    name: str
    rank: int | None
    at: list[float]  # positions on the axis
    low: list[MetricValue]
    p10: list[MetricValue]
    mean: list[MetricValue]
    p90: list[MetricValue]
    high: list[MetricValue]
    ranks: list[int]
    bad: int
    unplaced: int  # points that have no position on the axis


class MetricBandList(Model, frozen=True, omit_defaults=False):
    names: list[MetricName]
    items: list[MetricBand]
    has_store: bool = True


class StreamFrame(Model, frozen=True, omit_defaults=False):
    """The trainings that changed since the last frame; `names` is null if all may have."""

    version: int
    names: list[str] | None
    now: float


async def rows(call: ApiCall) -> Answer:
    query: RowsQuery = call.query
    await call.plane.rows.read(call.namespace)
    page = call.plane.rows.page(
        call.namespace,
        q=query.q,
        phase=query.phase,
        sort=query.sort,
        offset=query.offset,
        limit=query.limit,
        now=call.plane.clock().wall,
        group=query.group,
        opened=query.open,
    )
    local = call.plane.executors.get(LOCAL)
    return json_answer(
        replace(
            page,
            items=await asyncio.to_thread(_add_sparklines, call, page.items),
            resources=[] if local is None else local.capacity(),
        )
    )


def _add_sparklines(call: ApiCall, items: list[TrainingRow]) -> list[TrainingRow]:
    metric_store = call.plane.metrics
    if metric_store is None:
        return items
    with contextlib.suppress(Temporary):  # rows are useful without them
        return [
            replace(
                _with_loss(row, metric_store.first(row.uid, LOSS)),
                round=metric_store.rounds.reached(row.uid),
            )
            for row in items
        ]
    return items


def _with_loss(row: TrainingRow, series: Series | None) -> TrainingRow:
    if series is None or not len(series):
        return row
    last = series.columns[MEAN][-1]
    return with_spark(row, spark_of(series), last if isfinite(last) else str(last))


async def page(call: ApiCall) -> Answer:
    training = await call.training()
    attempts = await call.plane.store.attempts(call.key)
    metric_store, now = call.plane.metrics, call.plane.clock()
    await _catch_up(metric_store, training)

    def build() -> TrainingPage:
        names = None if metric_store is None else _names(metric_store, training.uid)
        return page_of(training, now, attempts, names)

    return json_answer(await asyncio.to_thread(build))


async def ranks(call: ApiCall) -> Answer:
    """Some ranks in full: the page of a large world has only the exceptions."""
    requested = parse_ranks(call.query.ranks)
    training = await call.training()
    attempts = await call.plane.store.attempts(call.key)
    lines = await asyncio.to_thread(rank_lines, training.status, attempts)
    return json_answer(RankLines(items=[line for line in lines if line.rank in requested]))


def parse_ranks(text: str) -> set[int]:
    """Parses `400-415,870`, at most `MAX_RANKS` ranks. Raises ValidationError."""
    requested: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        is_range = first.isdecimal() and (not dash or last.isdecimal())
        if not is_range or len(first) > 7 or len(last) > 7:
            raise ValidationError("ranks", text, "expected ranks such as 400-415,870")
        stop = int(last if dash else first) + 1
        if stop <= int(first) or len(requested) + stop - int(first) > MAX_RANKS:
            raise ValidationError("ranks", text, f"expected at most {MAX_RANKS} ranks")
        requested |= set(range(int(first), stop))
    return requested


async def _catch_up(metric_store: MetricStore | None, training: Training) -> None:
    """Reads the last metrics of a training that has ended: its page does not ask again."""
    if metric_store is not None and metric_store.catch_up and training.status.phase.is_terminal:
        await metric_store.catch_up(training)


def _names(metric_store: MetricStore, uid: str) -> list[MetricName]:
    counts: dict[str, set[int]] = {}
    for rank, _, name in metric_store.keys(uid):
        counts.setdefault(name, set()).add(rank)
    return [MetricName(name=name, ranks=len(ranks)) for name, ranks in sorted(counts.items())]


async def metric_bands(call: ApiCall) -> Answer:
    query: MetricBandsQuery = call.query
    training = await call.training()
    if call.plane.metrics is None:
        return json_answer(MetricBandList(names=[], items=[], has_store=False))
    await _catch_up(call.plane.metrics, training)
    key = (training.uid, encode(query))
    body = await call.plane.metric_cache.body(
        key, lambda: encode(_metric_bands(call, training.uid))
    )
    return Answer(body, media_type=JSON)


def _metric_bands(call: ApiCall, uid: str) -> MetricBandList:
    query, metric_store = call.query, call.plane.metrics
    assert metric_store is not None
    items = []
    for name in query.name[:MAX_CURVES]:
        every = PlacedSeries.of(metric_store, uid, name, query.x)
        extent = every.extent()
        if extent is None:
            if every.series:
                items.append(every.band(name, None, 0.0, 0.0, query.bins))
            continue
        start, end = (
            max(extent[0], query.start or extent[0]),
            min(extent[1], query.end or extent[1]),
        )
        items.append(every.band(name, None, start, end, query.bins))
        for rank in (query.rank or furthest(every.series, query.furthest))[:MAX_LINES]:
            own = every.of_rank(rank)
            if own.series:
                items.append(own.band(name, rank, start, end, query.bins))
    return MetricBandList(names=_names(metric_store, uid), items=items)


class PlacedSeries(NamedTuple):
    """The series of one metric, with the position of each point on an axis."""

    series: list[LabeledSeries]
    positions: list[Sequence[float]] | None  # None: the times

    @classmethod
    def of(cls, metric_store: MetricStore, uid: str, name: str, axis: Axis) -> PlacedSeries:
        series = [one for one in metric_store.series(uid, [name]) if len(one.series)]
        if axis == "time":
            return cls(series, None)
        steps: dict[int, Series] = {}
        tokens: dict[int, Series] = {}
        if axis == "step" and not all(has_steps(one.series) for one in series):
            steps = {one.rank: one.series for one in reversed(metric_store.series(uid, [LOSS]))}
        if axis == "tokens":
            tokens = {
                one.rank: one.series for one in reversed(metric_store.series(uid, ["tokens"]))
            }
        first_round, commits = metric_store.rounds.commits(uid) if axis == "round" else (0, [])

        def source_of(rank: int) -> AxisSource:
            return AxisSource(axis, steps.get(rank), tokens.get(rank), first_round, commits)

        return cls(series, [positions(one.series, source_of(one.rank)) for one in series])

    def of_rank(self, rank: int) -> PlacedSeries:
        at = [index for index, one in enumerate(self.series) if one.rank == rank]
        placed = self.positions
        return PlacedSeries(
            [self.series[index] for index in at],
            None if placed is None else [placed[index] for index in at],
        )

    def extent(self) -> tuple[float, float] | None:
        """The lowest and the highest position; None if no point has one."""
        if self.positions is None:
            times = [one.series.columns[AT] for one in self.series]
            ends = [end for column in times for end in (column[0], column[-1])]
        else:
            ends = [at for placed in self.positions for at in placed if not isnan(at)]
        return (min(ends), max(ends)) if ends else None

    def band(self, name: str, rank: int | None, start: float, end: float, bins: int) -> MetricBand:
        band = band_of([one.series for one in self.series], start, end, bins, self.positions)
        unplaced = sum(isnan(at) for placed in self.positions or () for at in placed)
        return MetricBand(name=name, rank=rank, unplaced=unplaced, **band._asdict())


def furthest(series: list[LabeledSeries], count: int) -> list[int]:
    """At most `count` ranks whose newest value is furthest from the mean."""
    newest_values: dict[int, float] = {}
    for one in series:
        value = one.series.columns[MEAN][-1]
        if isfinite(value):
            newest_values[one.rank] = value
    if not newest_values or len(newest_values) < 2:
        return []
    middle = fsum(newest_values.values()) / len(newest_values)
    far = {rank: abs(value - middle) for rank, value in newest_values.items()}
    order = sorted(far, key=lambda rank: (-far[rank], rank))
    return sorted(rank for rank in order[:count] if far[rank] > MIN_SPREAD * abs(middle))


async def stream(call: ApiCall) -> Answer:
    """Streams which trainings changed; the page then reads those it shows."""
    plane, namespace = call.plane, call.namespace
    query: StreamQuery = call.query

    async def frames() -> AsyncIterator[bytes]:
        version = query.after
        if version <= 0 or version > plane.rows.version:
            version = plane.rows.version
        yield _frame(version, [], plane.clock().wall)
        while True:
            await plane.rows.wait(version)
            names = plane.rows.changed(namespace, version)
            version = plane.rows.version
            if names != []:
                yield _frame(version, names, plane.clock().wall)
                await asyncio.sleep(FRAMES_S)

    beat = b'{"beat":true}\n'
    return stream_answer(plane.streams.run(frames(), heartbeat=beat), NDJSON)


def _frame(version: int, names: list[str] | None, now: float) -> bytes:
    return encode(StreamFrame(version=version, names=names, now=now)) + b"\n"


# Outer rounds as a grid of replicas and rounds: one letter a cell, bounded in size.

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
    training = await call.training()
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
    message = "no round yet" if summary is None else summary.message
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
