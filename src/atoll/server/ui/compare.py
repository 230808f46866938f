"""What the compare page reads: a row for each training, and one metric of each as a line."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from atoll.core.errors import NotFound, ValidationError
from atoll.core.metrics import MetricValue
from atoll.core.model import Model
from atoll.core.settings import name_label, setting_text
from atoll.core.status import Training
from atoll.metrics.axes import Axis
from atoll.metrics.series import MAX, MEAN, MIN, Series
from atoll.metrics.store import MetricStore
from atoll.server.http.operations import Answer, ApiCall, Query, json_answer, with_staleness
from atoll.server.ui.page import spec_of
from atoll.server.ui.rows import TrainingRow, row_of
from atoll.server.ui.views import PlacedSeries

MAX_RUNS = 200  # rows of one page; an address of 200 names is some 8 kB, what servers take
MAX_METRICS = 40  # of one training: the columns that a person picks from
BINS = 400  # points of a line: a chart is some 1,300 px wide
# In names of metrics of which less is better; of any other, and of what is "per" time, more is.
LESS_IS_BETTER = ("loss", "perplexity", "ppl", "error", "mae", "mse", "bpb", "seconds", "time")


class CompareQuery(Query, frozen=True):
    t: list[str] = []
    name: Annotated[str, Meta(max_length=200)] = "loss"
    x: Axis = "step"


class ComparedMetric(Model, frozen=True, omit_defaults=False):
    """One metric of the lowest rank that reports it."""

    last: MetricValue
    best: MetricValue


class ComparedLine(Model, frozen=True, omit_defaults=False):
    """The mean of all ranks; positions of the time axis are seconds since the first point."""

    at: list[float]
    mean: list[MetricValue]
    unplaced: int  # points that have no position on the axis


class ComparedRun(Model, frozen=True, omit_defaults=False):
    name: str
    row: TrainingRow
    settings: dict[str, str]
    fields: dict[str, str]
    metrics: dict[str, ComparedMetric]
    line: ComparedLine | None


class Comparison(Model, frozen=True, omit_defaults=False):
    runs: list[ComparedRun]
    missing: list[str]  # names without a training
    left_out: list[str]  # names beyond the limit
    now: float


async def compare(call: ApiCall) -> Answer:
    query: CompareQuery = call.query
    names = list(dict.fromkeys(query.t))
    trainings: list[Training] = []
    missing: list[str] = []
    for name in names[:MAX_RUNS]:
        try:
            training = await call.plane.store.get((call.namespace, name_label("t", name)))
        except (NotFound, ValidationError):
            missing.append(name)
            continue
        trainings.append(with_staleness(training, call.plane.setup.stale()))
    runs = await asyncio.to_thread(
        lambda: [_run(training, call.plane.metrics, query) for training in trainings]
    )
    now = call.plane.clock().wall
    return json_answer(Comparison(runs=runs, missing=missing, left_out=names[MAX_RUNS:], now=now))


def _run(training: Training, metric_store: MetricStore | None, query: CompareQuery) -> ComparedRun:
    spec = spec_of(training)
    argv = [*(spec.pop("command", None) or ()), *(spec.pop("args", None) or ())]
    for name in ("name", "displayName", "settings"):
        spec.pop(name, None)
    metrics: dict[str, ComparedMetric] = {}
    line = None
    if metric_store is not None:
        names = sorted({name for _, _, name in metric_store.keys(training.uid)})
        series = {name: metric_store.first(training.uid, name) for name in names[:MAX_METRICS]}
        metrics = {name: _summary(name, one) for name, one in series.items() if one is not None}
        line = _line(PlacedSeries.of(metric_store, training.uid, query.name, query.x), query.x)
    return ComparedRun(
        name=training.name,
        row=row_of(training),
        settings={name: setting_text(value) for name, value in training.settings.items()},
        fields={"command": " ".join(program_of(argv)), **flatten(spec)},
        metrics=metrics,
        line=line,
    )


def _summary(name: str, series: Series) -> ComparedMetric:
    columns = series.columns
    return ComparedMetric(
        last=_json_number(columns[MEAN][-1]), best=_json_number(best_of(name, columns))
    )


def best_of(name: str, columns: Sequence[Sequence[float]]) -> float:
    """The least value of a loss and the like, the largest of anything else."""
    is_rate = "per_" in name or name.endswith("/s")
    is_less = not is_rate and any(part in name.lower() for part in LESS_IS_BETTER)
    values = [value for value in columns[MIN if is_less else MAX] if value == value]
    return (min if is_less else max)(values, default=float("nan"))


def _json_number(value: float) -> MetricValue:
    return value if abs(value) < float("inf") else str(value)


def _line(placed: PlacedSeries, axis: Axis) -> ComparedLine | None:
    extent = placed.extent()
    if extent is None:
        return None
    band = placed.band("", None, *extent, BINS)
    origin = extent[0] if axis == "time" else 0.0
    return ComparedLine(at=[at - origin for at in band.at], mean=band.mean, unplaced=band.unplaced)


def program_of(argv: Sequence[str]) -> list[str]:
    """A command without its flags and their values: those are settings."""
    program: list[str] = []
    is_value = False  # the next word may be the value of a flag
    for argument in argv:
        is_flag = (
            argument.startswith("-") and not argument[1:2].isdigit() and argument.strip("-") != ""
        )
        if not is_flag and not is_value and "=" not in argument:
            program.append(argument)
        is_value = is_flag and "=" not in argument
    return program


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested fields as `world.target`, with their values as text."""
    flat: dict[str, str] = {}
    for key, each in value.items():
        if isinstance(each, Mapping):
            flat |= flatten(each, f"{prefix}{key}.")
        elif isinstance(each, list):
            flat[prefix + key] = " ".join(map(str, each))
        else:
            flat[prefix + key] = (
                each if isinstance(each, str) else msgspec.json.encode(each).decode()
            )
    return flat
