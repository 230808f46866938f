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
from atoll.core.model import json_decoder
from atoll.diloco.allreduce.layout import Layout
from atoll.diloco.allreduce.manifest import Manifest
from atoll.diloco.allreduce.note import MemberNote
from atoll.diloco.allreduce.share import Share
from atoll.diloco.packing import TensorSpec
from atoll.diloco.pieces import plain_name
from atoll.diloco.terms import RULES, ByRound, OuterTerms, show, value_at

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

    def __init__(self, slots: Sequence[Slot], lr: ByRound = 0.7, beta: ByRound = 0.9) -> None:
        self.slots = tuple(slots)
        self.terms = OuterTerms(lr, beta)
        self.rounds = 0
        self.period = 0  # steps between two sends
        self.steps, self.tokens = 0, 0.0  # of the run, as far as rounds of this fragment tell
        self.ledger = ""  # of the run's data, as of the checkpoint that was loaded
        specs = tuple(TensorSpec("float32", slot.shape) for slot in slots)
        self.carry(Share(Layout(specs, 1, "fp32", "fp32", "", 1)))

    def carry(self, share: Share) -> None:
        """From here on the rows hold `share` of the values; they are zeros."""
        self.share = share
        self.values = self.momentum = np.empty(0, np.float32)  # there is room for one pair of rows
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

    def resume(self, header: Header) -> None:
        """The clock of the run is that of the state that was loaded."""
        self.rounds, self.tokens, self.ledger = header.rounds, header.tokens, header.ledger
        self.steps = header.rounds * self.period if header.steps is None else header.steps

    def tick(self, manifest: Manifest) -> None:
        """A round was committed: the run has gone as far as the furthest of its members."""
        notes = [m.header for m in manifest.members if isinstance(m.header, MemberNote)]
        self.steps += max((each.steps for each in notes), default=self.period)
        self.tokens += sum(each.tokens for each in notes)

    def step(self, gradient: Floats) -> None:
        """One step of the outer optimiser.

        The gradient is where we were minus where we are, so lr 1 without momentum lands on the
        mean of the replicas.
        """
        self.step_part(0, gradient)
        self.rounds += 1

    def step_part(self, first: int, gradient: Floats) -> None:
        """The step of the values from `first` on: any part at any time, each once."""
        terms = self.terms
        lr, beta = value_at(terms.lr, self.rounds), value_at(terms.beta, self.rounds)
        for start in range(0, gradient.size, _SLICE):
            g = gradient[start : start + _SLICE]
            at = slice(first + start, first + start + g.size)
            terms.rule.step(self.values[at], self.momentum[at], g, lr, beta)

    def rows(self, row: Floats) -> list[Floats]:
        """`row`, of all values, as one view for each parameter."""
        return [row[slot.start : slot.stop].reshape(slot.shape) for slot in self.slots]


def split(
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    parts: int,
    lr: ByRound = 0.7,
    beta: ByRound = 0.9,
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
    steps: int | None = None
    tokens: float = 0.0
    ledger: str = ""
    # Instead of `lr` and `beta` where they change from round to round.
    lr_by_round: tuple[tuple[int, float], ...] = ()
    beta_by_round: tuple[tuple[int, float], ...] = ()
    rule: str = "nesterov"
    preset: str = ""

    @property
    def terms(self) -> OuterTerms:
        """Those of the run; the rule of a program is known to it by its name only."""
        rule = RULES.get(self.rule) or _Named(self.rule)
        return OuterTerms(
            self.lr_by_round or self.lr, self.beta_by_round or self.beta, rule, self.preset
        )


class _Named:
    """A rule that is not here: only its name is known."""

    def __init__(self, name: str) -> None:
        self.name = name

    def step(
        self, values: Floats, momentum: Floats, gradient: Floats, lr: float, beta: float
    ) -> None:
        raise ValidationError("outer", None, f"the run began with {self.name!r}")


_HEADER = json_decoder(Header)


def header_of(fragment: Fragment, digest: str = "", *, is_complete: bool = False) -> Header:
    share = fragment.share
    part = (0, 1) if is_complete else (share.process, share.processes)
    terms = fragment.terms
    return Header(
        list(fragment.slots),
        fragment.rounds,
        value_at(terms.lr, 0),
        value_at(terms.beta, 0),
        digest,
        fragment.has_momentum,
        *part,
        fragment.steps,
        fragment.tokens,
        fragment.ledger,
        lr_by_round=terms.lr if isinstance(terms.lr, tuple) else (),
        beta_by_round=terms.beta if isinstance(terms.beta, tuple) else (),
        rule=terms.rule.name,
        preset=terms.preset,
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
    fragment.resume(header)


def check_same(header: Header, fragment: Fragment, run: str = "") -> None:
    """Raises ValidationError naming the first parameter, or setting, that is not the run's.

    A fragment of which nobody said what its terms are takes those of the run.
    """
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
    theirs, ours = header.terms, fragment.terms
    if ours.is_open:
        fragment.terms = theirs._replace(is_open=True)
        if isinstance(theirs.rule, _Named):
            raise ValidationError("outer", None, f"the run began with {theirs.rule.name!r}")
        return
    if ours.preset and theirs.preset != ours.preset:
        began = repr(theirs.preset) if theirs.preset else "none"
        raise ValidationError(
            "preset", ours.preset, f"the run began with {began}: {theirs.description}"
        )
    for setting, value, other in (
        ("outer_lr", ours.lr, theirs.lr),
        ("outer_momentum", ours.beta, theirs.beta),
    ):
        if value != other:
            label = show(value) if isinstance(value, tuple) else value
            raise ValidationError(setting, label, f"the run began with {show(other)}")
    if ours.rule.name != theirs.rule.name:
        raise ValidationError("outer", ours.rule.name, f"the run began with {theirs.rule.name!r}")


def _label(slot: Slot) -> str:
    return f"{slot.name} {list(slot.shape)}"
