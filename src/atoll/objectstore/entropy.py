"""The entropy coder of numbers that are stored: of pseudo-gradients and of weights.

Bytes are Huffman coded by zstd with its search for repeats all but switched off: its coder runs at
about a GB/s without the interpreter lock, and its tables follow the data. Bytes come back the same
everywhere; what they are coded as may differ between releases of zstd.
"""

from __future__ import annotations

import threading

import numpy as np
import zstandard
from numpy.typing import NDArray

from atoll.files.writing import Buffer

Bytes = NDArray[np.uint8]

FAR = 255  # this byte of coded gaps moves on by 255 and names no index


class _Coders(threading.local):
    """One of each for every thread: they keep tables, and may not be shared."""

    def __init__(self) -> None:
        # Level 1 with the smallest tables for repeats: as small on gradients as a search, and up to
        # three times as fast on those of few levels, where a search finds chance repeats.
        search = zstandard.ZstdCompressionParameters(
            window_log=17,
            chain_log=6,
            hash_log=6,
            search_log=1,
            min_match=7,
            target_length=0,
            strategy=zstandard.STRATEGY_FAST,
        )
        self.compressor = zstandard.ZstdCompressor(compression_params=search)
        self.decompressor = zstandard.ZstdDecompressor()


_coders = _Coders()


def squeeze(values: Bytes) -> bytes:
    """The bytes, Huffman coded, without a search for repeats: gradients and weights have none."""
    return _coders.compressor.compress(np.ascontiguousarray(values).data)


def unsqueeze(data: Buffer, limit: int) -> Bytes:
    """The bytes before `squeeze`; raises ValueError for other data or more than `limit` bytes."""
    try:
        size = zstandard.get_frame_parameters(data).content_size
        if size > limit:  # a size that is not stated is the largest number there is
            raise ValueError(f"a coded part holds more than the {limit} bytes there can be")
        plain = _coders.decompressor.decompress(data, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(f"not a Huffman coded part: {error}") from error
    return np.frombuffer(plain, np.uint8)


def unsqueeze_exactly(data: Buffer, size: int) -> Bytes:
    plain = unsqueeze(data, size)
    if plain.size != size:
        raise ValueError(f"a coded part holds {plain.size} bytes where {size} are needed")
    return plain


def encode_gaps(indices: NDArray[np.int64]) -> Bytes:
    """Gap g between two rising indices as g // 255 bytes of 255, then g % 255."""
    gaps = np.diff(indices, prepend=-1) - 1
    far = gaps // FAR
    if not far.any():
        return gaps.astype(np.uint8)
    out = np.full(int(far.sum()) + gaps.size, FAR, np.uint8)
    out[np.cumsum(far) + np.arange(gaps.size)] = gaps % FAR
    return out


def decode_gaps(coded: Bytes) -> NDArray[np.int64]:
    """The indices. Bytes after the last of them name none."""
    ends = np.flatnonzero(coded != FAR)
    steps = coded[ends].astype(np.int64) + 1
    if ends.size < coded.size:
        steps += (np.diff(ends, prepend=-1) - 1) * FAR
    return np.cumsum(steps) - 1
