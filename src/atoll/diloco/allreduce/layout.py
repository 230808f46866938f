"""The shape of what is averaged: tensors as one float32 vector, cut into shards, and into cells.

All replicas of a round must have the same layout; its fingerprint is in every object's name.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Sequence
from functools import cache, cached_property
from itertools import accumulate, pairwise, repeat
from operator import attrgetter, eq, mul
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import ValidationError
from atoll.core.model import json_decoder

Vector = NDArray[np.float32]

UNIT = 4096  # values; a multiple of every codec's blocks
MAX_CELLS = 64

MAX_BYTES = 8 << 20  # of a layout as JSON: some 200,000 tensors

# Models have thousands of tensors: what is asked of each of them is asked without a step of Python.
DTYPE, SHAPE = attrgetter("dtype"), attrgetter("shape")
DENSE = "torch.strided"
CAT_DTYPES = ("float32", "float16", "bfloat16", "float64")  # that torch joins in one call


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
    cells: Annotated[int, msgspec.Meta(ge=0, le=MAX_CELLS)] = 0

    @cached_property
    def size(self) -> int:
        return sum(spec.size for spec in self.tensors)

    @property
    def cut(self) -> tuple[int, str, str, str]:
        return self.shards, self.codec, self.down_codec, self.name

    @cached_property
    def dtypes(self) -> list[str]:
        return [spec.dtype for spec in self.tensors]

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        return [spec.shape for spec in self.tensors]

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
        if len(text) > MAX_BYTES:
            raise ValidationError(
                "tensors",
                f"{len(self.tensors)} tensors",
                f"expected shapes that take at most {MAX_BYTES >> 20} MiB as JSON, "
                f"these take {len(text) >> 20} MiB: join small tensors",
            )
        return zlib.compress(text)

    @staticmethod
    def unpack(data: bytes) -> Layout:
        """Raises ValueError on anything that `pack` did not make, however far it would expand."""
        decoder = zlib.decompressobj()
        try:
            text = decoder.decompress(data, MAX_BYTES + 1)
            if len(text) > MAX_BYTES:
                raise ValueError(f"not a layout: it expands to more than {MAX_BYTES} bytes")
            return _LAYOUT.decode(text)
        except (zlib.error, msgspec.MsgspecError) as error:
            raise ValueError(f"not a layout: {error}") from error


_LAYOUT = json_decoder(Layout)


def cells_of(shard_size: int, codecs: Sequence[str]) -> int:
    """How many cells a shard has: enough for many processes, few enough to cost next to nothing."""
    if any(codec.startswith("sparse") for codec in codecs):
        return max(1, min(MAX_CELLS, shard_size // (64 * UNIT)))
    large = min(MAX_CELLS, shard_size // (32 * UNIT))
    if any(codec != "fp32" for codec in codecs):
        return max(1, large, min(16, shard_size // (4 * UNIT)))
    return max(1, large, min(16, shard_size // (2 * UNIT)), min(4, shard_size // 64))


def describe(
    tensors: Sequence[Any],
    *,
    shards: int,
    codec: str,
    down_codec: str,
    name: str,
    known: Layout | None = None,
) -> Layout:
    """The layout of these tensors; `known` itself, if it is that of tensors like them.

    Raises ValidationError for a tensor that is not of a float type, or holds no values.
    """
    cut = (shards, codec, down_codec, name)
    if known is not None and known.cut == cut and _is_of(known, tensors):
        return known
    specs = []
    for index, tensor in enumerate(tensors):
        if not _dtype_name(tensor).startswith(("float", "bfloat")):
            messages = "expected a float type"
            raise ValidationError(f"tensors[{index}]", _dtype_name(tensor), messages)
        if not _hold_values([tensor]):
            kind = "on the meta device" if tensor.is_meta else str(tensor.layout)
            raise ValidationError(f"tensors[{index}]", kind, "expected a dense tensor with values")
        specs.append(TensorSpec(_dtype_name(tensor), tuple(int(n) for n in tensor.shape)))
    size = sum(spec.size for spec in specs)
    return Layout(tuple(specs), *cut, cells_of(size // shards, (codec, down_codec)))


def _is_of(layout: Layout, tensors: Sequence[Any]) -> bool:
    """Whether the layout is of tensors of the same types and shapes as these, and all are good."""
    if len(tensors) != len(layout.tensors):
        return False
    # Looked up rather than compared one by one: there are few types, and thousands of tensors.
    names = {dtype: _name_of(dtype) for dtype in set(map(DTYPE, tensors))}
    has_dtypes = all(map(eq, map(names.__getitem__, map(DTYPE, tensors)), layout.dtypes))
    return has_dtypes and all(map(eq, map(SHAPE, tensors), layout.shapes)) and _hold_values(tensors)


def _hold_values(tensors: Sequence[Any]) -> bool:
    """Whether none of the tensors is sparse, or of a shape only. Arrays of numpy never are."""
    are_torch = set(map(_is_of_torch, set(map(DTYPE, tensors))))
    if len(are_torch) > 1:
        tensors = [tensor for tensor in tensors if _is_torch(tensor)]
    elif are_torch != {True}:
        return True
    kinds = set(map(attrgetter("layout"), tensors))
    return {str(kind) for kind in kinds} == {DENSE} and not any(map(attrgetter("is_meta"), tensors))


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
    if all(hasattr(kind, "dtype") and hasattr(kind, "shape") for kind in set(map(type, tensors))):
        return list(tensors)
    return [t if hasattr(t, "dtype") and hasattr(t, "shape") else np.asarray(t) for t in tensors]


def flatten(tensors: Sequence[Any], row: Vector) -> None:
    """Write the tensors one after the other into `row`, which is as long as they are together."""
    dtypes = set(map(DTYPE, tensors))
    if any(dtype.itemsize > 4 for dtype in dtypes):
        for index, tensor in enumerate(tensors):
            _check_range(index, tensor)
    if _are_here(tensors) and all(_name_of(dtype) in CAT_DTYPES for dtype in dtypes):
        import torch

        with torch.no_grad():
            torch.cat(list(map(torch.Tensor.ravel, tensors)), out=torch.from_numpy(row))
    elif tensors:
        arrays = [_numpy(t) for t in tensors] if _have_torch(tensors) else tensors
        np.concatenate(arrays, axis=None, out=row, casting="same_kind")


def unflatten(flat: Vector, tensors: Sequence[Any]) -> list[Any]:
    """The vector as tensors of the kind, type, shape and device of `tensors`; may share memory."""
    dtypes = set(map(DTYPE, tensors))
    if _are_here(tensors):
        import torch

        # Not views to torch: those that one call made may not be written to.
        sizes = list(map(torch.Tensor.numel, tensors))
        rows = torch.unsafe_split_with_sizes(torch.from_numpy(flat), sizes)
        parts = list(map(torch.Tensor.view_as, rows, tensors))
        return (
            parts if dtypes == {torch.float32} else list(map(torch.Tensor.type_as, parts, tensors))
        )
    cuts = _cut(flat, tensors)
    if dtypes <= {flat.dtype}:
        return cuts
    return [_like(part, tensor) for part, tensor in zip(cuts, tensors, strict=True)]


def _cut(flat: Vector, tensors: Sequence[Any]) -> list[Vector]:
    """The vector as arrays of the shapes of the tensors, of the same memory."""
    shapes = list(map(SHAPE, tensors))
    starts = accumulate(map(mul, map(math.prod, shapes), repeat(flat.itemsize)), initial=0)
    array: Any = np.ndarray
    return list(map(array, shapes, repeat(flat.dtype), repeat(flat), starts))


def check_out(out: Sequence[Any], tensors: Sequence[Any]) -> None:
    """Raises ValidationError unless `out` has room for values like those of `tensors`."""
    if isinstance(out, str) or not isinstance(out, Sequence):
        raise ValidationError("out", type(out).__name__, "expected a list of tensors")
    if len(out) != len(tensors):
        raise ValidationError("out", len(out), f"expected {len(tensors)} tensors")
    if set(map(type, out)) | set(map(type, tensors)) == {np.ndarray} or _are_here([*out, *tensors]):
        is_alike = all(all(map(eq, map(of, out), map(of, tensors))) for of in (DTYPE, SHAPE))
        if is_alike and (_have_torch(out) or all(map(attrgetter("flags.writeable"), out))):
            return
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


def refuse_shared(out: Sequence[Any]) -> None:
    """Raises ValidationError if two values of `out` have the same memory."""
    spans = []
    for index, room in enumerate(out):
        strides = room.stride() if _is_torch(room) else room.strides
        if any(step == 0 and size > 1 for step, size in zip(strides, room.shape, strict=True)):
            raise ValidationError(f"out[{index}]", "expanded", "expected memory for every value")
        is_row = room.is_contiguous() if _is_torch(room) else room.flags.c_contiguous
        if is_row and room.nbytes:  # others may lie between each other's values
            location = str(getattr(room, "device", "cpu")), _address(room)
            spans.append((*location, location[1] + room.nbytes, index))
    spans.sort()
    for (where, _, end, first), (other, start, _, second) in pairwise(spans):
        if where == other and start < end:
            messages = f"in memory of out[{min(first, second)}]"
            raise ValidationError(
                f"out[{max(first, second)}]", messages, "expected memory of its own"
            )


def fill(flat: Vector, out: Sequence[Any]) -> list[Any]:
    """`out` holds the vector, which may lie there already."""
    first = next((each for each in out if math.prod(each.shape)), None)
    if first is not None and _are_plain([first]) and _address(first) == _address(flat):
        return list(out)
    for room, part in zip(out, _cut(flat, out), strict=True):
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
    # Most tensors lie apart, and the first two of them tell.
    if not _are_in_a_row(tensors[:2]) or not _are_in_a_row(tensors):
        return None
    size = sum(map(math.prod, map(SHAPE, tensors)))
    row: Vector = tensors[0].detach().numpy() if _is_torch(tensors[0]) else tensors[0]
    return np.lib.stride_tricks.as_strided(row, (size,), (row.itemsize,))


def _are_in_a_row(tensors: Sequence[Any]) -> bool:
    """Whether the tensors are float32 and lie in this machine's memory one after the other."""
    if not tensors or not _are_plain(tensors):
        return False
    locations = accumulate(map(attrgetter("nbytes"), tensors), initial=_address(tensors[0]))
    return all(map(eq, map(_address, tensors), locations))


def are_apart(vector: Vector, tensors: Sequence[Any]) -> bool:
    """Whether none of the tensors, which are in this machine's memory, has any of the vector's."""
    if set(map(type, tensors)) <= {np.ndarray}:
        return not any(map(np.may_share_memory, repeat(vector), tensors))
    if not _are_plain(tensors):
        return False
    starts = np.fromiter(map(_address, tensors), np.uint64)
    ends = starts + np.fromiter(map(attrgetter("nbytes"), tensors), np.uint64)
    first = _address(vector)
    return not ((starts < first + vector.nbytes) & (ends > first)).any()


def _are_here(tensors: Sequence[Any]) -> bool:
    """Whether these are plain tensors of torch in this machine's memory."""
    if not tensors or not _is_torch(tensors[0]):
        return False
    import torch

    is_plain = set(map(type, tensors)) <= {torch.Tensor, torch.nn.Parameter}
    return is_plain and all(map(attrgetter("is_cpu"), tensors))


def _are_plain(tensors: Sequence[Any]) -> bool:
    """Whether each of the tensors is float32 and in one piece of this machine's memory."""
    if set(map(type, tensors)) == {np.ndarray}:
        is_complete = all(map(attrgetter("flags.c_contiguous"), tensors))
        return is_complete and set(map(DTYPE, tensors)) == {np.dtype(np.float32)}
    if not _are_here(tensors):
        return False
    import torch

    is_complete = all(map(torch.Tensor.is_contiguous, tensors))
    is_plain = is_complete and not any(map(torch.Tensor.is_neg, tensors))
    return is_plain and set(map(DTYPE, tensors)) == {torch.float32}


def _address(tensor: Any) -> int:
    if isinstance(tensor, np.ndarray):
        return int(tensor.__array_interface__["data"][0])
    return int(tensor.data_ptr())


def split(flat: Vector, layout: Layout) -> list[Vector]:
    """The vector as float32 arrays of the layout's shapes."""
    ends = np.cumsum([spec.size for spec in layout.tensors])
    parts = np.split(flat, ends[:-1]) if layout.tensors else []
    return [part.reshape(spec.shape) for part, spec in zip(parts, layout.tensors, strict=True)]


def tensor_at(layout: Layout, location: int) -> int:
    """The index of the tensor that the value at `place` of the vector belongs to."""
    ends = np.cumsum([spec.size for spec in layout.tensors])
    return int(np.searchsorted(ends, location, side="right"))


def _dtype_name(tensor: Any) -> str:
    """The name of the type without its byte order, which may differ between replicas."""
    return _name_of(tensor.dtype)


@cache
def _name_of(dtype: Any) -> str:
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def _check_range(index: int, tensor: Any) -> None:
    if tensor.dtype.itemsize <= 4:
        return
    values = _numpy(tensor)
    finite = np.abs(values[np.isfinite(values)])
    if finite.size and (top := finite.max()) > np.finfo(np.float32).max:
        raise ValidationError(
            f"tensors[{index}]", float(top), "expected what float32 can hold, as means travel in it"
        )


def _have_torch(tensors: Sequence[Any]) -> bool:
    return any(map(_is_of_torch, set(map(DTYPE, tensors))))


def _is_torch(tensor: Any) -> bool:
    return _is_of_torch(tensor.dtype)


@cache
def _is_of_torch(dtype: Any) -> bool:
    return str(dtype).startswith("torch.")


def _numpy(tensor: Any) -> NDArray[Any]:
    if _is_torch(tensor):
        tensor = tensor.detach().cpu().resolve_neg()
        # numpy has no bfloat16, so torch casts it; float64 stays, to be checked before its cast.
        tensor = (tensor if tensor.dtype.itemsize > 4 else tensor.float()).numpy()
    return np.asarray(tensor)


def _like(part: Vector, tensor: Any) -> Any:
    if not _is_torch(tensor):
        return part.astype(tensor.dtype, copy=False)
    import torch

    return torch.from_numpy(part).to(dtype=tensor.dtype, device=tensor.device)
