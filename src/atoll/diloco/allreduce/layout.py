"""The shape of what is averaged: tensors as one float32 vector, cut into shards, and into cells.

All replicas of a round must have the same layout; its fingerprint is in every object's name.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Sequence
from functools import cache, cached_property
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
    if "sparse" in codecs:
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
    specs = []
    for index, tensor in enumerate(tensors):
        dtype = _dtype_name(tensor)
        if not dtype.startswith(("float", "bfloat")):
            raise ValidationError(f"tensors[{index}]", dtype, "expected a float type")
        if _is_torch(tensor) and (tensor.is_meta or str(tensor.layout) != "torch.strided"):
            kind = "on the meta device" if tensor.is_meta else str(tensor.layout)
            raise ValidationError(f"tensors[{index}]", kind, "expected a dense tensor with values")
        specs.append(TensorSpec(dtype, tuple(int(n) for n in tensor.shape)))
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


def scatter(tensors: Sequence[Any], parts: Sequence[Vector]) -> None:
    """Write the tensors one after the other into `parts`, which together are as long."""
    targets = iter(parts)
    room = next(targets)
    for index, tensor in enumerate(tensors):
        values = _numpy(tensor).reshape(-1)
        _check_range(index, values)
        while len(values):
            while not len(room):
                room = next(targets)
            count = min(len(values), len(room))
            room[:count] = values[:count]
            room, values = room[count:], values[count:]


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
