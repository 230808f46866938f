"""Series are bounded, and merging loses no outlier, no attempt and no count."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.metrics.series import (
    AT,
    ATTEMPT,
    BAD,
    COUNT,
    MAX,
    MEAN,
    MIN,
    STEP,
    Series,
    point_of,
)


def series_of(values: list[float], *, most: int, attempt: int = 1) -> Series:
    series = Series()
    for step, value in enumerate(values):
        series.add(point_of([float(step), step, value]), attempt, most)
    return series


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300),
    st.integers(min_value=16, max_value=40),
)
def test_whatever_is_merged_the_extremes_the_mean_and_the_count_stay(
    values: list[float], most: int
) -> None:
    series = series_of(values, most=most)
    columns = series.columns
    assert len(series) <= most
    assert sum(columns[COUNT]) == len(values)
    assert min(columns[MIN]) == min(values)
    assert max(columns[MAX]) == max(values)
    total = sum(mean * count for mean, count in zip(columns[MEAN], columns[COUNT], strict=True))
    assert total / len(values) == pytest.approx(math.fsum(values) / len(values), abs=1e-3)
    assert list(columns[STEP]) == sorted(columns[STEP])
    assert columns[AT][-1] == len(values) - 1


def test_a_single_outlier_among_thousands_is_seen() -> None:
    values = [1.0] * 10_000
    values[5_003] = 99.0
    series = series_of(values, most=100)
    assert len(series) <= 100
    assert max(series.columns[MAX]) == 99.0


def test_steps_that_repeat_after_a_restart_are_told_apart_by_attempt() -> None:
    series = series_of([3.0, 2.0], most=100)
    series.add(point_of([10.0, 0, 3.0]), 2, 100)
    assert list(series.columns[ATTEMPT]) == [1, 1, 2]
    assert list(series.columns[STEP]) == [0, 1, 0]
    for step in range(500):
        series.add(point_of([11.0 + step, step, 1.0]), 2, 16)
    assert set(series.columns[ATTEMPT]) == {1, 2}, "merging must not mix attempts"


def test_a_rank_that_is_restarted_for_ever_stays_bounded() -> None:
    series = Series()
    for attempt in range(1, 200):
        series.add(point_of([float(attempt), 0, 1.0]), attempt, 16)
    assert len(series) <= 16
    assert sum(series.columns[COUNT]) == 199


def test_values_that_are_not_finite_are_counted_and_shown_and_hide_no_other() -> None:
    series = Series()
    for at, value in enumerate(["nan", "inf", 2.0]):
        series.add(point_of([float(at), None, value]), 1, 100)
    means = list(series.columns[MEAN])
    assert math.isnan(means[0])
    assert means[1] == math.inf
    assert means[2] == 2.0
    series.halve()
    series.halve()
    assert sum(series.columns[BAD]) == 2
    assert series.columns[MEAN][-1] == 2.0
    assert math.isnan(series.columns[STEP][0])


def test_a_series_is_the_same_after_it_was_packed() -> None:
    series = series_of([float(n) for n in range(100)], most=20)
    again = Series.unpack(series.pack())
    assert again.columns == series.columns
    assert again.width == series.width


@pytest.mark.parametrize("parts", [[1.0], [1.0, 2], [1.0, 1, "word"], [0, 0, 1, 1, 1, -3, 0], []])
def test_what_is_no_point_is_refused(parts: list[object]) -> None:
    with pytest.raises(ValueError, match="point|convert"):
        point_of(parts)
