"""Gangs driven from inside a script: the controller's passes, without a store or a server.

A thread of its own runs the executor; everything else only asks it. What to do next is decided
by the same `plan()` as for a training.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from atoll.core.errors import Conflict, NotFound, Temporary
from atoll.core.plan import Apply, Release, plan
from atoll.core.ports import Executor, Key, Tending
from atoll.core.status import Training, sooner

T = TypeVar("T")

LOOK_EVERY_S = 5.0  # should a backend forget to tell of a change
LAUNCH_PATIENCE_S = 10.0
AFTER_GRACE_S = 5.0


class Gang:
    """One launch: a training that is kept nowhere else."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.fault: Exception | None = None  # why the last pass failed
        self.results: dict[int, Any] = {}
        self.turn = asyncio.Lock()  # one pass at a time
        self.woken = asyncio.Event()
        self.moved = asyncio.Event()
        self.driver: asyncio.Task[None] | None = None

    @property
    def is_over(self) -> bool:
        return self.training.status.phase.is_terminal

    def move(self, training: Training, fault: Exception | None = None) -> None:
        if training != self.training or fault != self.fault:
            self.training, self.fault = training, fault
            told, self.moved = self.moved, asyncio.Event()
            told.set()


class Gangs:
    """All gangs of one library executor."""

    def __init__(self, make: Callable[[], Executor]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="atoll-gangs", daemon=True)
        self._gangs: dict[Key, Gang] = {}
        self._is_closed = False
        self._thread.start()
        self.executor = self.call(self._open(make))

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The outcome of `work`, done in the gangs' own thread."""
        try:
            self.check_open()
        except RuntimeError:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this executor is closed")

    def launch(self, training: Training) -> Gang:
        """Asked for. When that fails, or is interrupted, nothing is left of it."""
        gang = Gang(training)
        try:
            self.call(self._launch(gang))
        except BaseException:
            self.call(self._abandon(gang))
            raise
        return gang

    def close(self) -> None:
        """Every gang is stopped and gone."""
        if self._is_closed:
            return
        self.call(self._close())
        self._is_closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def cancel(self, gang: Gang) -> None:
        """Stopping; and stopped, if the backend does it within the grace.

        Raises when the backend did not take it; that is tried again, unasked.
        """
        if gang.is_over:
            return
        gang.move(replace(gang.training, spec=replace(gang.training.spec, cancel=True)))
        try:
            with contextlib.suppress(NotFound, Conflict):  # gone, or going
                await self._pass(gang)
        finally:
            gang.woken.set()
        grace_s = gang.training.spec.stop_grace_s + AFTER_GRACE_S
        await self.wait([gang], lambda: gang.is_over, time.monotonic() + grace_s)

    async def wait(
        self, gangs: Sequence[Gang], until: Callable[[], bool], deadline: float | None
    ) -> bool:
        """Whether `until` came true in time. Raises what keeps a gang from being watched."""
        while not until():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            for gang in gangs:
                if gang.fault is not None:
                    raise gang.fault
            waits = [asyncio.create_task(gang.moved.wait()) for gang in gangs]
            await asyncio.wait(waits, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        return True

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _open(self, make: Callable[[], Executor]) -> Executor:
        self.executor = make()
        self._listener = asyncio.create_task(self._listen())
        return self.executor

    async def _listen(self) -> None:
        async for key in self.executor.changes():
            if key in self._gangs:
                self._gangs[key].woken.set()

    async def _launch(self, gang: Gang) -> None:
        self._gangs[gang.training.key] = gang
        deadline = time.monotonic() + LAUNCH_PATIENCE_S
        while True:
            try:
                await self._pass(gang)
                break
            except Temporary as error:
                if time.monotonic() + error.retry_after_s > deadline:
                    raise
                await asyncio.sleep(error.retry_after_s)
        gang.driver = asyncio.create_task(self._drive(gang))

    async def _drive(self, gang: Gang) -> None:
        while not gang.training.status.is_released:
            gang.woken.clear()
            try:
                again = await self._pass(gang)
            except Temporary as error:
                again = error.retry_after_s
            except Exception as error:  # told to whoever asks; it may pass
                gang.move(gang.training, error)
                again = 1.0
            pause_s = LOOK_EVERY_S if again is None else min(again, LOOK_EVERY_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(pause_s, 0.0)):
                    await gang.woken.wait()

    async def _pass(self, gang: Gang) -> float | None:
        async with gang.turn:
            seen = await self.executor.observe(gang.training)
            made = plan(gang.training, seen, time.time())
            gang.move(replace(gang.training, status=made.status))
            if isinstance(self.executor, Tending):
                for chore in seen.chores:
                    await self.executor.perform(gang.training, chore)
            for action in made.actions:
                match action:
                    case Apply(wish):
                        await self.executor.apply(gang.training, wish)
                    case Release():
                        await self.executor.release(gang.training)
            return sooner(made.requeue_after_s, seen.again_in_s)

    async def _abandon(self, gang: Gang) -> None:
        if gang.driver is not None:
            gang.driver.cancel()
        self._gangs.pop(gang.training.key, None)
        await self.executor.release(gang.training)

    async def _close(self) -> None:
        running = [g for g in self._gangs.values() if not g.training.status.is_released]
        cancelled = await asyncio.gather(*map(self.cancel, running), return_exceptions=True)
        gone = await asyncio.gather(*map(self._abandon, running), return_exceptions=True)
        self._listener.cancel()
        close = getattr(self.executor, "close", None)
        if close is not None:
            await close()
        # What is gone needs no cancelling; what is not was told to stop, or was not.
        for error in (e for pair in zip(gone, cancelled, strict=True) if pair[0] for e in pair):
            if isinstance(error, Exception):
                raise error
