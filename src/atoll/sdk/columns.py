"""Metrics and outer rounds of a training as columns, ready for pandas and polars."""

from __future__ import annotations

import importlib
from typing import Any

from atoll.core.metrics import MetricSeriesList
from atoll.core.rounds import RoundItem, RoundList, RoundSummary

METRIC_COLUMNS = (
    "name", "rank", "process", "attempt", "step", "at", "value", "min", "max", "count"
)  # fmt: skip
ROUND_COLUMNS = tuple(name for name in RoundItem.__struct_fields__ if name != "costs")


class ColumnTable(dict[str, list[Any]]):
    """Columns of equal length, by name."""

    def to_pandas(self) -> Any:
        """A pandas DataFrame. Needs pandas."""
        return importlib.import_module("pandas").DataFrame(dict(self))

    def to_polars(self) -> Any:
        """A polars DataFrame. Needs polars."""
        return importlib.import_module("polars").DataFrame(dict(self), strict=False)


class MetricTable(ColumnTable):
    """What ranks reported: `table["value"]` is a list, with one row for each bucket of points.

    `value` is the mean of the `count` points in a bucket. The control plane dropped `skipped`
    metrics, and lost `missed` batches of them on the way.
    """

    def __init__(self, answer: MetricSeriesList, since: float | None = None) -> None:
        super().__init__({name: [] for name in METRIC_COLUMNS})
        self.skipped = answer.skipped
        self.missed = answer.missed
        for one in answer.items:
            start = 0 if since is None else sum(at < since for at in one.at)
            length = len(one.at) - start
            self["name"] += [one.name] * length
            self["rank"] += [one.rank] * length
            self["process"] += [one.process] * length
            self["attempt"] += one.attempt[start:]
            self["step"] += one.step[start:]
            self["at"] += one.at[start:]
            self["value"] += map(float, one.mean[start:])
            self["min"] += map(float, one.min[start:])
            self["max"] += map(float, one.max[start:])
            counts = zip(one.count[start:], one.bad[start:], strict=True)
            self["count"] += [finite + bad for finite, bad in counts]

    def __repr__(self) -> str:
        names = ", ".join(sorted(set(self["name"]))) or "nothing"
        return f"<MetricTable of {names}: {len(self['at'])} rows>"


class RoundTable(ColumnTable):
    """Outer rounds: `table["members"]` is a list of lists, with one row for each round of each
    fragment, in order.

    `why` says where the rounds come from, `summary` how far the run is (None before the first),
    and `dropped` how many of the oldest rounds are no longer stored.
    """

    def __init__(self, answer: RoundList, *, has_costs: bool = False) -> None:
        names = (*ROUND_COLUMNS, "costs") if has_costs else ROUND_COLUMNS
        super().__init__({name: [getattr(i, name) for i in answer.items] for name in names})
        self.why: str = answer.why
        self.summary: RoundSummary | None = answer.summary
        self.dropped: int = answer.dropped

    def __repr__(self) -> str:
        text = "no round yet" if self.summary is None else self.summary.words
        return f"<RoundTable: {text}>"
