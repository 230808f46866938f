"""The list of metrics of a training."""

from __future__ import annotations

from math import inf, nan

from atoll.cli.metrics import _overview
from atoll.core.metrics import MetricSeriesList
from atoll.sdk.training import MetricTable


def rows(*values: float) -> MetricTable:
    count = len(values)
    table = MetricTable(MetricSeriesList(items=[]))
    table["name"] = ["loss"] * count
    table["rank"] = [0] * count
    table["step"] = list(range(count))
    table["at"] = [float(at) for at in range(count)]
    table["value"] = table["min"] = table["max"] = list(values)
    table["count"] = [1] * count
    return table


def test_a_value_that_is_no_number_is_neither_the_lowest_nor_the_highest() -> None:
    assert _overview(rows(nan, 3.0, inf, 1.0)).splitlines()[1].split() == [
        *("loss", "1", "3", "1", "3", "1", "4")
    ]
    assert _overview(rows(2.0, nan)).splitlines()[1].split()[1:5] == ["nan", "1", "2", "2"]
    assert _overview(rows(nan)).splitlines()[1].split()[3:5] == ["nan", "nan"]
