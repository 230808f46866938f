"""Tensors of torch and numpy as one float32 row, and back: kinds, types, shapes and devices stay.

Models have thousands of tensors: what is asked of each of them is asked without a step of Python.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, pairwise, repeat
from operator import attrgetter, eq, mul
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import ValidationError

Vector = NDArray[np.float32]

DTYPE, SHAPE = attrgetter("dtype"), attrgetter("shape")
DENSE = "torch.strided"
FLOATS = ("float", "bfloat")
CAT_DTYPES = ("float32", "float16", "bfloat16", "float64")  # that torch joins in one call


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def describe_tensors(tensors: Sequence[Any]) -> tuple[TensorSpec, ...]:
    """The types and shapes. Raises ValidationError for one that is not of a float type, or holds no
    values."""
    names = list(map(name_of, map(DTYPE, tensors)))
    kinds = {name for name in names if name.startswith(FLOATS)}
    if kinds != set(names) or not hold_values(tensors):
        for index, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
            if name not in kinds:
                raise ValidationError(f"tensors[{index}]", name, "expected a float type")
            if not hold_values([tensor]):
                kind = "on the meta device" if tensor.is_meta else str(tensor.layout)
                expected = "expected a dense tensor with values"
                raise ValidationError(f"tensors[{index}]", kind, expected)
    return tuple(map(TensorSpec, names, map(tuple, map(SHAPE, tensors))))


def hold_values(tensors: Sequence[Any]) -> bool:
    """Whether none of the tensors is sparse, or of a shape only. Arrays of numpy never are."""
    are_torch = set(map(_is_of_torch, set(map(DTYPE, tensors))))
    if len(are_torch) > 1:
        tensors = [tensor for tensor in tensors if _is_of_torch(tensor.dtype)]
    elif are_torch != {True}:
        return True
    kinds = set(map(attrgetter("layout"), tensors))
    return {str(kind) for kind in kinds} == {DENSE} and not any(map(attrgetter("is_meta"), tensors))


def as_arrays(tensors: Sequence[Any]) -> list[Any]:
    """Torch tensors and arrays as they are; numbers and lists become arrays."""
    if all(hasattr(kind, "dtype") and hasattr(kind, "shape") for kind in set(map(type, tensors))):
        return list(tensors)
    return [t if hasattr(t, "dtype") and hasattr(t, "shape") else np.asarray(t) for t in tensors]


def flatten(tensors: Sequence[Any], row: Vector) -> None:
    """Write the tensors one after the other into `row`, which is as long as they are together."""
    dtypes = set(map(DTYPE, tensors))
    if _are_here(tensors) and all(name_of(dtype) in CAT_DTYPES for dtype in dtypes):
        import torch

        with torch.no_grad():
            torch.cat(list(map(torch.Tensor.ravel, tensors)), out=torch.from_numpy(row))
    elif tensors:
        arrays = [_numpy(t) for t in tensors] if any(map(_is_of_torch, dtypes)) else tensors
        np.concatenate(arrays, axis=None, out=row, casting="same_kind")


def check_range(tensors: Sequence[Any]) -> None:
    """Raises ValidationError for a value that float32 does not hold."""
    if any(dtype.itemsize > 4 for dtype in set(map(DTYPE, tensors))):
        for index, tensor in enumerate(tensors):
            _check_range(index, tensor)


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
        is_torch = any(map(_is_of_torch, set(map(DTYPE, out))))
        if is_alike and (is_torch or all(map(attrgetter("flags.writeable"), out))):
            return
    for index, (room, tensor) in enumerate(zip(out, tensors, strict=True)):
        if not isinstance(room, np.ndarray) and not (
            hasattr(room, "dtype") and _is_of_torch(room.dtype)
        ):
            raise ValidationError(f"out[{index}]", type(room).__name__, "expected a tensor")
        if _is_of_torch(room.dtype) != _is_of_torch(tensor.dtype):
            kinds = [type(each).__name__ for each in (room, tensor)]
            raise ValidationError(f"out[{index}]", kinds[0], f"expected a {kinds[1]}, as `tensors`")
        if (room.dtype, room.shape) != (tensor.dtype, tensor.shape):
            ours, theirs = (f"{dtype_name(each)}{list(each.shape)}" for each in (room, tensor))
            raise ValidationError(f"out[{index}]", ours, f"expected {theirs}, as `tensors`")
        if not _is_of_torch(room.dtype) and not room.flags.writeable:
            raise ValidationError(f"out[{index}]", "read-only", "expected memory to write to")


def refuse_shared(out: Sequence[Any]) -> None:
    """Raises ValidationError if two values of `out` have the same memory."""
    spans = []
    for index, room in enumerate(out):
        strides = room.stride() if _is_of_torch(room.dtype) else room.strides
        if any(step == 0 and size > 1 for step, size in zip(strides, room.shape, strict=True)):
            raise ValidationError(f"out[{index}]", "expanded", "expected memory for every value")
        is_row = room.is_contiguous() if _is_of_torch(room.dtype) else room.flags.c_contiguous
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
        if _is_of_torch(room.dtype):
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
    row: Vector = tensors[0].detach().numpy() if _is_of_torch(tensors[0].dtype) else tensors[0]
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
    if not tensors or not _is_of_torch(tensors[0].dtype):
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


def dtype_name(tensor: Any) -> str:
    """The name of the type without its byte order, which may differ between replicas."""
    return name_of(tensor.dtype)


@cache
def name_of(dtype: Any) -> str:
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def _check_range(index: int, tensor: Any) -> None:
    if tensor.dtype.itemsize <= 4:
        return
    values = _numpy(tensor)
    finite = np.abs(values[np.isfinite(values)])
    if finite.size and (top := finite.max()) > np.finfo(np.float32).max:
        raise ValidationError(
            f"tensors[{index}]", float(top), "expected values in the range of float32"
        )


@cache
def _is_of_torch(dtype: Any) -> bool:
    return str(dtype).startswith("torch.")


def _numpy(tensor: Any) -> NDArray[Any]:
    if _is_of_torch(tensor.dtype):
        tensor = tensor.detach().cpu().resolve_neg()
        # numpy has no bfloat16, so torch casts it; float64 stays, to be checked before its cast.
        tensor = (tensor if tensor.dtype.itemsize > 4 else tensor.float()).numpy()
    return np.asarray(tensor)


def _like(part: Vector, tensor: Any) -> Any:
    if not _is_of_torch(tensor.dtype):
        return part.astype(tensor.dtype, copy=False)
    import torch

    return torch.from_numpy(part).to(dtype=tensor.dtype, device=tensor.device)
