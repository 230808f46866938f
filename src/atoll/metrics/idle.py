"""How long ranks have been idle, from what they and their wrappers send.

A wrapper sends for how long its rank has printed nothing and used no CPU; metrics of the rank
itself arrive here. In memory only: a restarted control plane counts from zero.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass
class _RankActivity:
    """The last activity of one rank, of any attempt."""

    idle_s: float | None = None  # as its wrapper sent last
    idle_at: float = 0.0  # when that arrived, by the wall clock
    reported_at: float | None = None  # when metrics arrived last, by the monotonic clock


class ReportedIdle:
    """Its methods may be called from several threads."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._steady = steady
        self._lock = threading.Lock()
        self._activity: dict[str, dict[int, _RankActivity]] = {}  # by training and rank

    def note(self, uid: str, rank: int, *, idle_s: float | None, has_report: bool) -> None:
        with self._lock:
            activity = self._activity.setdefault(uid, {}).setdefault(rank, _RankActivity())
            if idle_s is not None:
                activity.idle_s, activity.idle_at = idle_s, self._wall()
            if has_report:
                activity.reported_at = self._steady()

    def idle_s(self, uid: str, started: Mapping[int, float | None]) -> dict[int, float]:
        """Seconds that each rank has been idle, as far as that is known.

        `started` is when the present attempt of each began: older activity belongs to another one.
        """
        idle = {}
        with self._lock:
            for rank, activity in self._activity.get(uid, {}).items():
                began_at = started.get(rank)
                if activity.idle_s is None or began_at is None or activity.idle_at < began_at:
                    continue
                spans = [activity.idle_s, self._wall() - began_at]
                if activity.reported_at is not None:
                    spans.append(self._steady() - activity.reported_at)
                idle[rank] = max(0.0, min(spans))
        return idle

    def forget(self, uid: str) -> None:
        with self._lock:
            self._activity.pop(uid, None)
