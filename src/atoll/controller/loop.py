"""Runs a pass over a training when its spec or a rank changed, or when a pass is due.

There is no periodic scan: idle trainings cost nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from atoll.controller.clock import machine_clock
from atoll.controller.queue import WorkQueue
from atoll.controller.reconcile import Quiet, Reconciler, unknown
from atoll.core.clock import Time
from atoll.core.errors import Conflict, Denied, Gone, NotFound, Permanent, Temporary
from atoll.core.ports import Executor, Key, Store
from atoll.core.status import Training

log = logging.getLogger(__name__)

WORKERS = 16


class Pass(NamedTuple):
    """A finished pass over one training."""

    key: Key
    started_at: float  # by `time.perf_counter`
    seconds: float
    again_in_s: float | None = None  # 0: the next pass follows at once
    error: Exception | None = None


class Controller:
    """`run()` until cancelled. Cancelling stops no rank."""

    def __init__(
        self,
        store: Store,
        executors: Mapping[str, Executor],
        *,
        clock: Callable[[], Time] | None = None,
        on_pass: Callable[[Pass], None] = lambda done: None,
        quiet_s: Quiet = unknown,
    ) -> None:
        self._store = store
        self._executors = executors
        self._reconciler = Reconciler(store, executors, clock or machine_clock(), quiet_s)
        self._queue = WorkQueue()
        self._on_pass = on_pass
        self.is_started = False

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_store())
            for executor in self._executors.values():
                tasks.create_task(self._follow_executor(executor))
            for _ in range(WORKERS):
                tasks.create_task(self._work())

    async def _follow_store(self) -> None:
        while True:
            version = await self._store.version()
            for training in await self._store.list():
                if not is_settled(training):
                    self._queue.add(training.key)
            self.is_started = True
            try:
                async for change in self._store.watch(version):
                    if not change.is_removed and has_news(change.training):
                        self._queue.add(change.training.key)
                return
            except Gone:
                log.warning("fell behind the store's change log; reading everything again")

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


def is_settled(training: Training) -> bool:
    """Whether it is over, released, and kept until somebody deletes it."""
    is_kept = training.spec.ttl_seconds is None and training.deletion_requested_at is None
    return training.status.is_released and is_kept
