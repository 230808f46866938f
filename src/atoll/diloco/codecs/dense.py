"""The codecs that send every value: fp32, bf16, int8, the uniform int5, int4 and int3, and e3m0.

fp32 sends the bytes as they are. The others round each value and Huffman code the result; int8,
the uniform codecs and e3m0 round relative to a scale that a block of values shares. The classes
say how each one rounds and how large its error is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.diloco.codecs import Codec
from atoll.diloco.codecs.frame import (
    SLICE,
    Data,
    Floats,
    as_row,
    blocks,
    check_values,
    pack,
    scaled,
    unpack,
)
from atoll.objectstore.entropy import squeeze, unsqueeze_exactly

_LARGEST_BF16 = np.uint32(0x7F7F)
_INFINITE = np.uint32(0x7F800000)


class Fp32(Codec):
    """The bytes of the values, NaN and infinity included; no header, so offsets are plain."""

    is_exact = True
    needs_finite = False

    def encode(self, values: Floats) -> bytes:
        return as_row(values).astype("<f4", copy=False).tobytes()

    def decode(self, data: Data, size: int) -> Floats:
        view = memoryview(data).cast("B")
        if len(view) != 4 * size:
            raise ValueError(f"expected {4 * size} bytes of fp32, found {len(view)}")
        return np.frombuffer(view, "<f4").astype(np.float32, copy=False)


class Bf16(Codec):
    """The nearest bf16, ties to even: half the bits, of which the exponents are Huffman coded.

    NaN stays NaN and infinity infinity; a finite value never becomes infinite.
    """

    needs_finite = False

    def encode(self, values: Floats) -> bytes:
        bits = as_row(values).view(np.uint32)
        magnitude = bits & np.uint32(0x7FFFFFFF)
        half = np.uint32(0x7FFF) + ((magnitude >> np.uint32(16)) & np.uint32(1))
        rounded = np.minimum((magnitude + half) >> np.uint32(16), _LARGEST_BF16)
        if magnitude.size and magnitude.max() >= _INFINITE:
            is_nan = magnitude > _INFINITE
            rounded[magnitude == _INFINITE] = 0x7F80
            rounded[is_nan] = 0x7FC0
        exponent = (rounded >> np.uint32(7)).astype(np.uint8)
        remainder = (rounded & np.uint32(0x7F)) | ((bits >> np.uint32(24)) & np.uint32(0x80))
        parts = [squeeze(exponent), remainder.astype(np.uint8).tobytes()]
        return pack(b"bf16", bits.size, parts)

    def decode(self, data: Data, size: int) -> Floats:
        coded, plain = unpack(b"bf16", data, size, 2)
        exponent = unsqueeze_exactly(coded, size).astype(np.uint32)
        remainder = np.frombuffer(plain, np.uint8)
        if remainder.size != size:
            raise ValueError(f"expected {size} mantissas, found {remainder.size}")
        wide = remainder.astype(np.uint32)
        bits = ((wide & np.uint32(0x80)) << np.uint32(24)) | (exponent << np.uint32(23))
        bits |= (wide & np.uint32(0x7F)) << np.uint32(16)
        return bits.view(np.float32)


INT8_BLOCK = 256
_TINY = np.finfo(np.float32).tiny
# Rounded down, so that 127 times the scale is still finite.
_LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))


class Int8(Codec):
    """127 levels each way and one scale for each block of 256 values: about 7.6 bits a value.

    The error of a value is at most half of 1/127 of the largest in its block. A block whose largest
    magnitude is below 127 times the smallest normal float becomes zeros.
    """

    def encode(self, values: Floats) -> bytes:
        row = check_values(values, self.name)
        scales = np.empty(-(-row.size // INT8_BLOCK), np.float32)
        codes = np.empty(row.size, np.int8)
        for start in range(0, row.size, SLICE):
            part = blocks(row[start : start + SLICE], INT8_BLOCK)
            code = np.abs(part)
            scale = code.max(axis=1) / np.float32(127)
            scale = np.where(scale < _TINY, 0, np.minimum(scale, _LARGEST_SCALE))
            scales[start // INT8_BLOCK :][: scale.size] = scale
            # Divided, not multiplied by the inverse: the inverse of a small scale overflows.
            np.divide(part, np.where(scale > 0, scale, np.float32(np.inf))[:, None], out=code)
            np.rint(code, out=code)
            codes[start : start + SLICE] = code.reshape(-1)[: row.size - start]
        parts = [scales.astype("<f4", copy=False).tobytes(), squeeze(codes.view(np.uint8))]
        return pack(b"int8", row.size, parts)

    def decode(self, data: Data, size: int) -> Floats:
        plain, coded = unpack(b"int8", data, size, 2)
        if len(plain) != 4 * -(-size // INT8_BLOCK):
            raise ValueError(f"{len(plain)} bytes of scales do not fit {size} values")
        scales = np.frombuffer(plain, "<f4").astype(np.float32, copy=False)
        if not ((scales >= 0) & (scales <= _LARGEST_SCALE)).all():
            raise ValueError("a scale is not one this codec writes")
        codes = unsqueeze_exactly(coded, size).view(np.int8)
        return scaled(codes, scales, INT8_BLOCK)


UNIFORM_BLOCK = 512
_MAX_VALUE = 127


class Uniform(Codec):
    """Evenly spaced levels, Huffman coded: the least error for the bits, short of vector codes.

    The step is a fixed part of the root mean square of a block of 512 values, so that a codec has
    about the same bits and the same error whatever the data: with `step` 0.25, 4 bits a value and
    7 % of the root mean square. A value is off by at most half a step, unless it is more than 127
    steps from zero. A block whose step would be below the smallest normal float becomes zeros.
    """

    def __init__(self, name: str, step: float) -> None:
        super().__init__(name)
        self._step = step
        self._tag = name.encode().ljust(4)

    def encode(self, values: Floats) -> bytes:
        row = check_values(values, self.name)
        scales = np.empty(-(-row.size // UNIFORM_BLOCK), np.uint16)
        codes = np.empty(row.size, np.int8)
        for start in range(0, row.size, SLICE):
            part = blocks(row[start : start + SLICE], UNIFORM_BLOCK)
            code = np.empty(part.shape, np.float32)
            scale = _bf16_bits(part, self._step, code)
            scales[start // UNIFORM_BLOCK :][: scale.size] = scale
            step = _floats(scale)
            # Divided, not multiplied by the inverse: the inverse of a small step overflows.
            np.divide(part, np.where(step > 0, step, np.float32(np.inf))[:, None], out=code)
            np.rint(code, out=code)
            np.clip(code, -_MAX_VALUE, _MAX_VALUE, out=code)
            codes[start : start + SLICE] = code.reshape(-1)[: row.size - start]
        halves = scales.astype("<u2").view(np.uint8).reshape(-1, 2)
        parts = [squeeze(halves[:, 0]), squeeze(halves[:, 1]), squeeze(codes.view(np.uint8))]
        return pack(self._tag, row.size, parts)

    def decode(self, data: Data, size: int) -> Floats:
        *coded, coded_codes = unpack(self._tag, data, size, 3)
        count = -(-size // UNIFORM_BLOCK)
        low, high = (unsqueeze_exactly(each, count).astype(np.uint16) for each in coded)
        steps = _floats(low | high << np.uint16(8))
        if not ((steps >= 0) & (steps <= _LARGEST_STEP)).all():
            raise ValueError("a step is not one this codec writes")
        codes = unsqueeze_exactly(coded_codes, size).view(np.int8)
        return scaled(codes, steps, UNIFORM_BLOCK)


# 128 times this is still finite.
_LARGEST_STEP = np.float32(2.0**120)


def _bf16_bits(
    part: Floats, step: float, room: Floats
) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """`step` times the root mean square of each row, as the upper half of a float."""
    # Scaled by the largest before squaring: squares of small values would vanish.
    top = np.abs(part, out=room).max(axis=1)
    safe = np.where(top > 0, top, np.float32(1))
    scaled = np.divide(part, safe[:, None], out=room)
    mean_square = np.einsum("ij,ij->i", scaled, scaled, dtype=np.float32) / np.float32(
        UNIFORM_BLOCK
    )
    steps = np.minimum(np.sqrt(mean_square) * np.float32(step) * top, _LARGEST_STEP)
    steps = np.where(steps < np.finfo(np.float32).tiny, np.float32(0), steps)
    return (steps.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _floats(upper: np.ndarray[tuple[int], np.dtype[np.uint16]]) -> Floats:
    return (upper.astype(np.uint32) << np.uint32(16)).view(np.float32)


E3M0_BLOCK = 256
OCTAVES = 7
_SIGN = 8
_LARGEST_EXPONENT = 254  # the biased exponent of the largest finite power of two

# The code for a number of octaves below the block's largest: 1 + octaves, and 0 for zero. A value
# one octave below the last level is nearer to that level than to zero.
_CODES = np.zeros(256, np.uint8)
_CODES[: OCTAVES + 1] = [*range(1, OCTAVES + 1), OCTAVES]


class E3m0(Codec):
    """A sign and one of seven powers of two, or zero; Huffman coded to about 3.6 bits a value.

    Each value becomes the nearest power of two. A block of 256 values keeps its largest exponent in
    one byte, and a value is its sign and how many octaves it lies below: 0 to 6, or zero. Rounding
    is integer arithmetic on the bits of the floats, so it is the same on every machine.

    Values are off by at most a third, or by 1/76 of the largest in their block if that is more.
    Subnormal results become zero; what rounds beyond 2**127 becomes 2**127. Use it with error
    feedback: alone, the rounding costs quality.
    """

    def encode(self, values: Floats) -> bytes:
        row = check_values(values, self.name)
        largest = np.empty(-(-row.size // E3M0_BLOCK), np.uint8)
        pairs = np.empty((row.size + 1) // 2, np.uint8)
        for start in range(0, row.size, SLICE):
            part = blocks(row[start : start + SLICE].view(np.uint32), E3M0_BLOCK)
            top, codes = _codes(part)
            largest[start // E3M0_BLOCK :][: top.size] = top
            pair = codes[0::2] | codes[1::2] << 4
            pairs[start // 2 :][: SLICE // 2] = pair[: pairs.size - start // 2]
        return pack(b"e3m0", row.size, [squeeze(largest), squeeze(pairs)])

    def decode(self, data: Data, size: int) -> Floats:
        coded_largest, coded_pairs = unpack(b"e3m0", data, size, 2)
        largest = unsqueeze_exactly(coded_largest, -(-size // E3M0_BLOCK))
        pairs = unsqueeze_exactly(coded_pairs, (size + 1) // 2)
        out = np.empty(size, np.float32)
        for start in range(0, size, SLICE):
            part = blocks(pairs[start // 2 :][: SLICE // 2], E3M0_BLOCK // 2)
            values = _values(part, largest[start // E3M0_BLOCK :][: len(part)])
            out[start : start + SLICE] = values[: size - start]
        return out


def _codes(bits: NDArray[np.uint32]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The largest exponent of each block, and the code of every value."""
    # Adding half a mantissa carries into the exponent from 1.5 on: the nearest power of two.
    rounded = ((bits & np.uint32(0x7FFFFFFF)) + np.uint32(0x400000)) >> np.uint32(23)
    exponents = np.minimum(rounded, _LARGEST_EXPONENT).astype(np.uint8)
    top = exponents.max(axis=1)
    codes = _CODES[top[:, None] - exponents]
    codes *= exponents > 0
    signs = (bits >> np.uint32(28)).astype(np.uint8) & np.uint8(_SIGN)
    codes |= signs * (codes > 0)
    return top, codes.reshape(-1)


def _values(pairs: NDArray[np.uint8], largest: NDArray[np.uint8]) -> Floats:
    codes = np.empty((len(pairs), E3M0_BLOCK), np.uint8)
    codes[:, 0::2] = pairs & np.uint8(15)
    codes[:, 1::2] = pairs >> np.uint8(4)
    # A block has only 256 exponents and 16 codes, so one table gives the bits of all.
    at = largest.astype(np.uint16)[:, None] << np.uint16(4) | codes
    return np.asarray(_FLOATS[at].reshape(-1))


def _table() -> Floats:
    largest, code = np.divmod(np.arange(256 * 16, dtype=np.int64), 16)
    octaves = (code & 7) - 1
    exponent = np.where(octaves >= 0, np.minimum(largest, _LARGEST_EXPONENT) - octaves, 0).clip(0)
    bits = exponent << 23 | np.where(exponent > 0, (code & _SIGN) << 28, 0)
    return bits.astype(np.uint32).view(np.float32)


_FLOATS = _table()
