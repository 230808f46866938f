"""The global parameters and the outer optimiser: what all replicas hold bit for bit alike.

Everything is fp32 in numpy. Each product and each sum is rounded on its own, never fused, so the
bits do not depend on the processor, the number of threads or the build of torch.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import ValidationError

Floats = NDArray[np.float32]

# Values per pass of the optimiser: three rows of this stay in the cache.
_SLICE = 1 << 16
_LENGTH = struct.Struct("<Q")


class Slot(NamedTuple):
    """Where one parameter lies in the row of its fragment."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Fragment:
    """Some parameters that are synchronised together, as one row."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        size = slots[-1].stop if slots else 0
        self.values = np.zeros(size, np.float32)
        self.momentum = np.zeros(size, np.float32)

    def step(self, gradient: Floats, lr: float, beta: float) -> None:
        """One step of `torch.optim.SGD(nesterov=True)`: m = beta m + g; x -= lr (g + beta m).

        The gradient is where we were minus where we are, so lr 1 without momentum lands on the
        mean of the replicas.
        """
        lr32, beta32 = np.float32(lr), np.float32(beta)
        spare = np.empty(min(_SLICE, self.values.size), np.float32)
        for start in range(0, self.values.size, _SLICE):
            values = self.values[start : start + _SLICE]
            momentum = self.momentum[start : start + _SLICE]
            g = gradient[start : start + _SLICE]
            change = spare[: g.size]
            momentum *= beta32
            momentum += g
            np.multiply(momentum, beta32, out=change)
            change += g
            change *= lr32
            values -= change

    def rows(self, row: Floats) -> list[Floats]:
        """`row` as one view for each parameter."""
        return [row[slot.start : slot.stop].reshape(slot.shape) for slot in self.slots]


def split(shapes: Sequence[tuple[str, tuple[int, ...]]], parts: int) -> list[Fragment]:
    """Fragments of about equal size; every parameter is in exactly one of them."""
    sizes = [int(np.prod(shape)) for _, shape in shapes]
    members: list[list[int]] = [[] for _ in range(parts)]
    loads = [0] * parts
    # Largest first to the emptiest: within a few percent of even for real models.
    for at in sorted(range(len(shapes)), key=lambda at: (-sizes[at], at)):
        emptiest = loads.index(min(loads))
        members[emptiest].append(at)
        loads[emptiest] += sizes[at]
    if not all(members):
        raise ValidationError(
            "fragments", parts, f"expected at most {len(shapes)}, one for each parameter"
        )
    return [Fragment(_slots(shapes, sorted(chosen))) for chosen in members]


def _slots(shapes: Sequence[tuple[str, tuple[int, ...]]], chosen: Sequence[int]) -> list[Slot]:
    slots, start = [], 0
    for at in chosen:
        name, shape = shapes[at]
        stop = start + int(np.prod(shape))
        slots.append(Slot(name, tuple(shape), start, stop))
        start = stop
    return slots


class _Header(msgspec.Struct, frozen=True):
    layout: list[list[Slot]]
    digest: str


def to_bytes(fragments: Sequence[Fragment]) -> bytes:
    """Values and momentum of all fragments, in one object that says what it holds."""
    rows = [row for fragment in fragments for row in (fragment.values, fragment.momentum)]
    body = b"".join(row.astype("<f4", copy=False).tobytes() for row in rows)
    layout = [list(fragment.slots) for fragment in fragments]
    header = msgspec.json.encode(_Header(layout, hashlib.sha256(body).hexdigest()))
    return b"".join([_LENGTH.pack(len(header)), header, body])


def load_bytes(fragments: Sequence[Fragment], data: bytes | memoryview) -> None:
    """Take over what `to_bytes` made; raises ValueError and changes nothing if it does not fit."""
    view = memoryview(data).cast("B")
    try:
        (length,) = _LENGTH.unpack_from(view)
        header = msgspec.json.decode(view[8 : 8 + length], type=_Header)
    except (struct.error, msgspec.MsgspecError) as error:
        raise ValueError(f"not a checkpoint of global parameters: {error}") from error
    wanted = [list(fragment.slots) for fragment in fragments]
    if header.layout != wanted:
        raise ValueError(_difference(header.layout, wanted))
    body = view[8 + length :]
    if len(body) != 8 * sum(fragment.values.size for fragment in fragments):
        raise ValueError(f"a checkpoint with {len(body)} bytes of parameters is cut short")
    if hashlib.sha256(body).hexdigest() != header.digest:
        raise ValueError("a checkpoint's bytes do not match its digest")
    row = np.frombuffer(body, "<f4")
    for fragment in fragments:
        size = fragment.values.size
        fragment.values[:], fragment.momentum[:], row = (
            row[:size],
            row[size : 2 * size],
            row[2 * size :],
        )


def _difference(found: list[list[Slot]], wanted: list[list[Slot]]) -> str:
    if len(found) != len(wanted):
        return f"the checkpoint has {len(found)} fragments, this replica {len(wanted)}"
    for theirs, ours in zip(found, wanted, strict=True):
        for their, our in zip(theirs, ours, strict=False):
            if their != our:
                return (
                    f"the checkpoint has {their.name} {list(their.shape)} where this replica has "
                    f"{our.name} {list(our.shape)}"
                )
    return "the checkpoint holds other parameters than this replica"
