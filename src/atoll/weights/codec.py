"""Lossless deltas of rows of numbers: indices and steps, entropy coded; and a digest that moves.

A row is some values of one item size, as unsigned integers. Neighbouring floating point numbers are
neighbouring integers after `_order`, so an optimizer's small updates are small steps. zstd only
codes entropy: its search for repeats finds none in weights. Nothing here knows tensors.
"""

from __future__ import annotations

import struct
from functools import cache

import numpy as np
from numpy.typing import NDArray

from atoll.files.writing import Buffer
from atoll.objectstore.entropy import FAR, Bytes, decode_gaps, encode_gaps, squeeze, unsqueeze
from atoll.weights.records import Damaged

Array = NDArray[np.unsignedinteger]

ROW_VALUES = 1 << 21  # 4 MiB of bf16: rows are enough for every thread, and stay near the cache
SPARSE_SHARE = 0.6  # of changed values; above it the indices cost more than unchanged values
SPARSE, DENSE, PLAIN = 1, 2, 3
_HEAD = struct.Struct("<BBHII")  # kind, item size, streams, values, changes
_SIZE = struct.Struct("<I")
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32}


def encode_row(old: Array, new: Array, changed: NDArray[np.intp]) -> bytes:
    """What turns `old` into `new`, which differ at the indices `changed`."""
    size, count = new.itemsize, int(changed.size)
    if count <= SPARSE_SHARE * new.size:
        steps = _zigzag(_order(new[changed]) - _order(old[changed])) - new.dtype.type(1)
        streams = [encode_gaps(changed), *_planes(steps, is_short=True)]
        return _join(SPARSE, size, new.size, count, streams)
    steps = _zigzag(_order(new) - _order(old))
    return _join(DENSE, size, new.size, count, _planes(steps))


def encode_plain(values: Array) -> bytes:
    """The values themselves."""
    return _join(PLAIN, values.itemsize, values.size, values.size, _planes(values))


def decode_row(data: Buffer, old: Array) -> tuple[NDArray[np.intp] | None, Array]:
    """The indices that change (None: all) and the new values there. Raises Damaged."""
    kind, count, streams = _split(data, old.itemsize, old.size)
    if kind == SPARSE:
        if not 0 < count <= old.size or len(streams) not in (2, old.itemsize + 1):
            raise Damaged("a row with other streams than it says")
        indices = _read_gaps(_expand(streams[0], count + old.size // FAR + 1), count, old.size)
        steps = _merge(streams[1:], count, old.dtype)
        steps += old.dtype.type(1)
        return indices, _disorder(_order(old[indices]) + _unzigzag(steps))
    if kind not in (DENSE, PLAIN) or len(streams) != old.itemsize:
        raise Damaged("a row of an unknown kind")
    values = _merge(streams, old.size, old.dtype)
    if kind == DENSE:
        values = _disorder(_order(old) + _unzigzag(values))
    return None, values


def decode_plain(data: Buffer, size: int, dtype: np.dtype[np.unsignedinteger]) -> Array:
    kind, _, streams = _split(data, dtype.itemsize, size)
    if kind != PLAIN or len(streams) != dtype.itemsize:
        raise Damaged("a row that is not the values themselves")
    return _merge(streams, size, dtype)


def changed_indices(old: Array, new: Array) -> NDArray[np.intp]:
    """Where the two differ: 8-byte words first, since most of them are equal."""
    a, b = old.view(np.uint8), new.view(np.uint8)
    words = a.size // 8 * 8
    differ = np.flatnonzero(a[:words].view(np.uint64) != b[:words].view(np.uint64))
    each = 8 // old.itemsize
    if differ.size * 4 > max(words // 8, 1):
        return np.flatnonzero(old != new)
    indices = (differ[:, None] * each + np.arange(each)).reshape(-1)
    indices = np.concatenate([indices, np.arange(words // old.itemsize, old.size)])
    differing: NDArray[np.intp] = indices[old[indices] != new[indices]]
    return differing


# -- Numbers


def _order(values: Array) -> Array:
    """As integers in the order of the floating point numbers, modulo their size; its own inverse.

    All bits but the sign are flipped if the number is negative.
    """
    bits = 8 * values.itemsize - 1
    signed = values.view(_SIGNED[values.itemsize])
    mask = (signed >> bits).view(values.dtype) >> values.dtype.type(1)
    flipped: Array = values ^ mask
    return flipped


_disorder = _order


def _zigzag(steps: Array) -> Array:
    signed = steps.view(_SIGNED[steps.itemsize])
    folded = (signed << 1) ^ (signed >> (8 * steps.itemsize - 1))
    return folded.view(steps.dtype)


def _unzigzag(steps: Array) -> Array:
    one = steps.dtype.type(1)
    unfolded: Array = (steps >> one) ^ (~(steps & one) + one)
    return unfolded


def _planes(values: Array, *, is_short: bool = False) -> list[Bytes]:
    """The bytes of the values, those of one significance together."""
    values = np.ascontiguousarray(values)
    table = values.view(np.uint8).reshape(-1, values.itemsize)
    if is_short and values.itemsize > 1 and int(values.max()) < 256:
        return [np.ascontiguousarray(table[:, 0])]
    return [np.ascontiguousarray(table[:, at]) for at in range(values.itemsize)]


def _merge(streams: list[memoryview], count: int, dtype: np.dtype[np.unsignedinteger]) -> Array:
    table = np.zeros((count, dtype.itemsize), np.uint8)
    for at, stream in enumerate(streams):
        plane = _expand(stream, count)
        if plane.size != count:
            raise Damaged(f"{plane.size} values where {count} are needed")
        table[:, at] = plane
    return table.reshape(-1).view(dtype)


def _read_gaps(coded: Bytes, count: int, size: int) -> NDArray[np.intp]:
    indices = decode_gaps(coded)
    if indices.size != count or not count or coded[-1] == FAR:
        raise Damaged(f"{indices.size} indices where {count} are needed")
    if indices[-1] >= size:
        raise Damaged(f"index {indices[-1]} in a row of {size}")
    return indices.astype(np.intp, copy=False)


# -- Frames


def _join(kind: int, item: int, values: int, changes: int, streams: list[Bytes]) -> bytes:
    frames = [squeeze(stream) for stream in streams]
    sizes = [_SIZE.pack(len(frame)) for frame in frames]
    return b"".join([_HEAD.pack(kind, item, len(frames), values, changes), *sizes, *frames])


def _split(data: Buffer, item: int, size: int) -> tuple[int, int, list[memoryview]]:
    view = memoryview(data).cast("B")
    if len(view) < _HEAD.size:
        raise Damaged("a row without its head")
    kind, row_item, count, values, changes = _HEAD.unpack_from(view)
    start = _HEAD.size + count * _SIZE.size
    if (row_item, values) != (item, size) or not 0 < count <= 5 or len(view) < start:
        raise Damaged(f"a row of {values} values of {row_item} bytes, expected {size} of {item}")
    streams = []
    for at in range(count):
        (length,) = _SIZE.unpack_from(view, _HEAD.size + at * _SIZE.size)
        streams.append(view[start : start + length])
        start += length
    if start != len(view):
        raise Damaged(f"a row of {len(view)} bytes, expected {start}")
    return kind, changes, streams


def _expand(frame: memoryview, most: int) -> Bytes:
    try:
        return unsqueeze(frame, most)
    except ValueError as error:
        raise Damaged(str(error)) from None


# -- Digest


BLOCK = 8192


@cache
def _factors(stream: int, count: int) -> NDArray[np.uint64]:
    """Odd numbers of SplitMix64: a library's generator may change its stream."""
    with np.errstate(over="ignore"):
        at = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream << 40)
        z = at * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (z ^ (z >> np.uint64(31))) | np.uint64(1)


def _block_factors(count: int) -> NDArray[np.uint64]:
    return _factors(1, 1 << max(count - 1, 1).bit_length())[:count]


def digest(words: NDArray[np.uint32]) -> int:
    """Sum of word j times R[j % 8192] times M[j // 8192], modulo 2**64."""
    factors, blocks = _factors(0, BLOCK), -(-words.size // BLOCK)
    outer = _block_factors(blocks)
    total = np.uint64(0)
    with np.errstate(over="ignore"):
        full = words.size // BLOCK
        step = 64  # blocks at a time, 4 MiB of products
        for first in range(0, full, step):
            last = min(first + step, full)
            table = words[first * BLOCK : last * BLOCK].reshape(-1, BLOCK)
            sums = np.einsum("ij,j->i", table, factors, dtype=np.uint64, casting="unsafe")
            total += (sums * outer[first:last]).sum(dtype=np.uint64)
        if full < blocks:
            tail = words[full * BLOCK :].astype(np.uint64)
            total += (tail * factors[: tail.size]).sum(dtype=np.uint64) * outer[full]
    return int(total)


def digest_step(indices: NDArray[np.intp], old: Array, new: Array) -> int:
    """By how much a digest moves where the values at `indices` of a tensor change."""
    if not indices.size:
        return 0
    each = 4 // old.itemsize  # values in a word: its bytes count as if each were a number
    words = indices // each
    outer = _block_factors(int(words[-1]) // BLOCK + 1)
    with np.errstate(over="ignore"):
        steps = new.astype(np.uint64) - old.astype(np.uint64)
        if each > 1:
            steps <<= (indices % each * (8 * old.itemsize)).astype(np.uint64)
        weights = _factors(0, BLOCK)[words % BLOCK] * outer[words // BLOCK]
        return int((weights * steps).sum(dtype=np.uint64))
