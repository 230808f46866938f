"""int8 with one scale for each block of 256 values: about 7.6 bits a value."""

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

BLOCK = 256
_TINY = np.finfo(np.float32).tiny
# Rounded down, so that 127 times the scale is still finite.
_LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))


class Int8:
    """The error of a value is at most half of 1/127 of the largest in its block.

    A block whose largest magnitude is below 127 times the smallest normal float becomes zeros.
    """

    name = "int8"
    is_exact = False
    needs_finite = True

    def encode(self, values: Floats) -> bytes:
        row = check_values(values, self.name)
        scales = np.empty(-(-row.size // BLOCK), np.float32)
        codes = np.empty(row.size, np.int8)
        for start in range(0, row.size, SLICE):
            part = blocks(row[start : start + SLICE], BLOCK)
            scale = np.abs(part).max(axis=1) / np.float32(127)
            scale = np.where(scale < _TINY, 0, np.minimum(scale, _LARGEST_SCALE))
            scales[start // BLOCK :][: scale.size] = scale
            # Divided, not multiplied by the inverse: the inverse of a small scale overflows.
            code = part / np.where(scale > 0, scale, np.float32(np.inf))[:, None]
            codes[start : start + SLICE] = np.rint(code).reshape(-1)[: row.size - start]
        parts = [scales.astype("<f4", copy=False).tobytes(), squeeze(codes.view(np.uint8))]
        return pack(b"int8", row.size, parts)

    def decode(self, data: Data, size: int) -> Floats:
        plain, coded = unpack(b"int8", data, size, 2)
        if len(plain) != 4 * -(-size // BLOCK):
            raise ValueError(f"{len(plain)} bytes of scales do not fit {size} values")
        scales = np.frombuffer(plain, "<f4").astype(np.float32, copy=False)
        if not ((scales >= 0) & (scales <= _LARGEST_SCALE)).all():
            raise ValueError("a scale is not one this codec writes")
        codes = unsqueeze_exactly(coded, size).view(np.int8)
        return scaled(codes, scales, BLOCK)
