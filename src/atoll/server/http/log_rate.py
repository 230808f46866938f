"""Limits how often the log repeats a message, so that nobody can fill the disk from outside."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

WINDOW_S = 10.0  # with 50 messages of 200 bytes: at most 1 kB/s for each kind
MAX_EQUAL = 50  # equal messages in a window
MAX_TRACED = 5  # those with a traceback
MAX_KEYS = 1000


class RateLimitFilter(logging.Filter):
    """Drops messages that repeat too often; the next one that passes says how many."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._counts: dict[tuple[str, str], tuple[float, int]] = {}  # start of the window, count

    def filter(self, record: logging.LogRecord) -> bool:
        key, now = (record.name, str(record.msg)[:200]), self._clock()
        since, count = self._counts.get(key, (now, 0))
        most = MAX_TRACED if record.exc_info else MAX_EQUAL
        if now - since >= WINDOW_S:
            if count > most:
                text = record.getMessage()
                record.msg, record.args = f"{text} ({count - most} more like this before)", ()
            since, count = now, 0
        if len(self._counts) >= MAX_KEYS and key not in self._counts:
            self._counts.clear()
        self._counts[key] = since, count + 1
        return count < most


def configure_log(level: int) -> None:
    """Configures the log of a server, on standard error."""
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(RateLimitFilter())
