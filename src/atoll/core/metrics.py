"""Metrics as clients read them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from atoll.core.errors import ValidationError
from atoll.core.model import Model
from atoll.core.text import escape_control

# Names of what is measured from outside of a rank begin with this.
MACHINE = "machine/"

# Bounds of what ranks may send: beyond them numbers cannot be stored, shown or added up.
MAX_COUNT = 2**53  # whole numbers to there are exact in every language that reads them
MAX_TIME = 253_402_300_799.0  # the end of the year 9999, the last that a date can have

MAX_LISTED = 20  # names in an error: two lines of a terminal

MetricValue = float | str  # `nan`, `inf` and `-inf` are text


def check_names(training: str, names: Iterable[str], reported: Iterable[str]) -> None:
    """Raises ValidationError for the first name that a training which reports metrics does not."""
    known = sorted(set(reported))
    for name in names:
        if known and name not in known:
            listed = ", ".join(escape_control(each) for each in known[:MAX_LISTED])
            more = f" and {len(known) - MAX_LISTED} more" if len(known) > MAX_LISTED else ""
            raise ValidationError("metric", name, f"{training} has reported {listed}{more}")


class RankUsage(NamedTuple):
    """What a rank uses of its machine: `cpu` in cores, `memory` in bytes, and so on."""

    rank: int
    attempt: int
    values: dict[str, float]


class MetricSeries(Model, frozen=True, omit_defaults=False):
    """One name of one rank over time, as columns.

    Each entry stands for `count` points, which it merges, and `bad` more that were not finite.
    """

    name: str
    rank: int
    process: int
    attempt: list[int]
    step: list[int | None]
    at: list[float]
    min: list[MetricValue]
    mean: list[MetricValue]
    max: list[MetricValue]
    count: list[int]
    bad: list[int]


class MetricSeriesList(Model, frozen=True, omit_defaults=False):
    """The series of a training, in order of name and rank."""

    items: list[MetricSeries]
    skipped: int = 0  # metrics that were reported and not stored
    missed: int = 0  # batches of metrics that were lost before they were stored


class LatestMetric(Model, frozen=True, omit_defaults=False):
    """What a training reported last under one name: by the lowest rank that reports it."""

    training: str
    uid: str
    name: str
    value: MetricValue
    step: int | None
    at: float
    min: MetricValue = "nan"  # of all that the training reported
    max: MetricValue = "nan"
    spark: list[MetricValue] = []  # the way there, in a few points
    ranks: dict[str, MetricValue] = {}  # of each rank, if the query asks for that


class LatestMetricList(Model, frozen=True, omit_defaults=False):
    items: list[LatestMetric]
