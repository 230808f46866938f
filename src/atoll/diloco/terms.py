"""The terms of a run's outer optimiser: its rule, and its learning rate and momentum by round.

All replicas must have the same terms, as they take the same steps from the same means. So terms are
plain data, kept with the parameters of the run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.core.checks import check_number
from atoll.core.errors import ValidationError

Floats = NDArray[np.float32]
# A number, or (round, value) pairs: a line from each to the next, and level before and after them.
Points = tuple[tuple[int, float], ...]
ByRound = float | Points


class OuterRule(Protocol):
    """One step of an outer optimiser, value by value: it is called for slices of the parameters.

    It must give the same bits everywhere: numpy's plain arithmetic does. `momentum` begins with
    zeros and is kept with the run.
    """

    name: str

    def step(
        self, values: Floats, momentum: Floats, gradient: Floats, lr: float, beta: float
    ) -> None:
        """`values` and `momentum` are those after the step. `gradient` is to be left alone."""


class Nesterov:
    """`torch.optim.SGD(nesterov=True)`: m = beta m + g; x -= lr (g + beta m)."""

    name = "nesterov"

    def step(
        self, values: Floats, momentum: Floats, gradient: Floats, lr: float, beta: float
    ) -> None:
        factor, rate = np.float32(beta), np.float32(lr)
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

    def step(
        self, values: Floats, momentum: Floats, gradient: Floats, lr: float, beta: float
    ) -> None:
        momentum *= np.float32(beta)
        momentum += gradient
        change = np.multiply(momentum, np.float32(lr), dtype=np.float64)
        np.subtract(values, change, out=values, casting="same_kind")


RULES: dict[str, OuterRule] = {rule.name: rule for rule in (Nesterov(), HeavyBall())}


class OuterTerms(NamedTuple):
    """`is_open`: nobody said what they are, so those of a run in the store are taken."""

    lr: ByRound = 0.7
    beta: ByRound = 0.9
    rule: OuterRule = RULES["nesterov"]
    preset: str = ""
    is_open: bool = False

    @property
    def description(self) -> str:
        return f"outer_lr {show(self.lr)}, outer_momentum {show(self.beta)}"


def read_rule(rule: str | OuterRule) -> OuterRule:
    """Raises ValidationError for what is not a rule."""
    if not isinstance(rule, str):
        if callable(getattr(rule, "step", None)) and isinstance(getattr(rule, "name", None), str):
            return rule
        raise ValidationError(
            "outer", type(rule).__name__, "expected a name and a step(), see atoll.diloco.OuterRule"
        )
    if rule not in RULES:
        raise ValidationError("outer", rule, "expected " + " or ".join(map(repr, RULES)))
    return RULES[rule]


def read_by_round(field: str, value: Any, high: float) -> ByRound:
    """`value` as a number, or as pairs in the order of their rounds. Raises ValidationError."""
    if not isinstance(value, list | tuple):
        check_number(field, value, 0, high)
        return float(value)
    points: list[tuple[int, float]] = []
    for pair in value:
        is_pair = isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2
        if not is_pair or not isinstance(pair[0], int) or pair[0] < 0:
            raise ValidationError(
                field, pair, "expected (round, value), as in [(0, 0.5), (20, 0.9)]"
            )
        check_number(field, pair[1], 0, high)
        if points and pair[0] <= points[-1][0]:
            raise ValidationError(field, pair, f"expected a round after {points[-1][0]}")
        points.append((pair[0], float(pair[1])))
    if not points:
        raise ValidationError(field, value, "expected a number, or (round, value) pairs")
    return tuple(points)


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
