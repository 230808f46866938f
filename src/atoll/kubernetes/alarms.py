"""Looks to be taken later, though nothing in the cluster changes: one pending for each training."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from atoll.core.ports import Key

SOON_S = 0.05


class Alarms:
    def __init__(self, ring: Callable[[Key], None]) -> None:
        self._ring = ring
        self._timers: dict[Key, asyncio.TimerHandle] = {}

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()

    def set(self, key: Key, seconds: float) -> None:
        """Rings once, then or sooner."""
        loop = asyncio.get_running_loop()
        at = loop.time() + max(seconds, SOON_S)
        before = self._timers.get(key)
        if before is not None and not before.cancelled() and loop.time() < before.when() <= at:
            return
        if before is not None:
            before.cancel()
        self._timers[key] = loop.call_at(at, self._fire, key)

    def _fire(self, key: Key) -> None:
        self._timers.pop(key, None)
        self._ring(key)
