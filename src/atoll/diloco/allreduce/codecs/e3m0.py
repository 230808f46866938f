"""E3M0: a sign and one of seven powers of two, or zero; Huffman coded to about 3.6 bits a value.

Each value becomes the nearest power of two. In a block of 256 the largest exponent is kept in one
byte, and a value is its sign and how many octaves it lies below: 0 to 6, or zero. Rounding is
integer arithmetic on the bits of the floats, so it is the same on every machine.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.diloco.allreduce.codecs.frame import (
    SLICE,
    Data,
    Floats,
    blocks,
    check_values,
    pack,
    squeeze,
    unpack,
    unsqueeze_exactly,
)

BLOCK = 256
OCTAVES = 7
_SIGN = 8
_LARGEST = 254  # the biased exponent of the largest finite power of two

# Octaves below the block's largest -> code. One octave too low is nearer to the last level than
# to zero. A code is 1 + octaves, and 0 is zero.
_CODES = np.zeros(256, np.uint8)
_CODES[: OCTAVES + 1] = [*range(1, OCTAVES + 1), OCTAVES]


class E3m0:
    """Values are off by at most a third, or by 1/76 of the largest in their block if that is more.

    Subnormal results become zero; what rounds beyond 2**127 becomes 2**127. Meant for error
    feedback: alone, the rounding does cost.
    """

    name = "e3m0"
    is_exact = False
    needs_finite = True

    def encode(self, values: Floats) -> bytes:
        row = check_values(values, self.name)
        largest = np.empty(-(-row.size // BLOCK), np.uint8)
        pairs = np.empty((row.size + 1) // 2, np.uint8)
        for start in range(0, row.size, SLICE):
            part = blocks(row[start : start + SLICE].view(np.uint32), BLOCK)
            top, codes = _codes(part)
            largest[start // BLOCK :][: top.size] = top
            pair = codes[0::2] | codes[1::2] << 4
            pairs[start // 2 :][: SLICE // 2] = pair[: pairs.size - start // 2]
        return pack(b"e3m0", row.size, [squeeze(largest), squeeze(pairs)])

    def decode(self, data: Data, size: int) -> Floats:
        coded_largest, coded_pairs = unpack(b"e3m0", data, size, 2)
        largest = unsqueeze_exactly(coded_largest, -(-size // BLOCK))
        pairs = unsqueeze_exactly(coded_pairs, (size + 1) // 2)
        out = np.empty(size, np.float32)
        for start in range(0, size, SLICE):
            part = blocks(pairs[start // 2 :][: SLICE // 2], BLOCK // 2)
            values = _values(part, largest[start // BLOCK :][: len(part)])
            out[start : start + SLICE] = values[: size - start]
        return out


def _codes(bits: NDArray[np.uint32]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The largest exponent of each block, and the code of every value."""
    # Adding half a mantissa carries into the exponent from 1.5 on: the nearest power of two.
    rounded = ((bits & np.uint32(0x7FFFFFFF)) + np.uint32(0x400000)) >> np.uint32(23)
    exponents = np.minimum(rounded, _LARGEST).astype(np.uint8)
    top = exponents.max(axis=1)
    codes = _CODES[top[:, None] - exponents]
    codes *= exponents > 0
    signs = (bits >> np.uint32(28)).astype(np.uint8) & np.uint8(_SIGN)
    codes |= signs * (codes > 0)
    return top, codes.reshape(-1)


def _values(pairs: NDArray[np.uint8], largest: NDArray[np.uint8]) -> Floats:
    codes = np.empty((len(pairs), BLOCK), np.uint8)
    codes[:, 0::2] = pairs & np.uint8(15)
    codes[:, 1::2] = pairs >> np.uint8(4)
    # A block has only 256 exponents and 16 codes, so one table gives the bits of all.
    at = largest.astype(np.uint16)[:, None] << np.uint16(4) | codes
    return np.asarray(_FLOATS[at].reshape(-1))


def _table() -> Floats:
    largest, code = np.divmod(np.arange(256 * 16, dtype=np.int64), 16)
    octaves = (code & 7) - 1
    exponent = np.where(octaves >= 0, np.minimum(largest, _LARGEST) - octaves, 0).clip(0)
    bits = exponent << 23 | np.where(exponent > 0, (code & _SIGN) << 28, 0)
    return bits.astype(np.uint32).view(np.float32)


_FLOATS = _table()
