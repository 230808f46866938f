"""The mean is the rounded true mean, for any values, weights and number of replicas."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.diloco.packing import Vector
from atoll.diloco.round.cells import BLOCK, WeightedMean


def weighted_mean(parts: list[Vector], weights: list[float]) -> Vector:
    out = np.empty_like(parts[0])
    WeightedMean(weights).write(parts, out)
    return out


FINITE = st.floats(-(2.0**100), 2.0**100, width=32)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 9), st.integers(1, 6))
def test_within_one_unit_in_the_last_place_of_the_true_mean(
    data: st.DataObject, replicas: int, size: int
) -> None:
    row = st.lists(FINITE, min_size=size, max_size=size)
    parts = [np.array(data.draw(row), np.float32) for _ in range(replicas)]
    weights = [data.draw(st.sampled_from([1.0, 1.0, 3.0, 0.5])) for _ in range(replicas)]
    mean = weighted_mean(parts, weights)
    for at in range(size):
        values = [Fraction(float(part[at])) for part in parts]
        true = sum(Fraction(w) * v for w, v in zip(weights, values, strict=True))
        true /= sum(Fraction(w) for w in weights)
        # Where the terms cancel, the sum's own rounding is all that is left.
        noise = float(max(map(abs, values))) * 2**-50
        assert abs(float(mean[at]) - float(true)) <= np.spacing(np.float32(abs(true))) + noise


def test_blocks_change_nothing() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.standard_normal(3 * BLOCK + 5).astype(np.float32) for _ in range(4)]
    for weights in ([1.0] * 4, [1.0, 2.0, 0.25, 7.0]):
        complete = weighted_mean(parts, weights)
        cut = [
            weighted_mean([p[i : i + 999] for p in parts], weights)
            for i in range(0, 3 * BLOCK + 5, 999)
        ]
        assert complete.tobytes() == np.concatenate(cut).tobytes()
        one_by_one = np.empty_like(complete)
        WeightedMean(weights).write(iter(parts), one_by_one)
        assert complete.tobytes() == one_by_one.tobytes()
        assert complete.tobytes() == in_order(parts, weights).tobytes()


def in_order(parts: list[Vector], weights: list[float]) -> Vector:
    """As every release has summed: in float64, one part after the other, rounded once."""
    sums = np.zeros(parts[0].size)
    for part, weight in zip(parts, weights, strict=True):
        sums += part.astype(np.float64) * weight
    return (sums / sum(weights)).astype(np.float32)


def test_huge_and_tiny_weights_weigh_as_they_should() -> None:
    parts = [np.full(2, value, np.float32) for value in (1.0, 4.0)]
    for unit in (8e307, 5e-324, 1.0):
        assert weighted_mean(parts, [2 * unit, unit]).tolist() == [2.0, 2.0]
    assert weighted_mean(parts, [1.0, 1e-30]).tolist() == [1.0, 1.0]
