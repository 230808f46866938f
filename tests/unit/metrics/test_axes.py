"""Points of a series over steps, tokens and rounds."""

from __future__ import annotations

import math

from atoll.metrics.axes import AxisSource, positions
from atoll.metrics.series import Series, band_of, point_of


def series_of(*points: tuple[float, int | None, float], attempt: int = 0) -> Series:
    series = Series()
    for point in points:
        series.add(point_of(point), attempt, 1000)
    return series


def test_a_later_attempt_replaces_the_steps_that_it_repeats() -> None:
    series = series_of((0.0, 1, 4.0), (1.0, 2, 3.0), (2.0, 3, 2.0))
    for point in ((10.0, 2, 2.9), (11.0, 3, 1.9)):
        series.add(point_of(point), 1, 1000)
    placed = positions(series, AxisSource("step"))
    assert [None if at != at else at for at in placed] == [1, None, None, 2, 3]
    band = band_of([series], 1.0, 3.0, 3, [placed])
    assert band.mean == [4.0, 2.9, 1.9]


def test_a_metric_without_steps_takes_those_of_the_loss_of_its_rank() -> None:
    memory = series_of((0.5, None, 7.0), (2.5, None, 8.0))
    loss = series_of((1.0, 10, 3.0), (2.0, 20, 2.0))
    first, second = positions(memory, AxisSource("step", steps=loss))
    assert math.isnan(first)
    assert second == 20


def test_tokens_of_single_reports_are_added_up_and_totals_are_taken_as_they_are() -> None:
    loss = series_of((1.0, 1, 3.0), (2.0, 2, 2.0))
    each = series_of((1.0, 1, 100.0), (2.0, 2, 100.0))
    totals = series_of((1.0, 1, 100.0), (2.0, 2, 250.0))
    assert positions(loss, AxisSource("tokens", tokens=each)) == [100.0, 200.0]
    assert positions(loss, AxisSource("tokens", tokens=totals)) == [100.0, 250.0]
    assert all(map(math.isnan, positions(loss, AxisSource("tokens"))))


def test_a_point_between_two_commits_is_between_two_rounds() -> None:
    loss = series_of((0.0, 1, 3.0), (5.0, 2, 2.0), (10.0, 3, 2.0), (15.0, 4, 1.0), (90.0, 5, 1.0))
    source = AxisSource("round", commits=[10.0, 20.0])
    assert positions(loss, source) == [0.0, 0.5, 1.0, 1.5, 2.999]
    assert all(map(math.isnan, positions(loss, AxisSource("round"))))
