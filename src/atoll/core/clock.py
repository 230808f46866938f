"""Time that does not jump: the wall clock dates events, the monotonic one measures durations.

The monotonic time is the wall time less its *skew*: the sum of all steps by which the wall clock
was set forward or back, and of the time that the machine slept or was off. So neither counts
against a deadline, a grace or a time to live. It survives restarts of the process and of the
machine. Pure: the caller passes the functions that read the clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from atoll.core.model import Model

# Smaller differences between two readings are drift (NTP slews at most 0.5 ms a second), which the
# monotonic time follows.
STEP_S = 1.0
READINGS = 5  # tries to read both clocks at one moment
AT_ONCE_S = 0.1


class Now(NamedTuple):
    """One moment by three clocks."""

    wall: float  # dates events for people
    monotonic: float  # measures durations on this machine
    executor: float  # dates ranks, which may run on another machine

    @classmethod
    def at(cls, wall: float, skew: float = 0.0) -> Now:
        """Where ranks are dated by the clock of this machine."""
        return cls(wall, wall - skew, wall - skew)


class ClockMark(Model, frozen=True):
    """Both clocks at one moment of a boot, to go on from after a restart of the process."""

    boot: str
    wall: float
    monotonic: float
    skew: float = 0.0


class Clock:
    """Called, it tells the time.

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
