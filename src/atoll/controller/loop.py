"""Runs a pass over a training when its spec or a rank changed, or when a pass is due.

There is no periodic scan: idle trainings cost nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from atoll.controller.informer import Informer
from atoll.controller.reconcile import (
    IdleTimes,
    Reconciler,
    ReportedSettings,
    Rounds,
    no_idle_times,
    no_rounds,
    no_settings,
)
from atoll.core.clock import Clock, ClockMark, Now, grown_s
from atoll.core.errors import (
    AtollError,
    Conflict,
    Denied,
    NotFound,
    Permanent,
    Temporary,
    ValidationError,
)
from atoll.core.model import decode, encode
from atoll.core.ports import Executor, Key, Store
from atoll.core.status import Training
from atoll.files.writing import write_file

# The clock of this machine, which goes on over restarts of the control plane.

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
KEEP_S = 300.0  # what a crash of the machine may leave uncounted


def machine_clock(path: Path | None = None) -> Clock:
    """Goes on from the mark in `path`, if there is one."""
    mark = None
    if path is not None:
        with contextlib.suppress(OSError, ValidationError):
            mark = decode(path.read_bytes(), ClockMark)
    # CLOCK_MONOTONIC: it stands still while the machine sleeps.
    return Clock(time.time, time.monotonic, boot=_boot(), mark=mark)


async def keep_mark(clock: Clock, path: Path) -> None:
    """Writes the mark from time to time, until cancelled."""
    while True:
        clock()
        write_mark(clock, path)
        await asyncio.sleep(KEEP_S)


def write_mark(clock: Clock, path: Path) -> None:
    """A full disk is no reason to stop: an older mark of this boot is as good."""
    with contextlib.suppress(OSError):
        write_file(path, encode(clock.mark))


def _boot() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


# A keyed work queue: at most one pass per key at a time, and repeats are merged.
#
# A key that is added while a pass runs gets one more pass. Of several due times of a key the
# earliest counts. An idle queue costs one timer.


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


log = logging.getLogger(__name__)

# Passes at a time. A pass mostly waits for the backend; an API server or a Slurm controller should
# not get more questions at once from one control plane.
WORKERS = 16
# How often leftovers of trainings that were deleted by force are searched for: they cost money, but
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
        settings: ReportedSettings = no_settings,
    ) -> None:
        self._informer = informer or Informer(store)
        self._has_own_informer = informer is None
        self._executors = executors
        self._reconciler = Reconciler(
            store, executors, clock or machine_clock(), idle_s, rounds, settings
        )
        self._queue = WorkQueue()
        self._on_pass = on_pass
        self._loop: asyncio.AbstractEventLoop | None = None

    def wake(self, uid: str) -> None:
        """Queues a pass over a training that had one before. From any thread."""
        key = self._reconciler.keys.get(uid)
        if key is not None and self._loop is not None:
            with contextlib.suppress(
                RuntimeError
            ):  # the loop is closed: nobody reconciles any more
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


async def sweep_periodically(store: Store, executor: Executor) -> None:
    """Deletes, from time to time, what trainings deleted by force have left with a backend.

    Until cancelled. A backend that does not answer is tried again next time.
    """

    async def stored_uids() -> set[str]:
        return (await store.snapshot()).uids

    while True:
        try:
            await executor.sweep(stored_uids)
        except AtollError as error:
            log.warning("sweeping: %s", error)
        except Exception:  # of whatever library the backend uses
            log.exception("sweeping")
        await asyncio.sleep(SWEEP_S)
