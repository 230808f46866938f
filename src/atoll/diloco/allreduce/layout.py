"""The shape of what is averaged: tensors as one float32 vector, cut into shards, and into cells.

All replicas of a round must have the same layout; its fingerprint is in every object's name.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from functools import cached_property
from operator import eq
from typing import Annotated, Any

import msgspec
import numpy as np

from atoll.core.errors import ValidationError
from atoll.core.model import json_decoder
from atoll.diloco.packing import (
    DTYPE,
    SHAPE,
    TensorSpec,
    Vector,
    describe_tensors,
    hold_values,
    name_of,
)

UNIT = 4096  # values; a multiple of every codec's blocks
MAX_CELLS = 64

MAX_BYTES = 8 << 20  # of a layout as JSON: some 200,000 tensors


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
    specs = describe_tensors(tensors)
    size = sum(spec.size for spec in specs)
    return Layout(specs, *cut, cells_of(size // shards, (codec, down_codec)))


def _is_of(layout: Layout, tensors: Sequence[Any]) -> bool:
    """Whether the layout is of tensors of the same types and shapes as these, and all are good."""
    if len(tensors) != len(layout.tensors):
        return False
    # Looked up rather than compared one by one: there are few types, and thousands of tensors.
    names = {dtype: name_of(dtype) for dtype in set(map(DTYPE, tensors))}
    has_dtypes = all(map(eq, map(names.__getitem__, map(DTYPE, tensors)), layout.dtypes))
    return has_dtypes and all(map(eq, map(SHAPE, tensors), layout.shapes)) and hold_values(tensors)


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


def split(flat: Vector, layout: Layout) -> list[Vector]:
    """The vector as float32 arrays of the layout's shapes."""
    ends = np.cumsum([spec.size for spec in layout.tensors])
    parts = np.split(flat, ends[:-1]) if layout.tensors else []
    return [part.reshape(spec.shape) for part, spec in zip(parts, layout.tensors, strict=True)]


def tensor_at(layout: Layout, location: int) -> int:
    """The index of the tensor that the value at `place` of the vector belongs to."""
    ends = np.cumsum([spec.size for spec in layout.tensors])
    return int(np.searchsorted(ends, location, side="right"))
