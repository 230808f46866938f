"""Bands over ranks: the outlier of one rank stays, and gaps stay gaps."""

from __future__ import annotations

import math

from atoll.metrics.series import Series, band_of, point_of


def series_of(points: dict[float, object]) -> Series:
    series = Series()
    for at, value in points.items():
        series.add(point_of([at, None, value]), 1, 1000)
    return series


def test_a_band_has_the_extremes_the_mean_and_the_count_of_ranks() -> None:
    ranks = [series_of({0.0: 1.0, 10.0: float(n)}) for n in range(11)]
    band = band_of(ranks, 0.0, 10.0, 10)
    assert band.ranks == [11, 11]
    assert (band.low[-1], band.mean[-1], band.high[-1]) == (0.0, 5.0, 10.0)
    assert (band.p10[-1], band.p90[-1]) == (1.0, 9.0)


def test_bins_without_points_are_left_out_and_others_outside_are_not_seen() -> None:
    band = band_of([series_of({0.0: 1.0, 5.0: 2.0, 99.0: 3.0})], 0.0, 10.0, 10)
    assert len(band.at) == 2
    assert max(band.high) == 2.0


def test_values_that_are_not_finite_are_counted_and_do_not_spoil_the_mean() -> None:
    band = band_of([series_of({1.0: "nan", 2.0: 4.0, 3.0: "inf"})], 0.0, 10.0, 1)
    assert band.mean == [4.0]
    assert band.bad == 2


def test_ranks_with_a_point_a_bin_are_drawn_as_ranks_with_several() -> None:
    single = [series_of({float(at): at * rank for at in range(10)}) for rank in range(5)]
    double = [series_of({at / 2: (at // 2) * rank for at in range(20)}) for rank in range(5)]
    assert band_of(single, 0.0, 10.0, 10) == band_of(double, 0.0, 10.0, 10)
    with_gap = [
        series_of({**{float(at): at * rank for at in range(10)}, 99.0: 1.0}) for rank in range(5)
    ]
    assert band_of(single, 0.0, 10.0, 10) == band_of(with_gap, 0.0, 10.0, 10)


def test_the_mean_does_not_jump_with_whoever_has_told_something_in_a_bin() -> None:
    """Four ranks that tell a value a second, each at its own time, and bins of a tenth of that."""
    ranks = [series_of({at + n / 4: 100.0 * n for at in range(100)}) for n in range(4)]
    band = band_of(ranks, 0.0, 100.0, 1000)
    assert set(band.ranks) == {4}
    assert set(band.mean) == {150.0}
    assert len(band.at) >= 40, "no coarser than that"


def test_a_line_breaks_where_nothing_was_told_for_long_and_where_an_attempt_begins() -> None:
    paused = series_of({float(at): 1.0 for at in [*range(50), *range(150, 200)]})
    band = band_of([paused], 0.0, 200.0, 200)
    (gap,) = [at for at, mean in zip(band.at, band.mean, strict=True) if math.isnan(mean)]
    assert 49 < gap < 150
    assert band.at == sorted(band.at)
    restarted = Series()
    for at in range(20):
        restarted.add(point_of([float(at), None, float(at % 10)]), 1 + at // 10, 1000)
    band = band_of([restarted], 0.0, 20.0, 20)
    (gap,) = [at for at, mean in zip(band.at, band.mean, strict=True) if math.isnan(mean)]
    assert 9 < gap < 11
    assert not any(map(math.isnan, band_of([restarted] * 2, 0.0, 20.0, 20).mean))
