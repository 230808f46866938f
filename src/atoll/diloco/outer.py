"""The outer optimiser: its rules, its settings by round, and the rows that it steps.

All replicas take the same steps from the same means, so settings are plain data that is kept with
the run. Values are fp32 and computed in numpy: every operation rounds as IEEE 754 says and none is
left to a compiler, so the bits do not depend on the processor, the threads or the build of torch.

To add an outer optimiser, see docs/architecture.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from atoll.core.checks import check_number
from atoll.core.errors import ValidationError
from atoll.core.model import json_decoder
from atoll.diloco.periods import read_pairs

Floats = NDArray[np.float32]
# A number, or (round, value) pairs: a line from each to the next, and level before and after them.
Points = tuple[tuple[int, float], ...]
ByRound = float | Points

VALUES = "values"  # the row of the global parameters
SLICE = 1 << 16  # values of a pass: three rows of so many stay in the cache


class OuterTurn(NamedTuple):
    """`number` of the step, from 0 and without those of a ramp, and the settings in it."""

    number: int
    lr: float
    momentum: float


class OuterRule(Protocol):
    """One step of an outer optimiser, value by value: it is called for slices of the rows.

    It must give the same bits everywhere: numpy's plain arithmetic does. `state` names the rows
    that it needs beside the values: they begin with zeros, and are kept with the run.
    """

    name: str
    state: tuple[str, ...]

    def step(self, rows: Mapping[str, Floats], gradient: Floats, turn: OuterTurn) -> None:
        """Change `rows["values"]` and the rows of the state. `gradient` is to be left alone."""


class Nesterov:
    """`torch.optim.SGD(nesterov=True)`: m = beta m + g; x -= lr (g + beta m)."""

    name = "nesterov"
    state: tuple[str, ...] = ("momentum",)

    def step(self, rows: Mapping[str, Floats], gradient: Floats, turn: OuterTurn) -> None:
        factor, rate = np.float32(turn.momentum), np.float32(turn.lr)
        values, momentum = rows[VALUES], rows["momentum"]
        momentum *= factor
        momentum += gradient
        # A product of two fp32 is exact in fp64: one rounding each, as torch's fused ones.
        change = np.multiply(momentum, factor, dtype=np.float64)
        change += gradient
        np.multiply(change.astype(np.float32), rate, out=change, dtype=np.float64)
        np.subtract(values, change, out=values, casting="same_kind")


class HeavyBall:
    """`torch.optim.SGD`: m = beta m + g; x -= lr m."""

    name = "sgd"
    state: tuple[str, ...] = ("momentum",)

    def step(self, rows: Mapping[str, Floats], gradient: Floats, turn: OuterTurn) -> None:
        values, momentum = rows[VALUES], rows["momentum"]
        momentum *= np.float32(turn.momentum)
        momentum += gradient
        change = np.multiply(momentum, np.float32(turn.lr), dtype=np.float64)
        np.subtract(values, change, out=values, casting="same_kind")


RULES: dict[str, OuterRule] = {rule.name: rule for rule in (Nesterov(), HeavyBall())}


class OuterConfig(NamedTuple):
    """`is_open`: nobody said what it is, so that of a run in the store is taken.

    `ramp`: so many turns begin the run with plain averages; the settings count from there on.
    """

    lr: ByRound = 0.7
    momentum: ByRound = 0.9
    rule: OuterRule = RULES["nesterov"]
    preset: str = ""
    is_open: bool = False
    ramp: int = 0

    @property
    def description(self) -> str:
        settings = f"outer_lr {show(self.lr)}, outer_momentum {show(self.momentum)}"
        return settings if not self.ramp else f"{settings}, after {self.ramp_description}"

    @property
    def ramp_description(self) -> str:
        return f"a ramp of {self.ramp} rounds" if self.ramp else "none"

    @property
    def text(self) -> str:
        """The settings as the layout of a run holds them."""
        return msgspec.json.encode(
            _Stored(self.rule.name, self.lr, self.momentum, self.preset, self.ramp)
        ).decode()

    def turn_at(self, number: int) -> OuterTurn | None:
        """What the rule is to do; None: a plain average."""
        number -= self.ramp
        if number < 0:
            return None
        return OuterTurn(number, value_at(self.lr, number), value_at(self.momentum, number))

    def take(self, text: str) -> OuterConfig:
        """The settings of a run, if none were given here. Raises ValidationError if they differ."""
        theirs = _STORED.decode(text)
        if self.is_open:
            if theirs.rule not in RULES:
                raise ValidationError("outer", None, f"the run began with {theirs.rule!r}")
            rule = RULES[theirs.rule]
            settings = (theirs.lr, theirs.momentum, rule, theirs.preset)
            return OuterConfig(*settings, is_open=True, ramp=theirs.ramp)
        began = OuterConfig(theirs.lr, theirs.momentum, ramp=theirs.ramp)
        if self.preset and theirs.preset != self.preset:
            preset = f"{theirs.preset!r}" if theirs.preset else "none"
            expected = f"the run began with {preset}: {began.description}"
            raise ValidationError("preset", self.preset, expected)
        for setting, ours, other, label in (
            ("outer_lr", self.lr, theirs.lr, show(theirs.lr)),
            ("outer_momentum", self.momentum, theirs.momentum, show(theirs.momentum)),
            ("outer", self.rule.name, theirs.rule, repr(theirs.rule)),
        ):
            if ours != other:
                value = show(ours) if isinstance(ours, tuple) else ours
                raise ValidationError(setting, value, f"the run began with {label}")
        if self.ramp != theirs.ramp:
            expected = "the ramp follows from sync_every and fragments"
            expected = f"the run began with {began.ramp_description}: {expected}"
            raise ValidationError("warmup", self.ramp_description, expected)
        return self._replace(preset=theirs.preset)


class _Stored(msgspec.Struct, frozen=True):
    rule: str
    lr: ByRound
    momentum: ByRound
    preset: str = ""
    ramp: int = 0


_STORED = json_decoder(_Stored)


class OuterRows:
    """What one process carries of a fragment, as rows by name, and its outer step.

    A mean is that of pseudo-gradients: where a replica was minus where it is, so a rate of 1
    without momentum lands on the mean of the replicas.
    """

    is_wanted = True

    def __init__(self, size: int, config: OuterConfig, fragments: int = 1) -> None:
        """`fragments` of the run: they take turns, and schedules count the turns."""
        self.rows: dict[str, Floats] = {VALUES: np.zeros(size, np.float32)}
        self._fragments = fragments
        self.configure(config)

    @property
    def values(self) -> Floats:
        return self.rows[VALUES]

    def configure(self, config: OuterConfig) -> None:
        """Another rule begins with other rows."""
        self._config = config
        for name in [each for each in self.rows if each not in (VALUES, *config.rule.state)]:
            del self.rows[name]
        for name in config.rule.state:
            if name not in self.rows:
                self.rows[name] = np.zeros_like(self.values)

    def room(self, start: int, size: int) -> None:
        """Means go into the step alone."""
        return None

    def step(self, round: int, start: int, mean: Floats) -> None:
        """Step the values of the rows from `start` on. `mean` is left alone."""
        turn, rule = self._config.turn_at(round // self._fragments), self._config.rule
        for first in range(0, mean.size, SLICE):
            gradient = mean[first : first + SLICE]
            at = slice(start + first, start + first + gradient.size)
            if turn is None:
                self.values[at] -= gradient
            else:
                rule.step({name: row[at] for name, row in self.rows.items()}, gradient, turn)


def read_rule(rule: str | OuterRule) -> OuterRule:
    """Raises ValidationError for what is not a rule."""
    if not isinstance(rule, str):
        is_named = isinstance(getattr(rule, "name", None), str)
        if is_named and callable(getattr(rule, "step", None)) and hasattr(rule, "state"):
            return rule
        raise ValidationError(
            "outer",
            type(rule).__name__,
            "expected a name, state and a step(), see atoll.diloco.OuterRule",
        )
    if rule not in RULES:
        raise ValidationError("outer", rule, "expected " + " or ".join(map(repr, RULES)))
    return RULES[rule]


def read_by_round(field: str, value: Any, high: float) -> ByRound:
    """`value` as a number, or as pairs in the order of their rounds. Raises ValidationError."""
    if not isinstance(value, list | tuple):
        check_number(field, value, 0, high)
        return float(value)
    pairs = read_pairs(field, value, "round", "(round, value), as in [(0, 0.5), (20, 0.9)]")
    for _, each in pairs:
        check_number(field, each, 0, high)
    if not pairs:
        raise ValidationError(field, value, "expected a number, or (round, value) pairs")
    return tuple((number, float(each)) for number, each in pairs)


def value_at(by_round: ByRound, number: int) -> float:
    """The value in the round with this number."""
    if not isinstance(by_round, tuple):
        return by_round
    after = bisect_right([point[0] for point in by_round], number)
    if after == 0 or after == len(by_round):
        return by_round[max(0, after - 1)][1]
    (start, low), (stop, high) = by_round[after - 1 : after + 1]
    return low + (high - low) * (number - start) / (stop - start)


def show(by_round: ByRound) -> str:
    if not isinstance(by_round, tuple):
        return f"{by_round:g}"
    return ", ".join(f"{value:g} at round {number}" for number, value in by_round)
