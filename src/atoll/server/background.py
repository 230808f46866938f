"""The background tasks of a control plane, by name.

A task that fails is logged at once, started again after a pause, and listed by `/readyz` until it
works again: nothing that people rely on stops unnoticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from atoll.core.errors import AtollError
from atoll.core.model import Model
from atoll.core.retry import grown_s

FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 10.0  # short: people wait for what it shows
STEADY_S = 10.0  # after which a restarted task counts as working
ERROR_LENGTH = 300  # characters: one line of a log

log = logging.getLogger(__name__)

CONTROLLER = "controller"  # without it no training is reconciled

Work = Callable[[], Awaitable[None]]


class TaskFailure(Model, frozen=True, omit_defaults=False):
    """A background task that fails."""

    name: str
    error: str
    since: float | None = None  # seconds since the epoch


class BackgroundTasks:
    """All background tasks of one process."""

    def __init__(self, *, first_pause_s: float = FIRST_PAUSE_S, steady_s: float = STEADY_S) -> None:
        self._first_pause_s = first_pause_s
        self._steady_s = steady_s
        self._failures: dict[str, TaskFailure] = {}

    @property
    def failures(self) -> list[TaskFailure]:
        return list(self._failures.values())

    @contextlib.asynccontextmanager
    async def running(self, name: str, work: Work) -> AsyncIterator[None]:
        """Keeps `work` running until the block ends."""
        task = asyncio.create_task(self.keep_running(name, work), name=name)
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def keep_running(self, name: str, work: Work) -> None:
        """Runs `work` until it returns or this is cancelled; starts it again when it fails."""
        loop = asyncio.get_running_loop()
        deaths = 0
        try:
            while True:
                began = time.monotonic()
                steady = loop.call_later(self._steady_s, self._failures.pop, name, None)
                try:
                    return await work()
                except Exception as error:  # whatever it is: the task must not stay dead
                    if time.monotonic() - began > self._steady_s:
                        deaths = 0
                    pause_s = grown_s(self._first_pause_s, MAX_PAUSE_S, deaths)
                    self._note(name, error, pause_s)
                finally:
                    steady.cancel()
                deaths += 1
                await asyncio.sleep(pause_s)
        finally:
            self._failures.pop(name, None)

    def _note(self, name: str, error: Exception, pause_s: float) -> None:
        cause = first_of(error)
        text = " ".join(f"{type(cause).__name__}: {cause}".split())[:ERROR_LENGTH]
        before = self._failures.get(name)
        since = time.time() if before is None else before.since
        self._failures[name] = TaskFailure(name=name, error=text, since=since)
        log.error(
            "the background task %r died of %s; it starts again in %g s",
            *(name, text, pause_s),
            # For problems outside of atoll the message is enough.
            exc_info=None if isinstance(cause, AtollError | OSError | sqlite3.Error) else error,
        )


def first_of(error: BaseException) -> BaseException:
    """The first error of a group; the others are the same (a missing right, a locked file)."""
    return first_of(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
