"""Time that does not jump: the wall clock dates events, the monotonic one measures durations.

The monotonic time is the wall time less its *skew*: the sum of all steps by which the wall clock
was set forward or back, and of the time that the machine slept or was off. So neither counts
against a deadline, a grace or a time to live. It survives restarts of the process and of the
machine. Pure: the caller passes the functions that read the clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import NamedTuple

# Smaller differences between two readings are drift (NTP slews at most 0.5 ms a second), which the
# monotonic time follows.
STEP_S = 1.0
READINGS = 5  # tries to read both clocks at one moment
AT_ONCE_S = 0.1  # a tenth of `STEP_S`: a process that was held up in between reads again


class Now(NamedTuple):
    """One moment by three clocks."""

    wall: float  # dates events for people
    monotonic: float  # measures durations on this machine
    executor: float  # dates ranks, which may run on another machine

    @classmethod
    def at(cls, wall: float, skew: float = 0.0) -> Now:
        """Where ranks are dated by the clock of this machine."""
        return cls(wall, wall - skew, wall - skew)


class ClockMark(NamedTuple):
    """Both clocks at one moment of a boot, to go on from after a restart of the process."""

    boot: str
    wall: float
    monotonic: float
    skew: float = 0.0


class Clock:
    """A callable that returns the time.

    `monotonic` must not count the time that the machine sleeps. `mark` is of an earlier process, or
    of an earlier boot: then what passed between that and the start of the machine is not counted.
    """

    def __init__(
        self,
        wall: Callable[[], float],
        monotonic: Callable[[], float],
        *,
        boot: str = "",
        mark: ClockMark | None = None,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._boot = boot
        if mark is not None and mark.boot != boot:
            mark = ClockMark(boot=boot, wall=mark.wall, monotonic=0.0, skew=mark.skew)
        self.mark = mark or ClockMark(boot=boot, wall=wall(), monotonic=monotonic())

    def __call__(self) -> Now:
        wall, monotonic = self._read()
        last = self.mark
        step = (wall - last.wall) - (monotonic - last.monotonic)
        skew = last.skew + (step if abs(step) > STEP_S else 0.0)
        self.mark = ClockMark(boot=self._boot, wall=wall, monotonic=monotonic, skew=skew)
        return Now.at(wall, skew)

    def _read(self) -> tuple[float, float]:
        for _ in range(READINGS):
            before = self._monotonic()
            wall = self._wall()
            after = self._monotonic()
            if after - before < AT_ONCE_S:
                break
        return wall, after


# Pauses between retries. Pure: the caller has the clock, and sleeps.

MAX_DOUBLINGS = 64  # beyond any bound in use, and still a float


def grown_s(first_s: float, longest_s: float, failures: int, growth: float = 2.0) -> float:
    """The pause after that many earlier failures, growing from `first_s` to `longest_s`."""
    return float(min(first_s * growth ** min(failures, MAX_DOUBLINGS), longest_s))


def restart_delay_s(restarts: int) -> float:
    """The pause before a restart: none before the first, then longer each time."""
    return 0.0 if restarts == 0 else grown_s(1.0, 30.0, restarts - 1)


class Retry:
    """The pauses of one loop that tries again, sync or async.

    `jitter()` is the share of a pause that is waited, so that callers which failed together do not
    return together. After `patience_s` by `clock` there is no further pause.
    """

    def __init__(
        self,
        first_s: float,
        longest_s: float,
        *,
        growth: float = 2.0,
        jitter: Callable[[], float] = lambda: 1.0,
        patience_s: float = inf,
        clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._growth = growth
        self._jitter = jitter
        self._clock = clock
        self._deadline = clock() + patience_s
        self.failures = 0  # in a row

    def pause_s(self, retry_after_s: float = 0.0) -> float | None:
        """Seconds to wait after one more failure; None if `patience_s` is over.

        `retry_after_s` is what the other side asked for. The last pause ends at the deadline.
        """
        left_s = self._deadline - self._clock()
        if left_s <= 0:
            return None
        grown = grown_s(self._first_s, self._longest_s, self.failures, self._growth)
        self.failures += 1
        return min(max(grown * self._jitter(), retry_after_s), left_s)

    def has_worked(self) -> None:
        """Resets the pauses: the next failure counts as the first one."""
        self.failures = 0
