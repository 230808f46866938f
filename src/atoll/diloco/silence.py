"""A store that does not answer is told of while it is waited for: one line a process, then again.

A thread looks at the requests that wait, since one of them may hang where nothing is raised.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping

from atoll.core.stores import missing_keys

FIRST_S = 3.0
TIMES = 2.0  # each remark comes after twice the time of the one before
CHECK_S = 0.5
BYTES_A_SECOND = 1e6  # a slower link is taken for a silent store

log = logging.getLogger(__name__)


class Silence:
    """How long one store has been silent, and what was said of that."""

    def __init__(self, name: str, env: Mapping[str, str] = os.environ) -> None:
        self._name = name
        self._env = env
        self._lock = threading.Lock()
        self._waiting: dict[int, float] = {}  # by request: from when on it could be answered
        self._next = 0
        self._answered_at = 0.0
        self._warned_s = 0.0
        self._why = ""

    def begin(self, size: int, now: float) -> int:
        """A request of so many bytes is sent."""
        with self._lock:
            self._next += 1
            self._waiting[self._next] = now + size / BYTES_A_SECOND
            return self._next

    def fail(self, why: str) -> None:
        """A request failed, and is tried again."""
        self._why = why

    def end(self, request: int, now: float, *, is_answer: bool) -> str:
        """What to say: nothing, unless a silence that was told of is over."""
        with self._lock:
            message = ""
            if is_answer:
                if self._warned_s:
                    message = f"{self._name}: answers again, after {self._silent_s(now):.0f} s"
                self._answered_at, self._warned_s, self._why = now, 0.0, ""
            self._waiting.pop(request, None)
            if not self._waiting:
                self._warned_s = 0.0
        return message

    def check(self, now: float) -> str:
        """What to say of a store that is silent; nothing if it is not, or it was said."""
        with self._lock:
            silent_s = self._silent_s(now)
            if silent_s < (self._warned_s * TIMES or FIRST_S):
                return ""
            self._warned_s = silent_s
            why = f": {self._why}" if self._why else ""
        missing = missing_keys(self._name, self._env)
        keys = f"; not set: {', '.join(missing)}" if missing else ""
        return f"{self._name}: no answer for {silent_s:.0f} s{why}{keys}; still trying"

    def _silent_s(self, now: float) -> float:
        if not self._waiting:
            return 0.0
        return now - max(self._answered_at, min(self._waiting.values()))

    @property
    def is_over(self) -> bool:
        return not self._waiting


class _Watch:
    """One thread a process, which looks at all stores that are waited for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stores: set[Silence] = set()
        self._pid = 0
        self._wake = threading.Event()

    def add(self, store: Silence) -> None:
        with self._lock:
            if store in self._stores and self._pid == os.getpid():
                return  # the thread is awake as long as it has a store
            self._stores.add(store)
            if self._pid != os.getpid():  # a forked child has no thread yet
                self._pid, self._wake = os.getpid(), threading.Event()
                threading.Thread(target=self._run, name="store watch", daemon=True).start()
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.wait()
            time.sleep(CHECK_S)
            with self._lock:
                stores = list(self._stores)
                self._stores = {store for store in stores if not store.is_over}
                if not self._stores:
                    self._wake.clear()
            for store in stores:
                if message := store.check(time.monotonic()):
                    log.warning("%s", message)


_watch = _Watch()


def begin(store: Silence, size: int) -> Callable[[bool], None]:
    """A request of so many bytes is sent; what is returned says whether there was an answer."""
    request = store.begin(size, time.monotonic())
    _watch.add(store)

    def end(is_answer: bool) -> None:
        if message := store.end(request, time.monotonic(), is_answer=is_answer):
            log.warning("%s", message)

    return end
