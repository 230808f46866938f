"""The envelope of an encoded array, whose parts the entropy coder makes, and helpers of codecs.

An array becomes a header (which codec, how many values, how long each part is) and a few parts.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import ValidationError

Data = bytes | memoryview
Floats = NDArray[np.float32]
Number = TypeVar("Number", np.float32, np.uint32, np.uint8, np.int8)

# Arrays go through the codecs in slices that stay in the cache; a multiple of every block size.
SLICE = 1 << 16

_HEADER = struct.Struct("<4sQ")
_LENGTH = struct.Struct("<Q")


def pack(tag: bytes, size: int, parts: Sequence[bytes]) -> bytes:
    lengths = (_LENGTH.pack(len(part)) for part in parts)
    return b"".join([_HEADER.pack(tag, size), *lengths, *parts])


def unpack(tag: bytes, data: Data, size: int, parts: int) -> list[memoryview]:
    """What `pack` joined; raises ValueError unless it is a `tag` array of exactly `size` values."""
    view = memoryview(data).cast("B")
    start = _HEADER.size + parts * _LENGTH.size
    if len(view) < start:
        raise ValueError(f"{len(view)} bytes are too few for an encoded array")
    found_tag, found_size = _HEADER.unpack_from(view)
    if found_tag != tag:
        raise ValueError(f"expected an array encoded as {tag!r}, found {found_tag!r}")
    if found_size != size:
        raise ValueError(f"expected {size} values, the encoded array has {found_size}")
    lengths = [_LENGTH.unpack_from(view, _HEADER.size + 8 * at)[0] for at in range(parts)]
    if start + sum(lengths) != len(view):
        raise ValueError(f"expected {start + sum(lengths)} bytes, found {len(view)}")
    views = []
    for length in lengths:
        views.append(view[start : start + length])
        start += length
    return views


def check_values(values: Floats, codec: str) -> Floats:
    """Finite float32 values in one contiguous row, or a ValidationError naming the first bad one.

    A lossy codec has no code for NaN or infinity, and one such value would spoil a whole block.
    """
    row = as_row(values)
    # NaN and infinity both survive into one of the two ends, so no mask of the whole is needed.
    if row.size and not (np.isfinite(row.min()) and np.isfinite(row.max())):
        at = int(np.flatnonzero(~np.isfinite(row))[0])
        raise ValidationError(
            f"values[{at}]", float(row[at]), f"the codec {codec!r} needs finite numbers"
        )
    return row


def as_row(values: Floats) -> Floats:
    return np.ascontiguousarray(values, np.float32).reshape(-1)


def blocks(row: NDArray[Number], block: int) -> NDArray[Number]:
    """`row` as rows of `block` values, the last one filled up with zeros."""
    missing = -row.size % block
    if missing:
        row = np.concatenate([row, np.zeros(missing, row.dtype)])
    return row.reshape(-1, block)


def scaled(codes: NDArray[np.int8], scales: Floats, block: int) -> Floats:
    """Each block of codes times its scale, a slice at a time to stay in the cache."""
    out = np.empty(codes.size, np.float32)
    for start in range(0, codes.size, SLICE):
        part = blocks(codes[start : start + SLICE], block)
        scale = scales[start // block :][: len(part)]
        out[start : start + SLICE] = (part * scale[:, None]).reshape(-1)[: codes.size - start]
    return out
