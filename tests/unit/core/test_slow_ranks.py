"""Slow ranks, and what they spend their time on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from atoll.core.rounds import RoundCost
from atoll.core.slow_ranks import slow_ranks


def costs(
    rank: int, trained: Sequence[float], data: float | None = None, blocked_s: float = 0.0
) -> list[RoundCost]:
    """Rounds of ten steps: the seconds of each, and the share of them that went into data."""
    return [
        RoundCost(
            rank,
            0,
            0,
            0,
            0.0,
            blocked_s,
            steps=10,
            train_s=seconds,
            data_s=None if data is None else data * seconds,
        )
        for seconds in trained
    ]


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ([[1, 1, 1], [1, 1, 1]], {}),
        ([[1, 1, 1], [1.4, 1.4, 1.4]], {}),
        ([[1, 1, 1], [2, 2, 2]], {1: 2.0}),
        ([[1, 1, 1], [1, 1, 1], [1.1, 1.1, 1.1], [3, 3, 3]], {3: 3.0}),
        ([[1, 1, 1], [1, 1, 1], [2, 2, 2], [4, 4, 4]], {3: 4.0, 2: 2.0}),
        ([[1] * 5, [1] * 5, [1, 9, 1, 9, 1]], {}),  # two bad rounds of five
        ([[1, 1, 1], [9, 9]], {}),  # too few rounds
        ([[9, 9, 9]], {}),  # nobody to compare with
        ([[1, 1, 1], [0, 0, 0]], {}),  # a rank that reports no times
    ],
)
def test_ranks_far_above_the_median_are_slow(
    seconds: list[list[float]], slow: dict[int, float]
) -> None:
    found = slow_ranks({rank: costs(rank, own) for rank, own in enumerate(seconds)})
    assert {each.rank: pytest.approx(each.factor) for each in found} == slow
    assert [each.rank for each in found] == list(slow)


@pytest.mark.parametrize(
    ("data", "blocked_s", "shares"),
    [
        (0.875, 0.0, "88% data, 12% compute, 0% waiting for rounds"),
        (0.0, 0.5, "80% compute, 20% waiting for rounds, 0% data"),
        (None, 0.5, "80% data and compute, 20% waiting for rounds"),
    ],
)
def test_a_slow_rank_says_where_its_time_goes(
    data: float | None, blocked_s: float, shares: str
) -> None:
    recent = {0: costs(0, [1, 1, 1]), 3: costs(3, [2, 2, 2], data, blocked_s)}
    (slow,) = slow_ranks(recent)
    assert slow.message == f"rank 3 is slow: 2.0x the median step time ({shares})"
    assert slow.step_s == 0.2
    assert (slow.data or 0.0) + slow.compute + slow.waiting == pytest.approx(1.0)
    assert (slow.data is None) == (data is None)
