"""The weighted mean, in the order given: the same bits wherever it is computed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from atoll.diloco.allreduce.layout import Vector

BLOCK = 1 << 15  # elements; one block of sums stays in the cache


def weighted_mean(parts: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """Summed in float64 and rounded once, so within one unit in the last place of the true mean."""
    plain = all(weight == weights[0] for weight in weights)
    # By a power of two, which changes no bits: sums of huge or tiny weights would be infinite or 0.
    _, exponent = math.frexp(max(weights))
    weights = [math.ldexp(weight, -exponent) for weight in weights]
    total = sum(weights)
    size = len(parts[0])
    out = np.empty(size, np.float32)
    sums = np.empty(min(size, BLOCK), np.float64)
    term = np.empty_like(sums)
    with np.errstate(invalid="ignore", over="ignore"):  # infinity and its opposite make a NaN
        for start in range(0, size, BLOCK):
            end = min(start + BLOCK, size)
            acc, scaled = sums[: end - start], term[: end - start]
            acc.fill(0.0)
            for part, weight in zip(parts, weights, strict=True):
                if plain:
                    np.add(acc, part[start:end], out=acc)
                else:
                    np.multiply(part[start:end], weight, out=scaled, dtype=np.float64)
                    np.add(acc, scaled, out=acc)
            count = float(len(parts)) if plain else total
            np.divide(acc, count, out=out[start:end], casting="unsafe")
    return out
