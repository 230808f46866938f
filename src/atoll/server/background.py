"""The background tasks of a control plane, by name.

A task that fails is logged at once, started again after a pause, and listed by `/readyz` until it
works again: nothing that people rely on stops unnoticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

from atoll.controller.informer import Informer
from atoll.controller.loop import Controller, sweep_periodically
from atoll.core.clock import Now, grown_s
from atoll.core.config import RoundStore
from atoll.core.errors import AtollError
from atoll.core.metrics import RankUsage
from atoll.core.model import Model
from atoll.core.ports import Executor, Store
from atoll.metrics.collect import Collector
from atoll.metrics.store import MetricStore
from atoll.rounds.follow import RoundFollower, metrics_uri_of, store_access_of
from atoll.server.deliver import Deliverer
from atoll.server.gauges import Gauges
from atoll.store.feed import Outbox

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


# `assemble()`: the background tasks that every control plane has, wired to one another.
#
# The control plane of one machine and the operator differ in store, executors and clock, and in
# nothing that is here.

Usage = Callable[[], Awaitable[Mapping[str, Sequence[RankUsage]]]]


def assemble(
    *,
    store: Store,
    executors: Mapping[str, Executor],
    kinds: Mapping[str, str],
    informer: Informer,
    clock: Callable[[], Now],
    metrics: MetricStore,
    gauges: Gauges,
    outbox: Outbox,
    round_stores: Sequence[RoundStore],
    own_namespace: str,
    machine_use: Usage | None = None,
    may_return: Callable[[str], bool] = lambda uid: False,
) -> dict[str, Work]:
    """The tasks by name; `CONTROLLER` is the one without which nothing works.

    `kinds` has the kind of each executor. Stores of rounds that the configuration names are read
    for trainings of `own_namespace` alone. `machine_use` measures ranks on this machine;
    `may_return` says whether a training that is not stored may be adopted again.
    """

    def control() -> Awaitable[None]:
        controller = Controller(
            store,
            executors,
            informer=informer,
            clock=clock,
            on_pass=lambda done: gauges.record_pass(done.seconds),
            idle_s=metrics.idle_tracker.idle_s,
            rounds=metrics.rounds.observed,
            settings=lambda uid: metrics.settings.get(uid, {}),
        )
        metrics.rounds.on_news = controller.wake
        return controller.run()

    collector = Collector(metrics, metrics_uri_of(executors), machine_use, may_return)
    follower = RoundFollower(
        metrics.rounds, store_access_of(executors, kinds), round_stores, own_namespace
    )
    tasks: dict[str, Work] = {
        CONTROLLER: control,
        "webhooks": Deliverer(outbox).run,
        "metrics": lambda: collector.run(informer),
        "rounds": lambda: follower.run(informer),
    }
    for name, executor in executors.items():
        tasks[f"sweep of {name}"] = functools.partial(sweep_periodically, store, executor)
    return tasks
