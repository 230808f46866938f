"""A cache for answers that are expensive to compute: many tabs that ask often cost a server of one
core no more than a tenth of it."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

MAX_ENTRIES = 64  # charts of some five pages
# An answer is valid for ten times as long as it took: computing takes a tenth of a core at most.
TIMES = 10
MAX_S = 30.0  # and never longer: people expect a chart to move


class TTLCache:
    """Bodies of answers by key. One caller at a time computes each, in a thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._entries: OrderedDict[Hashable, tuple[float, bytes]] = OrderedDict()
        self._locks: dict[Hashable, asyncio.Lock] = {}

    async def body(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        lock = self._locks.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                good_until, body = self._entries.get(key, (0.0, b""))
                if good_until > self._now():
                    return body
                started = self._now()
                body = await asyncio.to_thread(make)
                spent = self._now() - started
                self._entries[key] = (self._now() + min(MAX_S, TIMES * spent), body)
                self._entries.move_to_end(key)
                while len(self._entries) > MAX_ENTRIES:
                    self._entries.popitem(last=False)
                return body
        finally:
            if not lock.locked():
                self._locks.pop(key, None)
