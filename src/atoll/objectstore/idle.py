"""Warn of a store that does not answer while it is waited for: one line a process, then again.

A thread looks at the requests that wait, since one of them may hang where nothing is raised.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping

from atoll.core.stores import missing_keys

# The first warning: longer than any request that works, shorter than a user's patience.
FIRST_WARNING_S = 3.0
GROWTH = 2.0  # each warning comes after twice the time of the one before
CHECK_S = 0.5
# A slower upload is taken for an idle store. 256 kB/s is 2 Mbit/s, below any link that could carry
# a round; a hanging request of 64 MB is then found after five minutes.
MIN_BYTES_PER_S = 256e3

log = logging.getLogger(__name__)


class IdleTracker:
    """How long one store has been idle, and what was logged about it. Pure but for its lock."""

    def __init__(self, name: str, env: Mapping[str, str] = os.environ) -> None:
        self._name = name
        self._env = env
        self._lock = threading.Lock()
        self._waiting: dict[int, float] = {}  # by request: from when on it could be answered
        self._next = 0
        self._progress_at = 0.0
        self._warned_s = 0.0
        self._reason = ""

    def begin(self, size: int, now: float) -> int:
        """A request of so many bytes is sent; returns its number."""
        with self._lock:
            self._next += 1
            self._waiting[self._next] = now + size / MIN_BYTES_PER_S
            return self._next

    def fail(self, reason: str) -> None:
        """A request failed, and is tried again."""
        self._reason = reason

    def progress(self, now: float) -> str:
        """Bytes came; returns what to log if a warning is over."""
        with self._lock:
            return self._progress(now)

    def _progress(self, now: float) -> str:
        text = ""
        if self._warned_s:
            text = f"{self._name}: answers again, after {self._idle_s(now):.0f} s"
        self._progress_at, self._warned_s, self._reason = now, 0.0, ""
        return text

    def end(self, request: int, now: float, *, is_answer: bool) -> str:
        """The request is over; returns what to log if a warning is over."""
        with self._lock:
            text = self._progress(now) if is_answer and self._warned_s else ""
            if is_answer:
                self._progress_at, self._reason = now, ""
            self._waiting.pop(request, None)
            if not self._waiting:
                self._warned_s = 0.0
        return text

    def warning(self, now: float) -> str:
        """What to log of a store that is idle; "" if it is not, or the next warning is not due."""
        with self._lock:
            idle_s = self._idle_s(now)
            if idle_s < (self._warned_s * GROWTH or FIRST_WARNING_S):
                return ""
            self._warned_s = idle_s
            reason = f": {self._reason}" if self._reason else ""
        missing = missing_keys(self._name, self._env)
        keys = f"; not set: {', '.join(missing)}" if missing else ""
        return f"{self._name}: no answer for {idle_s:.0f} s{reason}{keys}; still trying"

    def _idle_s(self, now: float) -> float:
        if not self._waiting:
            return 0.0
        return now - max(self._progress_at, min(self._waiting.values()))

    @property
    def is_over(self) -> bool:
        return not self._waiting


class IdleWatch:
    """One thread a process, which looks at all stores that are waited for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._trackers: set[IdleTracker] = set()
        self._pid = 0
        self._wake = threading.Event()

    def add(self, tracker: IdleTracker) -> None:
        with self._lock:
            if tracker in self._trackers and self._pid == os.getpid():
                return  # the thread is awake as long as it has a store
            self._trackers.add(tracker)
            if self._pid != os.getpid():  # a forked child has no thread yet
                self._pid, self._wake = os.getpid(), threading.Event()
                threading.Thread(target=self._run, name="store idle watch", daemon=True).start()
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            time.sleep(CHECK_S)
            with self._lock:
                trackers = list(self._trackers)
                self._trackers = {each for each in trackers if not each.is_over}
                if not self._trackers:
                    self._wake.clear()
            for tracker in trackers:
                if text := tracker.warning(time.monotonic()):
                    log.warning("%s", text)


watch = IdleWatch()
