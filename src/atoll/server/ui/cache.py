"""Answers that take long to make, used again for a while: many tabs, and tabs that ask often, cost
a server of one core no more than a share of it."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

KEPT = 64
TIMES = 10  # as long as it took, an answer is used: making them takes a tenth of a core at most
LONGEST_S = 30.0


class Reused:
    """Bodies of answers by key. Each is made in a thread, by one caller at a time."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._kept: OrderedDict[Hashable, tuple[float, bytes]] = OrderedDict()
        self._locks: dict[Hashable, asyncio.Lock] = {}

    async def body(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        lock = self._locks.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                good_until, body = self._kept.get(key, (0.0, b""))
                if good_until > self._now():
                    return body
                begun = self._now()
                body = await asyncio.to_thread(make)
                spent = self._now() - begun
                self._kept[key] = (self._now() + min(LONGEST_S, TIMES * spent), body)
                self._kept.move_to_end(key)
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
                return body
        finally:
            if not lock.locked():
                self._locks.pop(key, None)
