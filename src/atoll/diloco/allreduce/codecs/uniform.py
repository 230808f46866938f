"""Evenly spaced levels, Huffman coded: the least error there is for the bits, short of vectors.

The step is a fixed part of the block's root mean square, so a codec has about the same bits and
the same error whatever the data: with `step` 0.25, 4 bits and 7 % of the root mean square.
"""

from __future__ import annotations

import numpy as np

from atoll.diloco.allreduce.codecs.frame import (
    SLICE,
    Data,
    Floats,
    blocks,
    check_values,
    pack,
    scaled,
    squeeze,
    unpack,
    unsqueeze_exactly,
)

BLOCK = 512
_MOST = 127


class Uniform:
    """A value is off by at most half a step, unless it is more than 127 steps from zero.

    A block whose step would be below the smallest normal float becomes zeros.
    """

    is_exact = False
    needs_finite = True

    def __init__(self, name: str, step: float) -> None:
        self.name = name
        self._step = step
        self._tag = name.encode().ljust(4)

    def encode(self, values: Floats) -> bytes:
        row = check_values(values, self.name)
        scales = np.empty(-(-row.size // BLOCK), np.uint16)
        codes = np.empty(row.size, np.int8)
        for start in range(0, row.size, SLICE):
            part = blocks(row[start : start + SLICE], BLOCK)
            scale = _bf16_bits(part, self._step)
            scales[start // BLOCK :][: scale.size] = scale
            step = _floats(scale)
            # Divided, not multiplied by the inverse: the inverse of a small step overflows.
            code = np.rint(part / np.where(step > 0, step, np.float32(np.inf))[:, None])
            codes[start : start + SLICE] = code.clip(-_MOST, _MOST).reshape(-1)[: row.size - start]
        halves = scales.astype("<u2").view(np.uint8).reshape(-1, 2)
        parts = [squeeze(halves[:, 0]), squeeze(halves[:, 1]), squeeze(codes.view(np.uint8))]
        return pack(self._tag, row.size, parts)

    def decode(self, data: Data, size: int) -> Floats:
        *coded, coded_codes = unpack(self._tag, data, size, 3)
        count = -(-size // BLOCK)
        low, high = (unsqueeze_exactly(each, count).astype(np.uint16) for each in coded)
        steps = _floats(low | high << np.uint16(8))
        if not ((steps >= 0) & (steps <= _LARGEST)).all():
            raise ValueError("a step is not one this codec writes")
        codes = unsqueeze_exactly(coded_codes, size).view(np.int8)
        return scaled(codes, steps, BLOCK)


# 128 times this is still finite.
_LARGEST = np.float32(2.0**120)


def _bf16_bits(part: Floats, step: float) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """`step` times the root mean square of each row, as the upper half of a float."""
    # Scaled by the largest before squaring: squares of small values would vanish.
    top = np.abs(part).max(axis=1)
    safe = np.where(top > 0, top, np.float32(1))
    scaled = part / safe[:, None]
    mean_square = np.einsum("ij,ij->i", scaled, scaled, dtype=np.float32) / np.float32(BLOCK)
    wanted = np.minimum(np.sqrt(mean_square) * np.float32(step) * top, _LARGEST)
    wanted = np.where(wanted < np.finfo(np.float32).tiny, np.float32(0), wanted)
    return (wanted.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _floats(upper: np.ndarray[tuple[int], np.dtype[np.uint16]]) -> Floats:
    return (upper.astype(np.uint32) << np.uint32(16)).view(np.float32)
