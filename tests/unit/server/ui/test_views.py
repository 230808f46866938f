"""Ranks are chosen by ranges, and told apart only where they differ."""

from __future__ import annotations

import pytest

from atoll.core.errors import ValidationError
from atoll.metrics.series import Series, point_of
from atoll.metrics.store import LabeledSeries
from atoll.server.ui.views import MAX_RANKS, furthest, parse_ranks


def one(rank: int, value: object) -> LabeledSeries:
    series = Series()
    series.add(point_of([1.0, None, value]), 1, 10)
    return LabeledSeries(rank, 0, "loss", series)


def test_ranks_are_named_by_ranges() -> None:
    assert parse_ranks("3") == {3}
    assert parse_ranks("1-3, 7") == {1, 2, 3, 7}


@pytest.mark.parametrize("text", ["", "a", "3-", "-3", "5-3", "1,,2", "0-1000", "9" * 30, "٣x"])
def test_what_is_no_range_or_too_many_is_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        parse_ranks(text)
    assert len(parse_ranks(f"0-{MAX_RANKS - 1}")) == MAX_RANKS


def test_the_ranks_furthest_from_the_mean_and_none_if_all_are_alike() -> None:
    assert furthest([one(rank, 1.0) for rank in range(5)], 2) == []
    ranks = [one(rank, 1.0) for rank in range(5)] + [one(7, 9.0), one(8, -4.0), one(9, "nan")]
    assert furthest(ranks, 2) == [7, 8]
    assert furthest(ranks, 0) == []
    assert furthest([one(0, 3.0)], 2) == []
