"""A keyed work queue: at most one pass per key at a time, and repeats are merged.

A key that is added while a pass runs gets one more pass. Of several due times of a key the
earliest counts. An idle queue costs one timer.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque

from atoll.core.ports import Key
from atoll.core.retry import grown_s


class WorkQueue:
    def __init__(self) -> None:
        self._ready: deque[Key] = deque()
        self._queued: set[Key] = set()
        self._working: set[Key] = set()
        self._again: set[Key] = set()
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._failures: dict[Key, int] = {}
        self._wake = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, key: Key) -> None:
        self._due.pop(key, None)
        if key in self._working:
            self._again.add(key)
        elif key not in self._queued:
            self._queued.add(key)
            self._ready.append(key)
            self._wake.set()

    def add_after(self, key: Key, seconds: float) -> None:
        if seconds <= 0:
            self.add(key)
            return
        at = asyncio.get_running_loop().time() + seconds
        if key in self._queued or at >= self._due.get(key, float("inf")):
            return
        self._due[key] = at
        heapq.heappush(self._heap, (at, key))
        if len(self._heap) > 2 * len(self._due) + 64:  # most entries are out of date
            self._heap = [(due, key) for key, due in self._due.items()]
            heapq.heapify(self._heap)
        self._arm()

    def retry(self, key: Key, at_least_s: float = 0.0) -> None:
        """Adds the key after a pause, which grows with each failure in a row."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        self.add_after(key, max(at_least_s, grown_s(0.05, 30.0, failures)))

    def forgive(self, key: Key) -> None:
        self._failures.pop(key, None)

    async def get(self) -> Key:
        while not self._ready:
            self._wake.clear()
            await self._wake.wait()
        key = self._ready.popleft()
        self._queued.discard(key)
        self._working.add(key)
        return key

    def done(self, key: Key) -> None:
        self._working.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        if self._heap:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._heap[0][0], self._fire)

    def _fire(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._heap and self._heap[0][0] <= now:
            at, key = heapq.heappop(self._heap)
            if self._due.get(key) == at:
                self.add(key)
        self._arm()
