"""Tensors of a version in host memory: as deltas in parts, and as the files of a full copy.

A part holds the tensors of some hundred MB of weights. Those of one item size lie end to end in the
order of their names, cut into rows that span small tensors; rows are independent of each other, so
threads share them. A tensor that is new, or has another type or shape than before, is there whole.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import Permanent, ValidationError
from atoll.files.writing import Buffer
from atoll.weights.codec import (
    ROW_VALUES,
    Array,
    changed_indices,
    decode_plain,
    decode_row,
    digest,
    digest_step,
    encode_plain,
    encode_row,
)
from atoll.weights.records import Damaged

# Item sizes of the types that safetensors has.
DTYPE_SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8"), 1),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
# New values that are in memory at a time while they are encoded: an eighth of all within these
# bounds. That is rows for all threads, but not many parts: each is a request.
MIN_PART_BYTES, PART_BYTES = 32 << 20, 256 << 20
FILE_BYTES = 1_000_000_000  # of a full copy: each is one request, and read as one
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, as in the library
INDEX = "model.safetensors.index.json"
STEM, ADAPTER_STEM = "model", "adapter_model"
ADAPTER = "adapter_config.json"  # among the files: the tensors are an adapter's, in one file
_LENGTH = struct.Struct("<I")
_HEADER = struct.Struct("<Q")
_UNITS: dict[int, np.dtype[Any]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
}

Bytes = NDArray[np.uint8]
Run = Callable[[Callable[[Any], Any], Iterable[Any]], list[Any]]


class TensorValue(NamedTuple):
    """Type, shape and bytes of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes

    @property
    def unit(self) -> np.dtype[Any]:
        """What a row is made of: values of 8 bytes count as two of 4."""
        return _UNITS[min(DTYPE_SIZES[self.dtype], 4)]

    @property
    def values(self) -> Array:
        return self.data.view(self.unit)

    def is_like(self, other: TensorValue | None) -> bool:
        return other is not None and (self.dtype, self.shape) == (other.dtype, other.shape)


def digest_of(tensor: TensorValue) -> int:
    data = tensor.data
    if data.size % 4 or data.ctypes.data % 4:
        data = np.concatenate([data, np.zeros(-data.size % 4, np.uint8)])
    return digest(data.view(np.uint32))


def rows_of(tensors: Mapping[str, TensorValue], digests: Mapping[str, int]) -> list[list[Any]]:
    return [[name, each.dtype, list(each.shape), digests[name]] for name, each in tensors.items()]


def state_of(rows: Iterable[list[Any]]) -> str:
    """SHA-256 over the sorted rows [name, dtype, shape, digest]."""
    return hashlib.sha256(json.dumps(sorted(rows), separators=(",", ":")).encode()).hexdigest()


class Threads:
    """Runs work on the cores of this machine; `count` 1 runs it on the caller's thread."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, "atoll weights") if count > 1 else None
        self._is_closed = False

    def check_open(self) -> None:
        if self._is_closed:
            raise Permanent("it is closed: make another Publisher or Follower")

    def run(self, work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        self.check_open()
        if self._pool is None:
            return [work(item) for item in items]
        return list(self._pool.map(work, items))

    def close(self) -> None:
        self._is_closed = True
        if self._pool is not None:
            self._pool.shutdown()


class Slice(NamedTuple):
    """Values `start:end` of a tensor, which begin at `offset` of a row."""

    name: str
    start: int
    end: int
    offset: int


def cut_rows(
    tensors: Mapping[str, TensorValue], names: Iterable[str]
) -> dict[int, list[list[Slice]]]:
    """The rows of these tensors by item size."""
    rows: dict[int, list[list[Slice]]] = {}
    room: dict[int, int] = {}
    for name in names:
        unit, count = tensors[name].unit.itemsize, tensors[name].values.size
        start = 0
        while start < count:
            if not room.get(unit):
                rows.setdefault(unit, []).append([])
                room[unit] = ROW_VALUES
            end = min(count, start + room[unit])
            rows[unit][-1].append(Slice(name, start, end, ROW_VALUES - room[unit]))
            room[unit] -= end - start
            start = end
    return rows


def gather(tensors: Mapping[str, TensorValue], row: Sequence[Slice]) -> Array:
    """The values of a row; not copied if they are of one tensor."""
    pieces = [tensors[each.name].values[each.start : each.end] for each in row]
    return np.concatenate(pieces) if len(pieces) > 1 else pieces[0]


def digest_steps(
    row: Sequence[Slice], indices: NDArray[np.intp], old: Array, new: Array
) -> list[tuple[str, int]]:
    """By how much the digest of each tensor in a row moves; values are those at `indices`."""
    bounds = np.searchsorted(indices, [each.offset for each in row] + [row[-1].offset + ROW_VALUES])
    steps = []
    for each, first, last in zip(row, bounds[:-1], bounds[1:], strict=True):
        if first < last:
            local = indices[first:last] + (each.start - each.offset)
            steps.append((each.name, digest_step(local, old[first:last], new[first:last])))
    return steps


@dataclass
class RowChange:
    """New values of a row, at its `indices`."""

    row: Sequence[Slice]
    indices: NDArray[np.intp]
    values: Array
    steps: list[tuple[str, int]]


@dataclass
class TensorsChange:
    rows: list[RowChange]
    fresh: dict[str, TensorValue]
    removed: Sequence[str]
    digests: dict[str, int]
    state: str = ""


def add_digests(digests: dict[str, int], steps: Iterable[tuple[str, int]]) -> None:
    for name, step in steps:
        digests[name] = (digests[name] + step) % (1 << 64)


class Tensors:
    """A version in host memory; `extra` are the files beside the tensors (configuration and so on).

    It is changed by one thread, by `apply` alone.
    """

    def __init__(
        self,
        tensors: dict[str, TensorValue],
        extra: Mapping[str, bytes],
        run: Run,
        digests: dict[str, int] | None = None,
    ) -> None:
        self.tensors, self.extra, self._run = tensors, dict(extra), run
        if digests is None:
            digests = dict(zip(tensors, run(digest_of, tensors.values()), strict=True))
        self.digests = digests
        self.state = state_of(self.rows())

    def rows(self) -> list[list[Any]]:
        """What the state is a digest of."""
        return rows_of(self.tensors, self.digests)

    def prepare(self, parts: Sequence[Buffer], removed: Sequence[str]) -> TensorsChange:
        change = TensorsChange([], {}, removed, dict(self.digests))
        for part in parts:
            try:
                self._read_part(memoryview(part).cast("B"), change)
            except (KeyError, ValueError, TypeError, struct.error) as error:
                raise Damaged(f"a part of another form: {error!r}") from None
        tensors = {name: each for name, each in self.tensors.items() if name not in removed}
        change.state = state_of(rows_of(tensors | change.fresh, change.digests))
        return change

    def _read_part(self, view: memoryview, change: TensorsChange) -> None:
        (length,) = _LENGTH.unpack_from(view)
        head = json.loads(bytes(view[_LENGTH.size : _LENGTH.size + length]))
        start = _LENGTH.size + length
        jobs: list[tuple[Sequence[Slice], memoryview]] = []
        rows = cut_rows(self.tensors, head["names"])
        if {str(unit): len(sizes) for unit, sizes in rows.items()} != {
            unit: len(sizes) for unit, sizes in head["rows"].items()
        }:
            raise Damaged("a part with other rows than its tensors have")
        for unit, sizes in head["rows"].items():
            for row, size in zip(rows[int(unit)], sizes, strict=True):
                if size:
                    jobs.append((row, view[start : start + size]))
                start += size
        for each in head["whole"]:
            dtype, shape = each["dtype"], tuple(each["shape"])
            sizes, count = each["sizes"], int(np.prod(shape, dtype=np.int64))
            data = np.empty(count * DTYPE_SIZES[dtype], np.uint8)
            tensor = TensorValue(dtype, shape, data)
            for at, size in enumerate(sizes):
                out = tensor.values[at * ROW_VALUES : (at + 1) * ROW_VALUES]
                out[:] = decode_plain(view[start : start + size], out.size, tensor.unit)
                start += size
            change.fresh[each["name"]] = tensor
            change.digests[each["name"]] = digest_of(tensor)
        if start != len(view):
            raise Damaged(f"a part of {len(view)} bytes, expected {start}")
        for row_change in self._run(self._decode, jobs):
            change.rows.append(row_change)
            add_digests(change.digests, row_change.steps)

    def _decode(self, job: tuple[Sequence[Slice], memoryview]) -> RowChange:
        row, data = job
        old = gather(self.tensors, row)
        indices, values = decode_row(data, old)
        if indices is None:
            indices = changed_indices(old, values)
            values = values[indices]
        return RowChange(row, indices, values, digest_steps(row, indices, old[indices], values))

    def apply(self, change: TensorsChange) -> None:
        for name in change.removed:
            self.tensors.pop(name, None)
        for each in change.rows:
            starts = [piece.offset for piece in each.row[1:]]
            bounds = [0, *np.searchsorted(each.indices, starts), each.indices.size]
            for piece, first, last in zip(each.row, bounds[:-1], bounds[1:], strict=True):
                indices = each.indices[first:last] + (piece.start - piece.offset)
                self.tensors[piece.name].values[indices] = each.values[first:last]
        self.tensors |= change.fresh
        self.digests = {name: change.digests[name] for name in self.tensors}
        self.state = change.state

    def names(self) -> set[str]:
        return set(self.tensors)

    def share(self, index: int, count: int) -> Tensors:
        """Views of the tensors of one of `count` shares: the largest first, to the smallest."""
        sizes, names = [0] * count, list[str]()
        for name in sorted(self.tensors, key=lambda name: (-self.tensors[name].data.size, name)):
            smallest = sizes.index(min(sizes))
            sizes[smallest] += self.tensors[name].data.size
            if smallest == index:
                names.append(name)
        tensors = {name: self.tensors[name] for name in sorted(names)}
        digests = {name: self.digests[name] for name in tensors}
        return Tensors(tensors, self.extra, self._run, digests)

    def delta(self, base: Tensors) -> TensorsDelta:
        return TensorsDelta(base, self.tensors.items(), self._run)

    def verify(self) -> None:
        """Read all values again; raises Damaged if memory has changed since."""
        digests = self._run(digest_of, self.tensors.values())
        for name, value in zip(self.tensors, digests, strict=True):
            if value != self.digests[name]:
                raise Damaged(f"tensor {name!r} is not what was read: its memory has changed")

    def files(self) -> Iterator[tuple[str, list[Buffer]]]:
        names, size = dict[str, str](), 0
        for file, pieces, tensors in self.shards(""):
            yield file, pieces
            names |= dict.fromkeys(tensors, file)
            size += sum(self.tensors[name].data.size for name in tensors)
        for file, body in self.index(names, size):
            yield file, [body]

    def shards(self, label: str) -> Iterator[tuple[str, list[Buffer], list[str]]]:
        """Files with `label` in their names, and the tensors in each."""
        yield from tensor_files(self.tensors, label, is_adapter=ADAPTER in self.extra)

    def index(self, names: Mapping[str, str], size: int) -> Iterator[tuple[str, bytes]]:
        """What a full copy has beside the files of its tensors."""
        if not {f"{stem}.safetensors" for stem in (STEM, ADAPTER_STEM)} >= set(names.values()):
            index = {"metadata": {"total_size": size}, "weight_map": dict(names)}
            yield INDEX, json.dumps(index).encode()
        yield from self.extra.items()


# -- Deltas


class TensorsDelta:
    """Parts of what `tensors` change against the base, encoded as they come.

    `digests`, `state` and the numbers are there after the last part.
    """

    def __init__(self, base: Tensors, tensors: Iterable[tuple[str, TensorValue]], run: Run) -> None:
        self._base, self._tensors, self._run = base, tensors, run
        self.digests = dict(base.digests)
        self.fresh: dict[str, TensorValue] = {}  # new ones, without their values
        self.names = set[str]()
        self.changed = 0

    def __iter__(self) -> Iterator[Buffer]:
        batch: dict[str, TensorValue] = {}
        size, total = 0, sum(each.data.size for each in self._base.tensors.values())
        limit = min(max(MIN_PART_BYTES, total // 8), PART_BYTES)
        for name, tensor in self._tensors:
            if name in self.names:
                raise ValidationError("named_tensors", name, "expected each name once")
            self.names.add(name)
            batch[name] = tensor
            size += tensor.data.size
            if size >= limit:
                if body := self._encode(batch):
                    yield body
                batch, size = {}, 0
        if body := self._encode(batch):
            yield body

    @property
    def removed(self) -> list[str]:
        return sorted(set(self._base.tensors) - self.names)

    @property
    def state(self) -> str:
        return state_of(self.rows())

    def rows(self) -> list[list[Any]]:
        known = {name: self._base.tensors.get(name) for name in self.names} | self.fresh
        return rows_of({name: each for name, each in known.items() if each}, self.digests)

    def _encode(self, batch: dict[str, TensorValue]) -> bytes:
        """One part; b"" if nothing in it has changed."""
        base = self._base.tensors
        names = sorted(name for name, each in batch.items() if each.is_like(base.get(name)))
        rows = cut_rows(base, names)
        jobs = [(batch, row) for unit in rows for row in rows[unit]]
        encoded = self._run(self._encode_row, jobs)
        at, sizes = 0, dict[str, list[int]]()
        for unit, some in rows.items():
            sizes[str(unit)] = [len(body) for body, _, _ in encoded[at : at + len(some)]]
            at += len(some)
        bodies: list[Buffer] = []
        for body, steps, count in encoded:
            bodies.append(body)
            add_digests(self.digests, steps)
            self.changed += count
        heads = []
        for name in sorted(set(batch) - set(names)):
            tensor = batch[name]
            pieces = self._run(encode_plain, plain_rows(tensor))
            bodies += pieces
            heads.append(
                {
                    "name": name,
                    "dtype": tensor.dtype,
                    "shape": tensor.shape,
                    "sizes": [len(piece) for piece in pieces],
                }
            )
            self.digests[name] = digest_of(tensor)
            self.fresh[name] = tensor._replace(data=tensor.data[:0])
            self.changed += tensor.data.size // DTYPE_SIZES[tensor.dtype]
        if not heads and not any(bodies):
            return b""
        head = json.dumps({"names": names, "rows": sizes, "whole": heads}).encode()
        return b"".join([_LENGTH.pack(len(head)), head, *bodies])

    def _encode_row(
        self, job: tuple[dict[str, TensorValue], Sequence[Slice]]
    ) -> tuple[bytes, list[tuple[str, int]], int]:
        batch, row = job
        old, new = gather(self._base.tensors, row), gather(batch, row)
        indices = changed_indices(old, new)
        if not indices.size:
            return b"", [], 0
        body = encode_row(old, new, indices)
        return body, digest_steps(row, indices, old[indices], new[indices]), int(indices.size)


def plain_rows(tensor: TensorValue) -> list[Array]:
    values = tensor.values
    return [values[at : at + ROW_VALUES] for at in range(0, values.size, ROW_VALUES)]


# -- safetensors


def tensor_files(
    tensors: Mapping[str, TensorValue], label: str, *, is_adapter: bool
) -> Iterator[tuple[str, list[Buffer], list[str]]]:
    """The tensors as files that `from_pretrained` reads, with the names of those in each file.

    The data is not copied. `label` is in the names of the files.
    """
    # Larger items first, so that all are aligned.
    order = sorted(tensors, key=lambda name: (-DTYPE_SIZES[tensors[name].dtype], name))
    files: list[list[str]] = []
    size = 0
    for name in order:
        if not files or (size + tensors[name].data.size > FILE_BYTES and not is_adapter):
            files.append([])
            size = 0
        files[-1].append(name)
        size += tensors[name].data.size
    stem = (ADAPTER_STEM if is_adapter else STEM) + (f"-{label}" if label else "")
    for number, names in enumerate(files, 1):
        part = f"-{number:05d}-of-{len(files):05d}" if len(files) > 1 else ""
        pieces: list[Buffer] = [
            safetensors_header(tensors, names),
            *(tensors[n].data.data for n in names),
        ]
        yield f"{stem}{part}.safetensors", pieces, names


def safetensors_header(tensors: Mapping[str, TensorValue], names: Iterable[str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in names:
        dtype, shape, data = tensors[name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + data.size]}
        start += data.size
    body = json.dumps(header).encode()
    body += b" " * (-len(body) % 8)
    return _HEADER.pack(len(body)) + body


def read_safetensors(data: Buffer) -> dict[str, TensorValue]:
    """The tensors in a file, as views of its bytes. Raises Damaged."""
    view = memoryview(data).cast("B")
    try:
        (length,) = _HEADER.unpack_from(view)
        if length > MAX_HEADER_BYTES:
            raise Damaged(f"a safetensors header of {length} bytes")
        start = _HEADER.size + length
        header = json.loads(bytes(view[_HEADER.size : start]))
        header.pop("__metadata__", None)
        tensors = {}
        for name, row in header.items():
            first, last = row["data_offsets"]
            shape = tuple(row["shape"])
            count = int(np.prod(shape, dtype=np.int64)) * DTYPE_SIZES[row["dtype"]]
            if count != last - first or not 0 <= first <= last <= len(view) - start:
                raise Damaged(f"tensor {name!r} does not have the bytes of its shape")
            values = np.frombuffer(view[start + first : start + last], np.uint8)
            is_usable = values.flags.writeable and not (values.size and values.ctypes.data % 8)
            tensors[name] = TensorValue(row["dtype"], shape, values if is_usable else values.copy())
        return tensors
    except (KeyError, ValueError, TypeError, AttributeError, struct.error) as error:
        raise Damaged(f"not a safetensors file: {error!r}") from None


def load_files(files: Mapping[str, Buffer], run: Run) -> Tensors:
    """The version that the files of a full copy hold. Raises Damaged."""
    if odd := [name for name in files if "/" in name or name.startswith(".")]:
        raise Damaged(f"a full copy with the file {odd[0]!r}: expected plain names")
    tensors: dict[str, TensorValue] = {}
    extra: dict[str, bytes] = {}
    for name, body in files.items():
        if name.endswith(".safetensors"):
            tensors |= read_safetensors(body)
        elif name != INDEX:
            extra[name] = bytes(body)
    return Tensors(tensors, extra, run)


@dataclass
class TensorsSource:
    """What is published; `tensors` is read once. Nobody changes its values afterwards (rule 6)."""

    tensors: Iterable[tuple[str, TensorValue]]
    extra: Mapping[str, bytes]
    run: Run
    names: set[str] = field(default_factory=set)

    def copy(self) -> Tensors:
        tensors: dict[str, TensorValue] = {}
        for name, tensor in self.tensors:
            if name in tensors:
                raise ValidationError("named_tensors", name, "expected each name once")
            tensors[name] = tensor
        return Tensors(tensors, self.extra, self.run)

    def delta(self, base: Tensors) -> TensorsDelta:
        return TensorsDelta(base, self.tensors, self.run)
