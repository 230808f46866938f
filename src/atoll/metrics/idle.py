"""For how long ranks have not moved, from what they and their wrappers send.

A wrapper says for how long its rank has printed nothing and used no CPU; what the rank itself
reports is seen here. In memory only: a control plane that was restarted counts anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass
class _Heard:
    """Of one rank, whichever attempt of it spoke last."""

    still_s: float | None = None  # as its wrapper said last
    still_at: float = 0.0  # when that came, by the wall clock
    told_at: float | None = None  # when a report came last, by the steady clock


class ReportedStillness:
    """Its methods may be called from several threads."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._steady = steady
        self._lock = threading.Lock()
        self._heard: dict[str, dict[int, _Heard]] = {}  # by training and rank

    def note(self, uid: str, rank: int, *, still_s: float | None, has_report: bool) -> None:
        with self._lock:
            heard = self._heard.setdefault(uid, {}).setdefault(rank, _Heard())
            if still_s is not None:
                heard.still_s, heard.still_at = still_s, self._wall()
            if has_report:
                heard.told_at = self._steady()

    def idle_s(self, uid: str, started: Mapping[int, float | None]) -> dict[int, float]:
        """Seconds since each of these ranks moved, by rank, as far as that is known.

        `started` is when the present attempt of each began: what came before is of another one.
        """
        quiet = {}
        with self._lock:
            for rank, heard in self._heard.get(uid, {}).items():
                began_at = started.get(rank)
                if heard.still_s is None or began_at is None or heard.still_at < began_at:
                    continue
                spans = [heard.still_s, self._wall() - began_at]
                if heard.told_at is not None:
                    spans.append(self._steady() - heard.told_at)
                quiet[rank] = max(0.0, min(spans))
        return quiet

    def forget(self, uid: str) -> None:
        with self._lock:
            self._heard.pop(uid, None)
