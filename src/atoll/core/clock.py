"""Time that does not jump: the wall clock dates what happens, and the steady one measures it.

The steady time is the wall time less its *skew*: the sum of all the steps by which the wall clock
was set forward or back, and of the time that the machine slept or was off. So neither counts
against a deadline, a grace or a time to live. Pure: the clocks are read by functions it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from atoll.core.model import Model

STEP_S = 1.0  # smaller differences between two readings are drift, which the steady time follows
READINGS = 5  # tries to read both clocks at one moment
AT_ONCE_S = 0.1


class Time(NamedTuple):
    """One moment: `wall` is for people, `steady` for measuring."""

    wall: float
    skew: float = 0.0

    @property
    def steady(self) -> float:
        return self.wall - self.skew


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

    def __call__(self) -> Time:
        wall, monotonic = self._read()
        last = self.mark
        step = (wall - last.wall) - (monotonic - last.monotonic)
        skew = last.skew + (step if abs(step) > STEP_S else 0.0)
        self.mark = ClockMark(boot=self._boot, wall=wall, monotonic=monotonic, skew=skew)
        return Time(wall, skew)

    def _read(self) -> tuple[float, float]:
        for _ in range(READINGS):
            before = self._monotonic()
            wall = self._wall()
            after = self._monotonic()
            if after - before < AT_ONCE_S:
                break
        return wall, after
