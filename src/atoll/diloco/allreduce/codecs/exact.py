"""fp32 as it is, and bf16: half the bits, of which the exponents are Huffman coded."""

from __future__ import annotations

import numpy as np

from atoll.diloco.allreduce.codecs.frame import (
    Data,
    Floats,
    as_row,
    pack,
    squeeze,
    unpack,
    unsqueeze_exactly,
)

_LARGEST_BF16 = np.uint32(0x7F7F)
_INFINITE = np.uint32(0x7F800000)


class Fp32:
    """The bytes themselves, NaN and infinity included; no header, so offsets are plain."""

    name = "fp32"
    is_exact = True
    needs_finite = False

    def encode(self, values: Floats) -> bytes:
        return as_row(values).astype("<f4", copy=False).tobytes()

    def decode(self, data: Data, size: int) -> Floats:
        view = memoryview(data).cast("B")
        if len(view) != 4 * size:
            raise ValueError(f"expected {4 * size} bytes of fp32, found {len(view)}")
        return np.frombuffer(view, "<f4").astype(np.float32, copy=False)


class Bf16:
    """Rounded to the nearest bf16, ties to even.

    NaN stays NaN and infinity infinity; a finite value never becomes infinite.
    """

    name = "bf16"
    is_exact = False
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
        rest = (rounded & np.uint32(0x7F)) | ((bits >> np.uint32(24)) & np.uint32(0x80))
        parts = [squeeze(exponent), rest.astype(np.uint8).tobytes()]
        return pack(b"bf16", bits.size, parts)

    def decode(self, data: Data, size: int) -> Floats:
        coded, plain = unpack(b"bf16", data, size, 2)
        exponent = unsqueeze_exactly(coded, size).astype(np.uint32)
        rest = np.frombuffer(plain, np.uint8)
        if rest.size != size:
            raise ValueError(f"expected {size} mantissas, found {rest.size}")
        wide = rest.astype(np.uint32)
        bits = ((wide & np.uint32(0x80)) << np.uint32(24)) | (exponent << np.uint32(23))
        bits |= (wide & np.uint32(0x7F)) << np.uint32(16)
        return bits.view(np.float32)
