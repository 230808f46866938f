"""The weighted mean, in the order given: the same bits wherever it is computed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atoll.worker.allreduce.layout import Vector

BLOCK = 1 << 15  # elements; one block of sums stays in the cache


def weighted_mean(parts: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """Summed in float64 and rounded once, so within one unit in the last place of the true mean."""
    total = float(sum(weights))
    plain = all(weight == weights[0] for weight in weights)
    size = len(parts[0])
    out = np.empty(size, np.float32)
    sums = np.empty(min(size, BLOCK), np.float64)
    term = np.empty_like(sums)
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
        np.divide(acc, float(len(parts)) if plain else total, out=out[start:end], casting="unsafe")
    return out
