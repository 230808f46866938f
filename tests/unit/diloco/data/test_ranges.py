"""Ranges against plain sets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.diloco.data import ranges

SETS = st.sets(st.integers(0, 60))


@given(SETS, SETS, st.integers(0, 70))
def test_every_operation_is_that_of_sets(one: set[int], other: set[int], count: int) -> None:
    a, b = ranges.of(one), ranges.of(other)
    assert ranges.is_well_formed(a)
    for result, expected in (
        (a, one),
        (ranges.union(a, b), one | other),
        (ranges.minus(a, b), one - other),
        (ranges.common(a, b), one & other),
        (ranges.take(a, count)[0], set(sorted(one)[:count])),
        (ranges.take(a, count)[1], set(sorted(one)[count:])),
        (ranges.below(a, count), {at for at in one if at < count}),
    ):
        assert ranges.positions(result) == sorted(expected)
        assert ranges.is_well_formed(result)
        assert ranges.size(result) == len(expected)
    assert ranges.is_inside(a, b) == (one <= other)


def test_ten_thousand_ranges_are_joined_at_once() -> None:
    parts = [tuple((i * 10 + k, i * 10 + k + 1) for i in range(2500)) for k in (0, 2, 4, 6)]
    assert len(ranges.union(*parts)) == 10_000
