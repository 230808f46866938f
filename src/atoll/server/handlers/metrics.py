"""The metrics that ranks report, over HTTP: stored, read, and the newest of each training."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta

from atoll.agent.metrics import MAX_BATCH
from atoll.backends.metrics_token import read_token
from atoll.core.errors import Denied, NotFound, Temporary, ValidationError
from atoll.core.metrics import (
    MACHINE,
    LatestMetric,
    LatestMetricList,
    MetricSeries,
    MetricSeriesList,
    MetricValue,
    check_names,
)
from atoll.core.model import Model
from atoll.core.rounds import RoundItem, RoundList, RoundSummary, items_of, with_absent
from atoll.core.settings import name_label
from atoll.core.spec import RankNumber
from atoll.core.status import Training
from atoll.core.weights import Channel, ChannelList, lag_of_channels
from atoll.metrics.rounds import RoundTable, StoreObservation
from atoll.metrics.series import AT, ATTEMPT, BAD, COUNT, MAX, MEAN, MIN, STEP, Series, band_of
from atoll.metrics.store import LabeledSeries, MetricStore
from atoll.metrics.weights import TrainingName
from atoll.server.http.auth import token_of
from atoll.server.http.operations import Answer, ApiCall, Plane, Query, json_answer

SPARK_POINTS = 24  # of a sparkline: one for every 3 px of a row
MAX_NAMES = 12  # in one query: as many charts as a page draws


class MetricsQuery(Query, frozen=True):
    name: list[str] = []
    rank: list[RankNumber] = []
    uid: str | None = None


async def metrics(call: ApiCall) -> Answer:
    query: MetricsQuery = call.query
    training = await call.training()
    metric_store = call.plane.metrics
    if metric_store is None:
        return json_answer(MetricSeriesList(items=[]))
    if metric_store.catch_up is not None:
        await metric_store.catch_up(training)
    if query.name and training.status.phase.is_terminal:  # before, one may still be reported
        keys = await asyncio.to_thread(metric_store.keys, training.uid)
        check_names(training.name, query.name, (name for _, _, name in keys))
    selected = await asyncio.to_thread(metric_store.series, training.uid, query.name, query.rank)

    def build() -> MetricSeriesList:
        return MetricSeriesList(
            items=[columns_of(one) for one in selected],
            skipped=metric_store.skipped(training.uid),
            missed=metric_store.missed(training.uid),
        )

    return json_answer(await asyncio.to_thread(build))


class NewestQuery(Query, frozen=True):
    name: list[str] = []
    training: list[str] = []  # empty: all trainings
    ranks: bool = False


async def newest_metrics(call: ApiCall) -> Answer:
    """The newest values of trainings, for lists of them; without names, of all they report."""
    query: NewestQuery = call.query
    if len(query.name) > MAX_NAMES:
        expected = f"expected at most {MAX_NAMES} names of metrics"
        raise ValidationError("name", query.name, expected)
    metric_store = call.plane.metrics
    if metric_store is None:
        return json_answer(LatestMetricList(items=[]))
    trainings = {name_label("training", name) for name in query.training}
    uids = [
        (name, uid)
        for uid, (namespace, name) in call.plane.informer.keys()
        if namespace == call.namespace and (not trainings or name in trainings)
    ]
    items = await asyncio.to_thread(_newest, metric_store, uids, query)
    return json_answer(LatestMetricList(items=items))


def _newest(
    metric_store: MetricStore, uids: list[tuple[str, str]], query: NewestQuery
) -> list[LatestMetric]:
    items = []
    for training, uid in uids:
        names = query.name or _reported_names(metric_store, uid)
        newest_values = metric_store.newest_values(uid, names) if query.ranks else {}
        for name in names:
            one = metric_store.first(uid, name)
            if one is None or not len(one):
                continue
            columns = one.columns
            step = columns[STEP][-1]
            of_ranks: dict[str, float] = {}
            for (rank, _, each), value in newest_values.items():
                if each == name:
                    of_ranks[str(rank)] = of_ranks.get(str(rank), 0.0) + value
            items.append(
                LatestMetric(
                    training=training,
                    uid=uid,
                    name=name,
                    value=_json_number(columns[MEAN][-1]),
                    step=None if math.isnan(step) else int(step),
                    at=columns[AT][-1],
                    min=_json_number(lowest(one)),
                    max=_json_number(highest(one)),
                    spark=[_json_number(part) for part in spark_of(one)],
                    ranks={rank: _json_number(value) for rank, value in of_ranks.items()},
                )
            )
    return items


def _reported_names(metric_store: MetricStore, uid: str) -> list[str]:
    """What ranks reported themselves, in order of name."""
    names = {name for _, _, name in metric_store.keys(uid) if not name.startswith(MACHINE)}
    return sorted(names)[:MAX_NAMES]


def lowest(series: Series) -> float:
    """Of the finite values; NaN if there is none."""
    columns = zip(series.columns[MIN], series.columns[COUNT], strict=True)
    return min((value for value, count in columns if count), default=math.nan)


def highest(series: Series) -> float:
    columns = zip(series.columns[MAX], series.columns[COUNT], strict=True)
    return max((value for value, count in columns if count), default=math.nan)


def aggregates_of(
    metric_store: MetricStore, uids: Iterable[str], names: Iterable[str]
) -> dict[tuple[str, str, str], float]:
    """The last, lowest and highest value of these metrics, by training."""
    names, values = list(names), {}
    for uid in uids:
        for name in names:
            one = metric_store.first(uid, name)
            if one is None or not len(one):
                continue
            values[uid, "last", name] = one.columns[MEAN][-1]
            values[uid, "min", name] = lowest(one)
            values[uid, "max", name] = highest(one)
    return values


def spark_of(series: Series) -> list[float]:
    """The series merged into `SPARK_POINTS` points."""
    times = series.columns[AT]
    return band_of([series], times[0], times[-1], SPARK_POINTS).mean if len(times) else []


def columns_of(one: LabeledSeries) -> MetricSeries:
    columns = one.series.columns
    return MetricSeries(
        name=one.name,
        rank=one.rank,
        process=one.process,
        attempt=[int(part) for part in columns[ATTEMPT]],
        step=[None if math.isnan(part) else int(part) for part in columns[STEP]],
        at=list(columns[AT]),
        min=[_json_number(part) for part in columns[MIN]],
        mean=[_json_number(part) for part in columns[MEAN]],
        max=[_json_number(part) for part in columns[MAX]],
        count=[int(part) for part in columns[COUNT]],
        bad=[int(part) for part in columns[BAD]],
    )


def _json_number(value: float) -> MetricValue:
    return value if math.isfinite(value) else str(value)


def newest_by_name(plane: Plane, uid: str) -> dict[str, float]:
    """The newest loss, tokens and round of an active training, and how its weights are followed, as
    far as they are known."""
    metric_store = plane.metrics
    if metric_store is None:
        return {}
    values: dict[str, float] = {}
    for name in ("loss", "tokens"):
        one = metric_store.first(uid, name)
        if one is not None and len(one):
            values[name] = one.columns[MEAN][-1]
    summary = metric_store.rounds.summary(uid)
    if summary is not None and summary.round is not None:
        values["round"] = float(summary.round)
    training = plane.informer.active.get(uid)
    if training is not None:
        channels = channels_of_training(plane, metric_store, training)
        values |= lag_of_channels(channels, training.name)
    return values


class MetricsStored(Model, frozen=True, omit_defaults=False):
    """How many of the batches in the request were new."""

    batches: int


async def report_metrics(call: ApiCall) -> Answer:
    """Stores the batches in the body, one a line. A batch that arrives twice counts once."""
    plane = call.plane
    owner = None
    if plane.report_key:
        owner = read_token(plane.report_key, token_of(call.request))
    if owner is None or plane.metrics is None:
        raise Denied("expected the token of a rank of this training")
    training = await plane.store.get((owner.namespace, call.name))
    if training.uid != owner.uid:
        raise NotFound("training", call.name)
    async with contextlib.AsyncExitStack() as turn:
        # Under a name of its own, so that metrics never delay the large bodies of users.
        body = await plane.bodies.read(
            call.request, f"metrics of {owner.namespace}", MAX_BATCH, turn
        )
        lines = [line for line in body.splitlines() if line]
        batches = await asyncio.to_thread(plane.metrics.take, training.uid, lines)
    return json_answer(MetricsStored(batches=batches))


# The outer rounds of a training, over HTTP.

MAX_ITEMS = 10_000  # of one answer: some 3 MB
FROM_STORE = "read from the manifests in the store"

RoundNumber = Annotated[int, Meta(ge=0, le=10**9)]


class RoundsQuery(Query, frozen=True, rename={"from_": "from"}):
    from_: RoundNumber = 0
    to: RoundNumber | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_ITEMS)] = MAX_ITEMS
    run: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    costs: bool = False
    uid: str | None = None


async def rounds(call: ApiCall) -> Answer:
    query: RoundsQuery = call.query
    training = await call.training()
    if call.plane.metrics is None:
        return json_answer(RoundList(items=[]))
    table = call.plane.metrics.rounds
    return json_answer(await asyncio.to_thread(_rounds, table, training, query))


def _rounds(table: RoundTable, training: Training, query: RoundsQuery) -> RoundList:
    uid = training.uid
    run = query.run or table.run_of(uid)
    source = describe_source(table.observation(uid))
    if run is None:
        return RoundList(items=[], summary=with_absent(table.summary(uid), training), why=source)
    return RoundList(
        items=select_rounds(table, uid, run, query),
        summary=with_absent(table.summary(uid, run), training),
        why=source,
        dropped=table.dropped(uid, run)[0],
    )


def describe_source(observation: StoreObservation | None) -> str:
    """Where the rounds come from, as text."""
    if observation is None:
        return "reported by the replicas: the store has not been read yet"
    return f"reported by the replicas: {observation.problem}" if observation.problem else FROM_STORE


def select_rounds(table: RoundTable, uid: str, run: str, query: RoundsQuery) -> list[RoundItem]:
    # Joins and departures show against the round before: read one more of each fragment.
    more = query.limit + len(table.newest(uid, run))
    stored = table.rounds(uid, run, max(0, query.from_ - 1), query.to, more)
    items = items_of(stored, has_costs=query.costs)
    return [item for item in items if item.round >= query.from_][-query.limit :]


async def summary_of_training(plane: Plane, uid: str) -> RoundSummary | None:
    """The summary of the rounds; None if there are none or they cannot be read now."""
    if plane.metrics is None:
        return None
    with contextlib.suppress(Temporary):
        return await asyncio.to_thread(plane.metrics.rounds.summary, uid)
    return None


# The weights that a training publishes or follows.


class WeightsQuery(Query, frozen=True):
    uid: str | None = None


async def weights(call: ApiCall) -> Answer:
    training = await call.training()
    metric_store = call.plane.metrics
    if metric_store is None:
        return json_answer(ChannelList(items=[]))
    if metric_store.catch_up is not None:
        await metric_store.catch_up(training)
    items = await asyncio.to_thread(channels_of_training, call.plane, metric_store, training)
    return json_answer(ChannelList(items=items))


def channels_of_training(
    plane: Plane, metric_store: MetricStore, training: Training
) -> list[Channel]:
    """With the followers and versions that other active trainings of its namespace report of the
    same channels. Those of ended ones are left out: a channel may have begun anew since."""
    if not metric_store.weights.uris(training.uid):  # a scrape asks for hundreds of trainings
        return []
    names = {
        each.uid: TrainingName(each.name, is_over=False)
        for each in list(plane.informer.active.values())  # the event loop changes it
        if each.namespace == training.namespace and not each.status.phase.is_terminal
    }
    names[training.uid] = TrainingName(training.name, training.status.phase.is_terminal)
    return metric_store.weights.channels(training.uid, names, time.time())
