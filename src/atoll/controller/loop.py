"""Runs a pass over a training when its spec or a rank changed, or when a pass is due.

There is no periodic scan: idle trainings cost nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from atoll.controller.clock import machine_clock
from atoll.controller.informer import Informer
from atoll.controller.queue import WorkQueue
from atoll.controller.reconcile import IdleTimes, Reconciler, Rounds, no_idle_times, no_rounds
from atoll.core.clock import Now
from atoll.core.errors import AtollError, Conflict, Denied, NotFound, Permanent, Temporary
from atoll.core.ports import Executor, Key, Store
from atoll.core.status import Training

log = logging.getLogger(__name__)

# Passes at a time. A pass mostly waits for the backend; an API server or a Slurm controller should
# not get more questions at once from one control plane.
WORKERS = 16
# How often leftovers of trainings that were deleted by force are looked for: they cost money, but
# the search lists everything at the backend.
SWEEP_S = 300.0


class Pass(NamedTuple):
    """A finished pass over one training."""

    key: Key
    started_at: float  # by `time.perf_counter`
    seconds: float
    again_in_s: float | None = None  # 0: the next pass follows at once
    error: Exception | None = None


class Controller:
    """`run()` until cancelled. Cancelling stops no rank.

    Without the informer of its process it runs one of its own.
    """

    def __init__(
        self,
        store: Store,
        executors: Mapping[str, Executor],
        *,
        informer: Informer | None = None,
        clock: Callable[[], Now] | None = None,
        on_pass: Callable[[Pass], None] = lambda done: None,
        idle_s: IdleTimes = no_idle_times,
        rounds: Rounds = no_rounds,
    ) -> None:
        self._informer = informer or Informer(store)
        self._has_own_informer = informer is None
        self._executors = executors
        self._reconciler = Reconciler(store, executors, clock or machine_clock(), idle_s, rounds)
        self._queue = WorkQueue()
        self._on_pass = on_pass
        self._loop: asyncio.AbstractEventLoop | None = None

    def wake(self, uid: str) -> None:
        """Queues a pass over a training that had one before. From any thread."""
        key = self._reconciler.keys.get(uid)
        if key is not None and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody looks any more
                self._loop.call_soon_threadsafe(self._queue.add, key)

    async def run(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            if self._has_own_informer:
                tasks.create_task(self._informer.run())
            tasks.create_task(self._follow_store())
            for executor in self._executors.values():
                tasks.create_task(self._follow_executor(executor))
            for _ in range(WORKERS):
                tasks.create_task(self._work())

    async def _follow_store(self) -> None:
        async for update in self._informer.updates():
            if update.training is None or update.is_removed:
                continue
            if update.is_listed or has_news(update.training):
                self._queue.add(update.key)

    async def _follow_executor(self, executor: Executor) -> None:
        async for key in executor.changes():
            self._queue.add(key)

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            started = time.perf_counter()
            again: float | None = None
            failure: Exception | None = None
            try:
                again = await self._reconciler.reconcile(key)
            except Exception as error:
                failure = error
                self._retry(key, error)
            else:
                self._queue.forgive(key)
                if again is not None:
                    self._queue.add_after(key, again)
            finally:
                self._queue.done(key)
            self._on_pass(Pass(key, started, time.perf_counter() - started, again, failure))

    def _retry(self, key: Key, error: Exception) -> None:
        if isinstance(error, Temporary):
            log.info("%s/%s: %s; trying again", *key, error)
            self._queue.retry(key, error.retry_after_s)
            return
        # The backend refused, or somebody was faster: a traceback would not help.
        if isinstance(error, Denied | Permanent | NotFound | Conflict):
            log.warning("%s/%s: %s; trying again", *key, error)
        else:
            log.error("%s/%s: the pass failed; trying again", *key, exc_info=error)
        self._queue.retry(key)


def has_news(training: Training) -> bool:
    """Whether somebody other than the controller has changed the training."""
    is_observed = training.status.observed_generation == training.generation
    return not is_observed or training.deletion_requested_at is not None


async def keep_swept(store: Store, executor: Executor) -> None:
    """Deletes, from time to time, what trainings deleted by force have left with a backend.

    Until cancelled. A backend that does not answer is tried again next time.
    """

    async def known() -> set[str]:
        return (await store.snapshot()).uids

    while True:
        try:
            await executor.sweep(known)
        except AtollError as error:
            log.warning("sweeping: %s", error)
        except Exception:  # of whatever library the backend uses
            log.exception("sweeping")
        await asyncio.sleep(SWEEP_S)
