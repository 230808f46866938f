"""A shuffle without a table: a keyed permutation of 0 … n-1 that any replica computes anywhere.

A balanced Feistel network over the next even number of bits, walked until the result is below n.
All integers, so the order does not depend on the machine or on a library's random numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Indexes = NDArray[np.int64]

ROUNDS = 6
_MIX = np.uint64(0x9E3779B97F4A7C15)


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    text = f"atoll-shuffle {seed} {epoch}".encode()
    raw = hashlib.blake2b(text, digest_size=8 * ROUNDS).digest()
    return tuple(int.from_bytes(raw[8 * i : 8 * i + 8], "little") for i in range(ROUNDS))


def _half_bits(length: int) -> int:
    """Bits of one half: 4 ** bits is at least `length`, and at most four times as much."""
    return max(1, (max(length - 1, 1).bit_length() + 1) // 2)


def shuffle(locations: Sequence[int] | Indexes, length: int, seed: int, epoch: int) -> Indexes:
    """Where each place of the epoch lies in data of `length`."""
    values = np.asarray(locations, np.uint64)
    half = np.uint64(_half_bits(length))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(key) for key in _keys(seed, epoch)]
    with np.errstate(over="ignore"):
        values = _feistel(values, half, mask, keys)
        outside = np.flatnonzero(values >= length)
        while outside.size:
            values[outside] = _feistel(values[outside], half, mask, keys)
            outside = outside[values[outside] >= length]
    return values.astype(np.int64)


def _feistel(
    values: NDArray[np.uint64], half: np.uint64, mask: np.uint64, keys: Sequence[np.uint64]
) -> NDArray[np.uint64]:
    left, right = values >> half, values & mask
    for key in keys:
        mixed = (right ^ key) * _MIX
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(32)
        left, right = right, left ^ (mixed & mask)
    return (left << half) | right


def indexes(
    positions: Sequence[int] | Indexes, length: int, seed: int, *, is_shuffled: bool
) -> Indexes:
    """The index in the data of each position of the line, which has epoch after epoch."""
    line = np.asarray(positions, np.int64)
    locations = line % length
    if not is_shuffled:
        return locations
    out = np.empty_like(locations)
    epochs = line // length
    for epoch in np.unique(epochs):
        of_epoch = epochs == epoch
        out[of_epoch] = shuffle(locations[of_epoch], length, seed, int(epoch))
    return out
