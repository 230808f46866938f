"""What a process does between two rounds: it reads data, computes, or is blocked in a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple


class PeriodTimes(NamedTuple):
    """Seconds of one period outside of rounds, and how many of them went into reading data.

    `data_s` is None if the loop takes its batches from neither `until` nor `data`.
    """

    train_s: float = 0.0
    data_s: float | None = None


class PeriodClock:
    """Times one period after the other. Two readings of a clock a batch, and none a step."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = now()
        self._blocked_s = 0.0
        self._data_s: float | None = None
        self._is_reading = False

    def block_since(self, began: float) -> float:
        """The model has not trained since then, but was in a round; returns the seconds."""
        seconds = self._now() - began
        self._blocked_s += seconds
        return seconds

    def take(self) -> PeriodTimes:
        """End the period, and begin the next one."""
        now = self._now()
        train_s = max(0.0, now - self._began - self._blocked_s)
        data_s = None if self._data_s is None else min(self._data_s, train_s)
        times = PeriodTimes(train_s, data_s)
        self._began, self._blocked_s = now, 0.0
        self._data_s = None if self._data_s is None else 0.0
        return times

    def read(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, with the time that each takes to come counted as reading data.

        One reader within another counts once, and a round that reading leads to is no reading.
        """
        batch_iterator = iter(batches)
        while True:
            is_outer, self._is_reading = not self._is_reading, True
            began, blocked_s, data_s = self._now(), self._blocked_s, self._data_s or 0.0
            period = self._began
            try:
                batch = next(batch_iterator)
            except StopIteration:
                return
            finally:
                if is_outer:
                    self._is_reading = False
                    if period != self._began:  # reading led to a round: the rest is what counts
                        began, blocked_s, data_s = self._began, 0.0, 0.0
                    waited_s = self._blocked_s - blocked_s
                    self._data_s = data_s + max(0.0, self._now() - began - waited_s)
            yield batch
