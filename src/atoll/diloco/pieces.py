"""Which piece of each parameter a process holds, and where its values lie in the whole.

A piece is a block: an interval in each dimension. Its values, in their own order, are in the order
of the whole too, so what lies between two places of the whole is one slice of the piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import ValidationError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# Compiling and checkpointing a part of a model put this into the names of its parameters.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
# Classes that hold a whole model, and where.
OUTER = {
    "OptimizedModule": "_orig_mod",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
}
_SUMMED = 1 << 16  # values at a time; even, so that the odd places stay odd
_HOLDER = "module."  # what holds a model of which nothing else is known


class Dim(NamedTuple):
    """One dimension of the whole, and the interval of it that a piece has."""

    size: int
    offset: int
    length: int


class Piece(NamedTuple):
    """What one process holds of a parameter."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        return math.prod(self.lengths)

    @property
    def is_complete(self) -> bool:
        return self.lengths == self.shape

    @property
    def dims(self) -> tuple[Dim, ...]:
        return collapsed(self.shape, self.offset, self.lengths)


@lru_cache(maxsize=100_000)
def collapsed(
    shape: tuple[int, ...], offset: tuple[int, ...], lengths: tuple[int, ...]
) -> tuple[Dim, ...]:
    """The dimensions of a piece, outermost first. One that is whole is part of the one outside.

    So a piece of rows has one dimension, a piece of columns two.
    """
    dims = [Dim(1, 0, 1)]
    for dim in map(Dim._make, zip(shape, offset, lengths, strict=True)):
        outer = dims[-1]
        if dim.length == dim.size:
            dims[-1] = Dim(outer.size * dim.size, outer.offset * dim.size, outer.length * dim.size)
        elif outer == (1, 0, 1):
            dims[-1] = dim
        else:
            dims.append(dim)
    return tuple(dims)


def before(dims: Sequence[Dim], location: int) -> int:
    """How many values of the piece lie before `place` of the whole."""
    stride, inner = math.prod(d.size for d in dims), math.prod(d.length for d in dims)
    if location >= stride:
        return inner
    count = 0
    for dim in dims:
        if not inner:
            return 0
        stride, inner = stride // dim.size, inner // dim.length
        digit, location = divmod(location, stride)
        row = digit - dim.offset
        if row < 0:
            return count
        if row >= dim.length:
            return count + dim.length * inner
        count += row * inner
    return count


def locations(dims: Sequence[Dim], start: int, stop: int) -> NDArray[np.int64]:
    """The places in the whole of the values `start:stop` of the piece."""
    remainder = np.arange(start, stop, dtype=np.int64)
    out = np.zeros(stop - start, np.int64)
    if stop <= start:
        return out
    stride, inner = math.prod(d.size for d in dims), math.prod(d.length for d in dims)
    for dim in dims:
        stride, inner = stride // dim.size, inner // dim.length
        digit, remainder = np.divmod(remainder, inner)
        out += (digit + dim.offset) * stride
    return out


def plain_name(name: str) -> str:
    """The name of a parameter without what compiling and checkpointing put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model without what is around it."""
    while type(model).__name__ in OUTER:
        model = getattr(model, OUTER[type(model).__name__])
    return model


def plain_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """All parameters, by names that do not tell of what is around the model or its parts."""
    return plain_names(model, dict(unwrapped(model).named_parameters()))


def plain_names(model: torch.nn.Module, values: dict[str, T]) -> dict[str, T]:
    """`values`, by their names in the unwrapped model, by the names they have without wrappers."""
    wrapped = [
        (f"{name}.{OUTER[type(part).__name__]}.", f"{name}.")
        for name, part in unwrapped(model).named_modules()
        if type(part).__name__ in OUTER
    ]
    # Inner parts first, as the names of those around them are still whole then.
    wrapped.sort(key=lambda each: -len(each[0]))

    def plain(name: str) -> str:
        for inside, outside in wrapped:
            if name.startswith(inside):
                name = outside + name[len(inside) :]
        return plain_name(name)

    named = {plain(name): value for name, value in values.items()}
    while named and all(name.startswith(_HOLDER) for name in named):
        named = {name[len(_HOLDER) :]: value for name, value in named.items()}
    return named if len(named) == len(values) else values


def check_module(model: Any) -> None:
    """Raises ValidationError for what is no model."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise ValidationError("model", type(model).__name__, "expected a torch.nn.Module")


def read_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that are trained, by their plain names.

    Raises ValidationError for a model without one, or with one that cannot be synchronised.
    """
    import torch

    kinds = {type(module).__name__ for module in model.modules()}
    if "FullyShardedDataParallel" in kinds:
        raise ValidationError(
            "model", "FullyShardedDataParallel", "expected fully_shard, the second FSDP"
        )
    named: dict[str, torch.nn.Parameter] = {}
    for name, value in plain_parameters(model).items():
        if not value.requires_grad:
            continue
        if not value.is_floating_point():
            raise ValidationError(f"model.{name}", value.dtype, "expected a float type")
        if isinstance(value, torch.nn.parameter.UninitializedParameter):
            raise ValidationError(
                f"model.{name}", "without a shape", "expected the model to have seen a batch before"
            )
        if value.is_meta:
            raise ValidationError(f"model.{name}", "on the meta device", "expected it with values")
        named[name] = value
    if not named:
        raise ValidationError("model", model, "expected a parameter with requires_grad")
    return named


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """The values that this process holds; writing to them changes the parameter."""
    import torch

    if not hasattr(parameter, "to_local"):
        return parameter.detach()
    with torch.no_grad():  # it is quick then
        return parameter.to_local().detach()  # type: ignore[no-any-return]


def read_piece(name: str, parameter: torch.Tensor, ranks: Sequence[int]) -> Piece:
    """What this process holds of the parameter; `ranks` are the processes of the replica.

    Raises ValidationError that says what it is about the parameter that cannot be handled.
    """
    shape, dtype = tuple(parameter.shape), str(parameter.dtype).removeprefix("torch.")
    if not hasattr(parameter, "placements"):
        return Piece(shape, (0,) * len(shape), shape, dtype)
    where = f"model.{name}"
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    foreign = sorted(set(mesh.mesh.flatten().tolist()) - set(ranks))
    if foreign:
        raise ValidationError(
            where, f"on ranks {foreign}", f"expected a mesh within the replica, ranks {list(ranks)}"
        )
    for placement in parameter.placements:
        if not (placement.is_replicate() or _is_shard(placement)):
            raise ValidationError(
                where, repr(placement), "expected Shard or Replicate: no process has its values"
            )
    local = tuple(local_tensor(parameter).shape)
    lengths, offset = _block(parameter)
    if lengths != local:
        raise ValidationError(
            where, str(parameter.placements), f"expected a piece of {lengths}, found {local}"
        )
    return Piece(shape, offset, lengths, dtype)


def _is_shard(placement: Any) -> bool:
    return bool(placement.is_shard()) or type(placement).__name__ == "_StridedShard"


def _block(parameter: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    # Not public; what it says is checked against the local tensor, and the values by tests.
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    lengths, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return tuple(int(n) for n in lengths), tuple(int(n) for n in offset)


def check_pieces(pieces: Sequence[dict[str, Piece]]) -> None:
    """Raises ValidationError unless the pieces of all processes make every parameter once."""
    first = pieces[0]
    for process, each in enumerate(pieces[1:], 1):
        if list(each) != list(first):
            both = zip([*each, None], [*first, None], strict=False)
            name = next(ours or theirs for ours, theirs in both if ours != theirs)
            raise ValidationError(
                f"model.{name}",
                f"process {process}",
                "expected all processes of a replica to have the same parameters, in one order "
                "(stages of a pipeline cannot be one replica)",
            )
    for name, piece in first.items():
        stored = [each[name] for each in pieces]
        for process, other in enumerate(stored):
            if (other.shape, other.dtype) != (piece.shape, piece.dtype):
                raise ValidationError(
                    f"model.{name}",
                    f"{other.dtype}{list(other.shape)} in process {process}",
                    f"expected {piece.dtype}{list(piece.shape)}, as in process 0",
                )
        blocks = {(other.offset, other.lengths) for other in stored if other.size}
        size = math.prod(piece.shape)
        total = sum(math.prod(lengths) for _, lengths in blocks)
        if total != size:
            raise ValidationError(
                f"model.{name}",
                f"{total} of {size} values",
                f"expected the pieces of {len(pieces)} processes to make the whole once",
            )


def fingerprint(local: torch.Tensor) -> tuple[int, int]:
    """Two sums over the bits of the values: processes that hold the same have the same."""
    import torch

    if not local.numel():
        return 0, 0
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = local.contiguous().view(-1).view(kinds[local.element_size()])
    total = odd = 0
    # In parts: a sum in another type copies what it sums.
    for part in torch.split(bits, _SUMMED if local.device.type == "cpu" else bits.numel()):
        total += int(part.sum(dtype=torch.int64))
        odd += int(part[1::2].sum(dtype=torch.int64))
    return _signed(total), _signed(odd)


def _signed(total: int) -> int:
    """As a sum in 64 bits has it."""
    return (total + (1 << 63)) % (1 << 64) - (1 << 63)


def shared_twice(pieces: Sequence[dict[str, Piece]]) -> list[str]:
    """The parameters of which two processes hold the same piece."""
    return [
        name
        for name in pieces[0]
        if len({(each[name].offset, each[name].lengths) for each in pieces}) < len(pieces)
    ]


def check_equal(pieces: Sequence[dict[str, Piece]], sums: Sequence[dict[str, Any]]) -> None:
    """Raises ValidationError for a piece that two processes hold with different values."""
    for name in shared_twice(pieces):
        known: dict[Any, tuple[int, Any]] = {}
        for process, each in enumerate(pieces):
            piece = each[name]
            other, value = known.setdefault(
                (piece.offset, piece.lengths), (process, sums[process][name])
            )
            if value != sums[process][name]:
                raise ValidationError(
                    f"model.{name}",
                    f"of process {process}",
                    f"expected the values of process {other}, as both hold the same piece: wrap "
                    "the model in DistributedDataParallel or fully_shard, so that it trains as one",
                )
