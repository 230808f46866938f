"""How long the periods of a run are: in steps, by the step of the run, or by the clock.

A period is what a replica trains between two rounds. `ramp` is a warm-up: periods begin with one
step and double until they are as long as `every` says; the rounds between them are plain averages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from atoll.core.checks import check_int
from atoll.core.errors import ValidationError
from atoll.core.text import format_duration, parse_duration
from atoll.diloco.round.effects import RunState

RAMP, NO_WARMUP = "ramp", "none"  # for `warmup`
# Turns of each length in a ramp.
RAMP_TURNS = 2
# A period by the clock begins at 1/64 of its seconds: as many doublings as 64 steps have.
CLOCK_DOUBLINGS = 6


GUESS_STEPS = 16  # before the first step was timed
MAX_STEPS = 10**9
_EXPECTED = "expected a number of steps, (step, steps) pairs, or seconds as '60s'"


class Periods(NamedTuple):
    """`every`: (step of the run, steps between two rounds of a fragment) pairs, from each step on.

    With `clock_s` a period ends by the clock instead. `fragments` take turns: a turn is one round
    of each of them. `ramp`: so many turns in which periods grow, `RAMP_TURNS` of each length.
    """

    every: tuple[tuple[int, int], ...] = ()
    clock_s: float = 0.0
    fragments: int = 1
    ramp: int = 0

    @property
    def ramp_rounds(self) -> int:
        return self.ramp * self.fragments

    @property
    def full_ramp(self) -> int:
        """How many turns a ramp has that ends with the first period: 1, 2, 4, … below it."""
        doublings = (self.every[0][1] // self.fragments - 1).bit_length() if self.every else 0
        return RAMP_TURNS * (CLOCK_DOUBLINGS if self.clock_s else doublings)

    def steps_at(self, round: int, step: int) -> int:
        """Steps before this round; its period begins at this step of the run."""
        if round < self.ramp_rounds:
            return int(2 ** (round // (RAMP_TURNS * self.fragments)))
        at = bisect_right([first for first, _ in self.every], step) - 1
        return self.every[max(0, at)][1] // self.fragments

    def seconds_at(self, round: int) -> float:
        """Seconds before this round, where periods go by the clock."""
        seconds = self.clock_s / self.fragments
        if round < self.ramp_rounds:
            seconds /= 2 ** ((self.ramp_rounds - 1 - round) // (RAMP_TURNS * self.fragments) + 1)
        return seconds

    @property
    def lease(self) -> tuple[int, int]:
        """Fragments, and steps of the first lease of data: as all replicas have them for ever."""
        return self.fragments, self.every[0][1] // self.fragments if self.every else GUESS_STEPS

    def extra_rounds(self, steps: int) -> float:
        """How many turns the ramp has beside those that periods of so many steps have meanwhile."""
        lengths = [int(2 ** (turn // RAMP_TURNS)) for turn in range(self.ramp)]
        # By the clock, the last length of a ramp is half of a period.
        full = 2 * lengths[-1] if self.clock_s and lengths else steps // self.fragments
        return self.ramp - sum(lengths) / full

    @property
    def description(self) -> str:
        if self.clock_s:
            return f"every {format_duration(self.clock_s)}"
        first, *later = self.every
        changes = "".join(f", {steps} from step {step} on" for step, steps in later)
        return f"every {first[1]} steps{changes}"

    @property
    def ramp_description(self) -> str:
        if not self.ramp:
            return "none"
        first = f"{self.seconds_at(0):.3g} s" if self.clock_s else "1 step"
        return f"ramp: {self.ramp_rounds} plain averages, after periods that double from {first}"


class PeriodPlan:
    """When the period under way uploads and ends, in steps of this replica.

    By the clock, the leader of a replica decides, and `agree` tells the others, which takes a
    collective. One that was not in the last round does not know how old its manifest is: it takes
    the next one at once, and ends its periods with the others from there on.
    """

    def __init__(
        self,
        periods: Periods,
        overlap: int,
        agree: Callable[[Callable[[], int]], int],
        now: float,
        *,
        is_many: bool = False,
    ) -> None:
        """`overlap`: steps from the upload to the end. `is_many`: processes of the replica."""
        self.periods = periods
        self.upload_at = self.end_at = 0  # steps of the period; 0: not known yet
        self._overlap, self._agree, self._is_many = overlap, agree, is_many
        self._look_at = 0
        self._ends_at = now + periods.seconds_at(0)  # monotonic; of a period by the clock
        self._began = self._step_s = 0.0  # when its first step was made; of the period before

    def is_ramp(self, round: int) -> bool:
        return round < self.periods.ramp_rounds

    def overlap_of(self, round: int) -> int:
        """Short periods hide nothing: in a ramp, replicas wait for the averages, and take them."""
        return 0 if self.is_ramp(round) else self._overlap

    def advance(self, step: int, state: RunState, now: float) -> None:
        """A step of the period was made, the first of which is 1."""
        overlap = self.overlap_of(state.round)
        if step == 1:
            self.upload_at = self.end_at = self._look_at = 0
            self._began = now
            if self.periods.clock_s:
                self._look_at = 1
            else:
                self.end_at = self.periods.steps_at(state.round, state.steps)
                self.upload_at = self.end_at - overlap
        if step == self._look_at:
            left = self._agree(lambda: self.steps_left(step, now))
            if left:
                self._look_at = step + (max(1, left // 2) if self._is_many else 1)
            else:
                self.upload_at, self.end_at = step, step + overlap

    def steps_left(self, step: int, now: float) -> int:
        """How many steps after this one end before the period does."""
        if step > 1:
            self._step_s = (now - self._began) / (step - 1)
        left_s = self._ends_at - now
        if left_s <= 0:
            return 0
        return int(left_s / self._step_s) if self._step_s else 1

    def settle(self, state: RunState) -> None:
        """A round is over."""
        self._ends_at = 0.0
        if state.is_current and state.last is not None:
            seconds = state.last.next_s or self.periods.seconds_at(state.round)
            self._ends_at = state.manifest_at + seconds

    def guess_steps(self, state: RunState) -> int:
        """How many steps the period after the next round may have, for the data that it needs.

        By the clock it is more than that: data that comes too late ends a period early.
        """
        number = state.round + 1
        if not self.periods.clock_s:
            return self.periods.steps_at(number, state.steps)
        if not self._step_s:
            return GUESS_STEPS
        return max(GUESS_STEPS, int(1.5 * self.periods.seconds_at(number) / self._step_s))


def check_warmup(value: Any) -> None:
    """Raises ValidationError unless it is one."""
    if value not in (RAMP, NO_WARMUP):
        raise ValidationError("warmup", value, f"expected {RAMP!r} or {NO_WARMUP!r}")


def read_periods(value: Any) -> Periods:
    """`sync_every` as people write it. Raises ValidationError."""
    if isinstance(value, str):
        seconds = 0.0 if value.isdigit() else parse_duration("sync_every", value)
        if not 0 < seconds < MAX_STEPS:
            raise ValidationError("sync_every", value, _EXPECTED)
        return Periods(clock_s=seconds)
    if not isinstance(value, list | tuple):
        if value is None:
            raise ValidationError("sync_every", None, f"{_EXPECTED}, or a preset")
        check_int("sync_every", value, 1, MAX_STEPS)
        return Periods(((0, value),))
    example = "(step, steps), as in [(0, 30), (1000, 100)]"
    pairs = read_pairs("sync_every", value, "step", example)
    for _, steps in pairs:
        check_int("sync_every", steps, 1, MAX_STEPS)
    if not pairs:
        raise ValidationError("sync_every", value, _EXPECTED)
    return Periods(tuple(pairs))


def read_pairs(field: str, value: Sequence[Any], unit: str, example: str) -> list[tuple[int, Any]]:
    """Pairs in the order of their first numbers, which are of `unit`. Raises ValidationError."""
    pairs: list[tuple[int, Any]] = []
    for pair in value:
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2
        if not is_pair or type(pair[0]) is not int or not 0 <= pair[0] <= MAX_STEPS:
            raise ValidationError(field, pair, f"expected {example}")
        if pairs and pair[0] <= pairs[-1][0]:
            raise ValidationError(field, pair, f"expected a {unit} after {pairs[-1][0]}")
        pairs.append((pair[0], pair[1]))
    return pairs
