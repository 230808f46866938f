"""The global parameters and the outer optimiser: what all replicas hold with the same bits.

Values are fp32 and computed in numpy: every operation rounds as IEEE 754 says and none is left to
a compiler, so the bits do not depend on the processor, the threads or the build of torch.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import ValidationError
from atoll.diloco.allreduce.layout import Layout, TensorSpec
from atoll.diloco.allreduce.share import Share
from atoll.diloco.pieces import plain_name

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
    """Some parameters that are synchronised together, as one row, and their outer optimiser."""

    def __init__(self, slots: Sequence[Slot], lr: float = 0.7, beta: float = 0.9) -> None:
        self.slots = tuple(slots)
        self.lr, self.beta = lr, beta
        self.rounds = 0
        specs = tuple(TensorSpec("float32", slot.shape) for slot in slots)
        self.carry(Share(Layout(specs, 1, "fp32", "fp32", "", 1)))

    def carry(self, share: Share) -> None:
        """From here on the rows hold `share` of the values; they are zeros."""
        self.share = share
        self.values = np.zeros(share.size, np.float32)
        self.momentum = np.zeros(share.size, np.float32)

    @property
    def has_momentum(self) -> bool:
        return self.rounds > 0

    def spans(self) -> Iterator[tuple[Slot, int, int]]:
        """Each parameter of which the rows hold something, and where: once for each run of it."""
        starts = [slot.start for slot in self.slots]
        row = 0
        for start, stop in self.share.intervals:
            at = bisect_right(starts, start) - 1
            while at < len(self.slots) and self.slots[at].start < stop:
                slot = self.slots[at]
                size = min(stop, slot.stop) - max(start, slot.start)
                if size > 0:
                    yield slot, row, row + size
                    row += size
                at += 1

    def step(self, gradient: Floats) -> None:
        """One step of `torch.optim.SGD(nesterov=True)`: m = beta m + g; x -= lr (g + beta m).

        The gradient is where we were minus where we are, so lr 1 without momentum lands on the
        mean of the replicas.
        """
        self.rounds += 1
        lr, beta = np.float32(self.lr), np.float32(self.beta)
        wide = np.empty(min(_SLICE, self.values.size), np.float64)
        for start in range(0, self.values.size, _SLICE):
            values = self.values[start : start + _SLICE]
            momentum = self.momentum[start : start + _SLICE]
            g = gradient[start : start + _SLICE]
            change = wide[: g.size]
            momentum *= beta
            momentum += g
            # A product of two fp32 is exact in fp64: one rounding each, as torch's fused ones.
            np.multiply(momentum, beta, out=change, dtype=np.float64)
            change += g
            np.multiply(change.astype(np.float32), lr, out=change, dtype=np.float64)
            np.subtract(values, change, out=values, casting="same_kind")

    def rows(self, row: Floats) -> list[Floats]:
        """`row`, of all values, as one view for each parameter."""
        return [row[slot.start : slot.stop].reshape(slot.shape) for slot in self.slots]


def split(
    shapes: Sequence[tuple[str, tuple[int, ...]]], parts: int, lr: float = 0.7, beta: float = 0.9
) -> list[Fragment]:
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
    return [Fragment(_slots(shapes, sorted(indexes)), lr, beta) for indexes in members]


def _slots(shapes: Sequence[tuple[str, tuple[int, ...]]], indexes: Sequence[int]) -> list[Slot]:
    slots, start = [], 0
    for at in indexes:
        name, shape = shapes[at]
        stop = start + int(np.prod(shape))
        slots.append(Slot(name, tuple(shape), start, stop))
        start = stop
    return slots


class Header(msgspec.Struct, frozen=True):
    """What saved values belong to. `process` of `processes` carries them."""

    slots: list[Slot]
    rounds: int
    lr: float
    beta: float
    digest: str
    has_momentum: bool
    process: int = 0
    processes: int = 1


_HEADER = msgspec.json.Decoder(Header)


def header_of(fragment: Fragment, digest: str = "", *, is_whole: bool = False) -> Header:
    share = fragment.share
    part = (0, 1) if is_whole else (share.process, share.processes)
    return Header(
        list(fragment.slots),
        fragment.rounds,
        fragment.lr,
        fragment.beta,
        digest,
        fragment.has_momentum,
        *part,
    )


def to_bytes(fragment: Fragment) -> bytes:
    """What the fragment holds as bytes, with a header that says what they are."""
    rows = [fragment.values]
    # At the start there is no momentum, and every replica uploads or compares that state.
    if fragment.has_momentum:
        rows.append(fragment.momentum)
    body = b"".join(row.astype("<f4", copy=False).tobytes() for row in rows)
    header = msgspec.json.encode(header_of(fragment, hashlib.sha256(body).hexdigest()))
    return b"".join([_LENGTH.pack(len(header)), header, body])


def load_bytes(fragment: Fragment, data: bytes | memoryview, run: str = "") -> None:
    """Load what `to_bytes` wrote; if it does not fit, nothing is changed.

    Raises ValidationError for another model or other settings, ValueError for damaged bytes.
    """
    view = memoryview(data).cast("B")
    try:
        (length,) = _LENGTH.unpack_from(view)
        header = _HEADER.decode(view[8 : 8 + length])
    except (struct.error, msgspec.MsgspecError) as error:
        raise ValueError(f"not a checkpoint of global parameters: {error}") from error
    check_same(header, fragment, run)
    ours = (fragment.share.process, fragment.share.processes)
    if (header.process, header.processes) != ours:
        raise ValidationError(
            "state",
            f"of process {header.process} of {header.processes}",
            f"expected that of process {ours[0]} of {ours[1]}; a run in the store goes on with any",
        )
    body = view[8 + length :]
    size = fragment.values.size
    if len(body) != 4 * size * (2 if header.has_momentum else 1):
        raise ValueError(f"a checkpoint with {len(body)} bytes of parameters is cut short")
    if hashlib.sha256(body).hexdigest() != header.digest:
        raise ValueError("a checkpoint's bytes do not match its digest")
    row = np.frombuffer(body, "<f4")
    fragment.values[:] = row[:size]
    fragment.momentum[:] = row[size:] if header.has_momentum else 0
    fragment.rounds = header.rounds


def check_same(header: Header, fragment: Fragment, run: str = "") -> None:
    """Raises ValidationError naming the first parameter, or setting, that is not the run's."""
    advice = f"; run_id {run!r} is in use, another model needs another one" if run else ""
    for their, our in zip(header.slots, fragment.slots, strict=False):
        plain = plain_name(their.name)
        names = (their.name, plain, plain.removeprefix("module."))
        if our.name not in names or their[1:] != our[1:]:
            raise ValidationError(
                "model", _label(our), f"the run has {_label(their)} there{advice}"
            )
    if len(header.slots) != len(fragment.slots):
        count = len(fragment.slots)
        raise ValidationError("model", count, f"the run has {len(header.slots)} parameters{advice}")
    # Replicas with other settings would take other steps from the same means and drift apart.
    for setting, theirs, ours in (
        ("outer_lr", header.lr, fragment.lr),
        ("outer_momentum", header.beta, fragment.beta),
    ):
        if theirs != ours:
            raise ValidationError(setting, ours, f"the run began with {theirs:g}")


def _label(slot: Slot) -> str:
    return f"{slot.name} {list(slot.shape)}"
