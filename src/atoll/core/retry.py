"""Pauses between retries. Pure: the caller has the clock, and sleeps."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

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
