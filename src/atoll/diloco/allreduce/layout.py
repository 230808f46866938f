"""The shape of what is averaged: tensors as one float32 vector, cut into shards, and into cells.

All replicas of a round must have the same layout; its fingerprint is in every object's name.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Sequence
from functools import cache, cached_property, lru_cache
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import ValidationError

Vector = NDArray[np.float32]

UNIT = 4096  # values; a multiple of every codec's blocks
MOST_CELLS = 64

MOST_BYTES = 8 << 20  # of a layout as JSON: some 200,000 tensors


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Layout(msgspec.Struct, frozen=True, dict=True):
    """`name` tells apart streams of tensors that take turns, such as DiLoCo's fragments.

    Each shard is cut into `cells`, the least that is encoded and checked by itself. They follow
    from the size alone, so replicas of any number of processes can read each other's. 0 is the
    format of runs that began without cells.
    """

    tensors: tuple[TensorSpec, ...]
    shards: int
    codec: str
    down_codec: str
    name: str = ""
    cells: Annotated[int, msgspec.Meta(ge=0, le=MOST_CELLS)] = 0

    @cached_property
    def size(self) -> int:
        return sum(spec.size for spec in self.tensors)

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=8).hexdigest()

    def bounds(self, shard: int) -> tuple[int, int]:
        """Where the shard lies in the vector."""
        size = self.size
        return size * shard // self.shards, size * (shard + 1) // self.shards

    def shard_size(self, shard: int) -> int:
        start, end = self.bounds(shard)
        return end - start

    def cell_bounds(self, shard: int) -> list[int]:
        """Where the cells of a shard begin, counted from its start, and at last where it ends.

        Blocks of the codecs lie within one cell, so cells do not change what a codec makes.
        """
        size, count = self.shard_size(shard), max(self.cells, 1)
        unit = UNIT if size >= count * UNIT else 1
        units = -(-size // unit)
        return [min(size, units * cell // count * unit) for cell in range(count + 1)]

    def pack(self) -> bytes:
        return self._packed

    @cached_property
    def _packed(self) -> bytes:
        """Raises ValidationError for more tensors than another replica would unpack."""
        text = msgspec.json.encode(self)
        if len(text) > MOST_BYTES:
            raise ValidationError(
                "tensors",
                f"{len(self.tensors)} tensors",
                f"expected shapes that take at most {MOST_BYTES >> 20} MiB as JSON, "
                f"these take {len(text) >> 20} MiB: join small tensors",
            )
        return zlib.compress(text)

    @staticmethod
    def unpack(data: bytes) -> Layout:
        """Raises ValueError on anything that `pack` did not make, however far it would expand."""
        decoder = zlib.decompressobj()
        try:
            text = decoder.decompress(data, MOST_BYTES + 1)
            if len(text) > MOST_BYTES:
                raise ValueError(f"not a layout: it expands to more than {MOST_BYTES} bytes")
            return msgspec.json.decode(text, type=Layout)
        except (zlib.error, msgspec.MsgspecError) as error:
            raise ValueError(f"not a layout: {error}") from error


def cells_of(shard_size: int, codecs: Sequence[str]) -> int:
    """How many cells a shard has: enough for many processes, few enough to cost next to nothing."""
    if any(codec.startswith("sparse") for codec in codecs):
        return max(1, min(MOST_CELLS, shard_size // (64 * UNIT)))
    large = min(MOST_CELLS, shard_size // (32 * UNIT))
    if any(codec != "fp32" for codec in codecs):
        return max(1, large, min(16, shard_size // (4 * UNIT)))
    return max(1, large, min(16, shard_size // (2 * UNIT)), min(4, shard_size // 64))


def describe(
    tensors: Sequence[Any], *, shards: int, codec: str, down_codec: str, name: str
) -> Layout:
    """The layout of these tensors.

    Raises ValidationError for a tensor that is not of a float type, or holds no values.
    """
    facts = tuple(
        (t.dtype, tuple(t.shape), getattr(t, "is_meta", False), getattr(t, "layout", None))
        for t in tensors
    )
    return _describe(facts, shards, codec, down_codec, name)


@lru_cache(maxsize=16)
def _describe(
    facts: tuple[tuple[Any, tuple[int, ...], bool, Any], ...],
    shards: int,
    codec: str,
    down_codec: str,
    name: str,
) -> Layout:
    """The layout of tensors with these types, shapes, and whether and how they hold values."""
    specs = []
    for index, (dtype, shape, is_meta, kind) in enumerate(facts):
        if not _name_of(dtype).startswith(("float", "bfloat")):
            raise ValidationError(f"tensors[{index}]", _name_of(dtype), "expected a float type")
        if _is_of_torch(dtype) and (is_meta or str(kind) != "torch.strided"):
            kind = "on the meta device" if is_meta else str(kind)
            raise ValidationError(f"tensors[{index}]", kind, "expected a dense tensor with values")
        specs.append(TensorSpec(_name_of(dtype), tuple(int(n) for n in shape)))
    size = sum(spec.size for spec in specs)
    cells = cells_of(size // shards, (codec, down_codec))
    return Layout(tuple(specs), shards, codec, down_codec, name, cells)


def difference(mine: Layout, theirs: Layout) -> str:
    """One sentence on the first difference between the layouts; tensors are compared first."""
    for index, (ours, other) in enumerate(zip(mine.tensors, theirs.tensors, strict=False)):
        if ours != other:
            return f"tensor {index} is {other} there and {ours} here"
    if len(mine.tensors) != len(theirs.tensors):
        index = min(len(mine.tensors), len(theirs.tensors))
        extra, where = (mine, "here") if len(mine.tensors) > index else (theirs, "there")
        return f"tensor {index} ({extra.tensors[index]}) exists only {where}"
    for field in ("shards", "codec", "down_codec", "name"):
        ours, other = getattr(mine, field), getattr(theirs, field)
        if ours != other:
            label = "world_size" if field == "shards" else field
            return f"{label} is {other!r} there and {ours!r} here"
    if mine.cells != theirs.cells:
        return "the run is of another version of atoll"
    return "nothing differs"


def as_arrays(tensors: Sequence[Any]) -> list[Any]:
    """Torch tensors and arrays as they are; numbers and lists become arrays."""
    return [t if hasattr(t, "dtype") and hasattr(t, "shape") else np.asarray(t) for t in tensors]


def flatten(tensors: Sequence[Any], row: Vector) -> None:
    """Write the tensors one after the other into `row`, which is as long as they are together."""
    rows = [_numpy(tensor).reshape(-1) for tensor in tensors]
    for index, values in enumerate(rows):
        _check_range(index, values)
    if rows:
        np.concatenate(rows, out=row, casting="same_kind")


def unflatten(flat: Vector, tensors: Sequence[Any]) -> list[Any]:
    """The vector as tensors of the kind, type, shape and device of `tensors`; may share memory."""
    out: list[Any] = []
    start = 0
    for tensor in tensors:
        size = math.prod(tensor.shape)
        part = flat[start : start + size]
        start += size
        if _is_torch(tensor):
            out.append(_torch_like(part, tensor))
        else:
            out.append(part.reshape(tensor.shape).astype(tensor.dtype, copy=False))
    return out


def check_out(out: Sequence[Any], tensors: Sequence[Any]) -> None:
    """Raises ValidationError unless `out` has room for values like those of `tensors`."""
    if isinstance(out, str) or not isinstance(out, Sequence):
        raise ValidationError("out", type(out).__name__, "expected a list of tensors")
    if len(out) != len(tensors):
        raise ValidationError("out", len(out), f"expected {len(tensors)} tensors")
    for index, (room, tensor) in enumerate(zip(out, tensors, strict=True)):
        if not isinstance(room, np.ndarray) and not (hasattr(room, "dtype") and _is_torch(room)):
            raise ValidationError(f"out[{index}]", type(room).__name__, "expected a tensor")
        if _is_torch(room) != _is_torch(tensor):
            kinds = [type(each).__name__ for each in (room, tensor)]
            raise ValidationError(f"out[{index}]", kinds[0], f"expected a {kinds[1]}, as `tensors`")
        if (room.dtype, room.shape) != (tensor.dtype, tensor.shape):
            ours, theirs = (f"{_dtype_name(each)}{list(each.shape)}" for each in (room, tensor))
            raise ValidationError(f"out[{index}]", ours, f"expected {theirs}, as `tensors`")
        if not _is_torch(room) and not room.flags.writeable:
            raise ValidationError(f"out[{index}]", "read-only", "expected memory to write to")


def fill(flat: Vector, out: Sequence[Any]) -> list[Any]:
    """`out` holds the vector, which may lie there already."""
    first = next((row for each in out if (row := _row_of(each)) is not None and row.size), None)
    if first is not None and _address(first) == _address(flat):
        return list(out)
    start = 0
    for room in out:
        part = flat[start : start + math.prod(room.shape)].reshape(room.shape)
        start += part.size
        if _is_torch(room):
            import torch

            with torch.no_grad():
                room.copy_(torch.from_numpy(part))
        else:
            room[...] = part
    return list(out)


def as_vector(tensors: Sequence[Any]) -> Vector | None:
    """The memory of the tensors, if they are float32 and lie there one after the other.

    It is good as long as the tensors are: it does not keep them alive.
    """
    rows = list[NDArray[Any]]()
    for tensor in tensors:
        row = _row_of(tensor)
        if row is None:
            return None
        if row.size:
            rows.append(row)
    if not rows:
        return None
    at = _address(rows[0])
    for row in rows:
        if _address(row) != at:
            return None
        at += row.nbytes
    size = sum(row.size for row in rows)
    return np.lib.stride_tricks.as_strided(rows[0], (size,), (rows[0].itemsize,))


def are_apart(vector: Vector, tensors: Sequence[Any]) -> bool:
    """Whether none of the tensors, which are in this machine's memory, has any of the vector's."""
    first = _address(vector)
    for tensor in tensors:
        row = tensor if isinstance(tensor, np.ndarray) else _row_of(tensor)
        if row is None or not row.flags.c_contiguous:
            return False
        at = _address(row)
        if at < first + vector.nbytes and first < at + row.nbytes:
            return False
    return True


def _row_of(tensor: Any) -> NDArray[Any] | None:
    """The tensor as an array of the same memory, if it is float32 and in one piece."""
    if _is_torch(tensor):
        is_here = tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_neg()
        if not is_here or _dtype_name(tensor) != "float32":
            return None
        tensor = tensor.detach().numpy()
    is_plain = isinstance(tensor, np.ndarray) and tensor.dtype == np.float32
    return tensor if is_plain and tensor.flags.c_contiguous else None


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])


def split(flat: Vector, layout: Layout) -> list[Vector]:
    """The vector as float32 arrays of the layout's shapes."""
    ends = np.cumsum([spec.size for spec in layout.tensors])
    parts = np.split(flat, ends[:-1]) if layout.tensors else []
    return [part.reshape(spec.shape) for part, spec in zip(parts, layout.tensors, strict=True)]


def tensor_at(layout: Layout, place: int) -> int:
    """The index of the tensor that the value at `place` of the vector belongs to."""
    ends = np.cumsum([spec.size for spec in layout.tensors])
    return int(np.searchsorted(ends, place, side="right"))


def _dtype_name(tensor: Any) -> str:
    """The name of the type without its byte order, which may differ between replicas."""
    return _name_of(tensor.dtype)


@cache
def _name_of(dtype: Any) -> str:
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def _check_range(index: int, values: NDArray[Any]) -> None:
    if values.dtype.itemsize <= 4 or not values.size:
        return
    finite = np.abs(values[np.isfinite(values)])
    if finite.size and (top := finite.max()) > np.finfo(np.float32).max:
        raise ValidationError(
            f"tensors[{index}]", float(top), "expected what float32 can hold, as means travel in it"
        )


def _is_torch(tensor: Any) -> bool:
    return _is_of_torch(tensor.dtype)


@cache
def _is_of_torch(dtype: Any) -> bool:
    return str(dtype).startswith("torch.")


def _numpy(tensor: Any) -> NDArray[Any]:
    if _is_torch(tensor):
        tensor = tensor.detach().cpu()
        # numpy has no bfloat16, so torch casts it; float64 stays, to be checked before its cast.
        tensor = (tensor if tensor.dtype.itemsize > 4 else tensor.float()).numpy()
    return np.asarray(tensor)


def _torch_like(part: Vector, tensor: Any) -> Any:
    import torch

    return torch.from_numpy(part).reshape(tensor.shape).to(dtype=tensor.dtype, device=tensor.device)
