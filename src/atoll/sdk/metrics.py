"""What ranks reported, as a table of columns."""

from __future__ import annotations

import importlib
from typing import Any

from atoll.core.metrics import MetricSeriesList, MetricValue

COLUMNS = ("name", "rank", "process", "attempt", "step", "at", "value", "min", "max", "count")


class ColumnTable(dict[str, list[Any]]):
    """Columns of equal length, by name."""

    def to_pandas(self) -> Any:
        """A pandas DataFrame. Needs pandas."""
        return importlib.import_module("pandas").DataFrame(dict(self))

    def to_polars(self) -> Any:
        """A polars DataFrame. Needs polars."""
        return importlib.import_module("polars").DataFrame(dict(self), strict=False)


class MetricTable(ColumnTable):
    """Columns of equal length: `table["value"]` is a list. One row for each bucket.

    `value` is the mean of the `count` points that the row stands for. `skipped` figures were told
    and not kept, and `missed` batches of figures were lost before they were kept.
    """

    def __init__(self, answer: MetricSeriesList) -> None:
        super().__init__({name: [] for name in COLUMNS})
        self.skipped = answer.skipped
        self.missed = answer.missed
        for one in answer.items:
            length = len(one.at)
            self["name"] += [one.name] * length
            self["rank"] += [one.rank] * length
            self["process"] += [one.process] * length
            self["attempt"] += one.attempt
            self["step"] += one.step
            self["at"] += one.at
            self["value"] += map(_number, one.mean)
            self["min"] += map(_number, one.min)
            self["max"] += map(_number, one.max)
            self["count"] += [a + b for a, b in zip(one.count, one.bad, strict=True)]

    def __repr__(self) -> str:
        names = ", ".join(sorted(set(self["name"]))) or "nothing"
        return f"<SeriesTable of {names}: {len(self['at'])} rows>"


def _number(figure: MetricValue) -> float:
    return float(figure)
