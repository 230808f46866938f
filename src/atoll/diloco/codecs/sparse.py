"""The 64 largest of each 4096 values, each as its place and 2 bits: about 0.15 bits a value.

Places are gaps to the place before, one byte each and Huffman coded. The 2 bits are the sign and
whether the magnitude is above the mean of those sent of its chunk. Error feedback carries the
rest, so this suits plain averaging over many rounds, not few rounds with much momentum.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.diloco.codecs import Codec
from atoll.diloco.codecs.frame import (
    SLICE,
    Data,
    Floats,
    blocks,
    check_values,
    pack,
    unpack,
)
from atoll.objectstore.entropy import (
    FAR,
    decode_gaps,
    encode_gaps,
    squeeze,
    unsqueeze,
    unsqueeze_exactly,
)

CHUNK = 4096
KEEP = 64
_OPTIONS = re.compile(r"(\d{1,4})/(\d{2,4})(?:@(0(?:\.\d{1,6})?|1))?", re.ASCII)
_SHIFTS = np.array([0, 2, 4, 6], np.uint8)


class Sparse(Codec):
    """Zeros are never sent, so an array of zeros takes a few bytes and comes back as zeros."""

    def __init__(self, name: str, keep: int = KEEP, chunk: int = CHUNK, decay: float = 1.0) -> None:
        self.keep, self.chunk, self.decay = keep, chunk, decay
        is_usual = (keep, chunk, decay) == (KEEP, CHUNK, 1.0)
        rate = "" if decay == 1 else f"@{decay:g}"
        super().__init__(name if is_usual else f"{name}:{keep}/{chunk}{rate}")

    @classmethod
    def with_options(cls, name: str, options: str) -> Sparse | None:
        """K/CHUNK, or K/CHUNK@DECAY."""
        match = _OPTIONS.fullmatch(options)
        if match is None:
            return None
        keep, chunk = int(match[1]), int(match[2])
        is_power = chunk & (chunk - 1) == 0
        if not is_power or not 64 <= chunk <= CHUNK or not 1 <= keep <= chunk:
            return None
        return cls(name, keep, chunk, float(match[3] or 1))

    def encode(self, values: Floats) -> bytes:
        row = check_values(values, self.name)
        slices = [
            _largest(row[start : start + SLICE], self.keep, self.chunk) + start
            for start in range(0, row.size, SLICE)
        ]
        locations = np.concatenate(slices) if slices else np.empty(0, np.int64)
        largest = row[locations]
        chunk = locations // self.chunk
        chunks = -(-row.size // self.chunk)
        means = _bf16(_means(np.abs(largest), chunk, chunks))
        ratio = np.abs(largest) / np.maximum(means, np.float32(1e-45))[chunk]
        is_high = ratio > 1
        levels = np.array([_mean(ratio[~is_high]), _mean(ratio[is_high])], "<f4")
        codes = np.signbit(largest) * np.uint8(2) | is_high.astype(np.uint8)
        parts = [
            levels.tobytes(),
            squeeze((means.view(np.uint32) >> np.uint32(16)).astype("<u2").view(np.uint8)),
            squeeze(encode_gaps(locations)),
            _four_in_a_byte(codes).tobytes(),
        ]
        return pack(b"top1", row.size, parts)

    def decode(self, data: Data, size: int) -> Floats:
        plain, coded_means, coded_gaps, plain_codes = unpack(b"top1", data, size, 4)
        if len(plain) != 8:
            raise ValueError(f"expected two levels in 8 bytes, found {len(plain)}")
        levels = np.frombuffer(plain, "<f4").astype(np.float32, copy=False)
        half = unsqueeze_exactly(coded_means, 2 * -(-size // self.chunk)).view("<u2")
        means = (half.astype(np.uint32) << np.uint32(16)).view(np.float32)
        if not all((part >= 0).all() and np.isfinite(part).all() for part in (means, levels)):
            raise ValueError("a scale is not one this codec writes")
        # Each byte names a place or moves on by 255, so there cannot be more than this.
        locations = decode_gaps(unsqueeze(coded_gaps, size + size // FAR + 1))
        if locations.size and locations[-1] >= size:
            raise ValueError(f"place {locations[-1]} is outside an array of {size}")
        packed = np.frombuffer(plain_codes, np.uint8)
        if packed.size != (locations.size + 3) // 4:
            raise ValueError(f"{packed.size} bytes of codes do not fit {locations.size} values")
        codes = ((packed[:, None] >> _SHIFTS) & np.uint8(3)).reshape(-1)[: locations.size]
        # In fp64, and cut: a level times a mean may lie above the largest float.
        exact = levels.astype(np.float64)[codes & 1] * means[locations // self.chunk]
        magnitude = np.minimum(exact, np.finfo(np.float32).max).astype(np.float32)
        out = np.zeros(size, np.float32)
        out[locations] = np.where(codes & 2, -magnitude, magnitude)
        return out


def _largest(row: Floats, keep: int, chunk: int) -> NDArray[np.int64]:
    """The places of the values to send, ascending.

    A key is the upper 20 bits of the magnitude and the place, so keys differ, ties have one
    answer on every machine, and partitioning the keys gives the places with no look-up.
    """
    bits = blocks(row.view(np.uint32), chunk) & np.uint32(0x7FFFFFFF)
    low = np.uint32(chunk - 1)
    keys = (bits & ~low) | (low - np.arange(chunk, dtype=np.uint32))
    top = np.partition(keys, chunk - keep, axis=1)[:, chunk - keep :] if keep < chunk else keys
    locations = np.sort(low - (top & low), axis=1).astype(np.int64)
    flat = (locations + np.arange(len(locations))[:, None] * chunk).reshape(-1)
    flat = flat[flat < row.size]
    return np.asarray(flat[row[flat] != 0])


def _means(magnitudes: Floats, chunk: NDArray[np.int64], chunks: int) -> Floats:
    count = np.bincount(chunk, minlength=chunks)
    total = np.bincount(chunk, magnitudes.astype(np.float64), minlength=chunks)
    return np.asarray(total / np.maximum(count, 1), np.float32)


def _bf16(values: Floats) -> Floats:
    """Cut to 16 bits, never to zero and never up, so that it stays finite."""
    bits = values.view(np.uint32)
    cut = bits & np.uint32(0xFFFF0000)
    smallest = np.where(bits > 0, np.uint32(0x10000), np.uint32(0))
    return np.asarray(np.maximum(cut, smallest).view(np.float32))


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean(dtype=np.float64)) if values.size else 1.0


def _four_in_a_byte(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    four = blocks(codes, 4)
    shifted = four << _SHIFTS
    return np.asarray(np.bitwise_or.reduce(shifted, axis=1))
