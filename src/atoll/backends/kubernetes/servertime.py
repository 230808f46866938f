"""The time of the API server, from the `Date` of its answers: what dates pods and Jobs.

The clock of the machine that atoll runs on may be wrong, or set, or asleep. It is read only until
the first answer is there; from then on the monotonic one is added to what the server says.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime

STEP_S = 5.0  # a server whose clock was set back by more is believed


class ServerTime:
    """Called, it tells the time as the server would."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._ahead_s: float | None = None  # of the server, compared with the monotonic clock

    def __call__(self) -> float:
        return self._wall() if self._ahead_s is None else self._monotonic() + self._ahead_s

    def hear(self, date: str | None) -> None:
        """Takes a date of whole seconds, cut off, that was some time on its way.

        So each is too early by up to a second and more, and the latest is the best.
        """
        if date is None:
            return
        try:
            ahead_s = parsedate_to_datetime(date).timestamp() - self._monotonic()
        except ValueError:
            return
        last = self._ahead_s
        if last is None or ahead_s > last or ahead_s < last - STEP_S:
            self._ahead_s = ahead_s
