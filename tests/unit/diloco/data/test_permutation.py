"""The shuffle is a permutation, for every length, seed and epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.diloco.data.permutation import indexes, shuffle


@given(st.integers(1, 700), st.integers(0, 2**63 - 1), st.integers(0, 5))
def test_every_index_comes_once(length: int, seed: int, epoch: int) -> None:
    assert sorted(shuffle(range(length), length, seed, epoch)) == list(range(length))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(shuffle(range(64), 64, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_the_order_is_the_same_everywhere_and_for_ever() -> None:
    """A run goes on with another version, on another machine, with the order it began with."""
    assert shuffle(range(8), 1000, 7, 0).tolist() == [733, 373, 196, 928, 504, 411, 150, 915]
    assert shuffle([10**12], 10**15, 7, 3).tolist() == [306478255142465]


def test_no_index_prefers_a_place() -> None:
    first = np.array([shuffle([0], 100, seed, 0)[0] for seed in range(4000)])
    counts = np.bincount(first, minlength=100)
    assert 40 * 0.35 < counts.min()
    assert counts.max() < 40 * 1.9


@pytest.mark.parametrize("is_shuffled", [True, False])
def test_positions_of_several_epochs_in_one_batch(is_shuffled: bool) -> None:
    line = list(range(30))
    out = indexes(line, 10, 3, is_shuffled=is_shuffled).tolist()
    assert [sorted(out[at : at + 10]) for at in (0, 10, 20)] == [list(range(10))] * 3
    assert indexes([25, 3, 14], 10, 3, is_shuffled=is_shuffled).tolist() == [
        out[25],
        out[3],
        out[14],
    ]
    if not is_shuffled:
        assert out == line[:10] * 3
