"""A control plane inside a script: the real controller over a store in memory.

It has a thread and an event loop of its own, to which calls are submitted. Several processes may
follow one gang: each has a controller of its own, a desired state carries a version, the newest
counts for all, and what has ended stays to be read until its launcher removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from atoll.controller.informer import Informer
from atoll.controller.loop import Controller, Pass
from atoll.core.errors import AtollError, Conflict, NotFound, Permanent, Temporary
from atoll.core.phase import ExitReason, PhaseReason
from atoll.core.ports import Executor, Key, Store
from atoll.core.status import (
    DesiredState,
    Exit,
    Followup,
    Observation,
    ObservedRank,
    Training,
)
from atoll.store.sqlite import MemoryStore

T = TypeVar("T")

LAUNCH_PATIENCE_S = 10.0  # errors that pass within it, such as a busy API server, are retried
AFTER_GRACE_S = 5.0  # for a backend to notice the end of a killed rank
LEAVE_S = 5.0  # a script that ends waits no longer for its own control plane


class Gang:
    """One launch and the last known state of its training. `is_own`: it was launched here.

    `plane` is who follows it; None if there is no such launch.
    """

    def __init__(
        self, training: Training, plane: ScriptPlane | None, *, is_own: bool = True
    ) -> None:
        self.training = training
        self.plane = plane
        self.is_own = is_own
        self.is_removed = False
        self.is_deleted = False  # somebody has deleted it
        self.last: Pass | None = None
        self.fault: Exception | None = None  # why it cannot be observed, unless that may pass
        self.results: dict[int, tuple[Any, str]] = {}
        self.observed_at = 0.0  # by `time.perf_counter`, when the backend last answered
        self.has_begun = False
        self.cancelling = asyncio.Lock()

    @property
    def is_over(self) -> bool:
        return self.training.status.phase.is_terminal

    @property
    def error(self) -> Exception | None:
        """The error of the last pass."""
        return self.last.error if self.last else None

    @property
    def grace_ends(self) -> float:
        return time.monotonic() + self.training.spec.stop_grace_s + AFTER_GRACE_S

    def note(self, done: Pass) -> None:
        self.last = done
        # An action that was refused after a good observation does not hide how the gang is.
        is_known = self.has_begun and self.observed_at >= done.started_at
        if is_known or not isinstance(done.error, Temporary | Conflict | NotFound):
            self.fault = None if is_known else done.error

    def is_passed(self, since: float) -> bool:
        """Whether a pass that started after `since` failed or had nothing more to do."""
        last = self.last
        if last is None or last.started_at < since:
            return False
        return last.error is not None or last.again_in_s != 0.0


class ScriptPlane:
    """All gangs of one library executor."""

    def __init__(self, make: Callable[[], Executor]) -> None:
        self.store = MemoryStore()
        self._gangs: dict[Key, Gang] = {}
        self._news = asyncio.Event()
        self._death: Permanent | None = None
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="atoll-replicas", daemon=True)
        self._thread.start()
        try:
            self.executor = self.call(self._open(make))
        except BaseException:
            self._end()
            raise

    def call(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Runs `work` in the plane's own thread and returns its result."""
        try:
            self.check_open()
        except RuntimeError:
            work.close()
            raise
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout)
        except BaseException:
            future.cancel()  # when interrupted, nobody waits for it any longer
            raise

    def check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this executor is closed")

    def launch(self, training: Training) -> Gang:
        """Launches the gang. If that fails or is interrupted, nothing of it is left."""
        gang = Gang(training, self)
        try:
            self.call(self._launch(gang))
        except BaseException as error:
            with contextlib.suppress(AtollError):  # the controller keeps trying
                if not self._shared.has_applied(training):
                    self.call(self._forget(gang))
                self.call(self._delete(gang, is_away=isinstance(error, Temporary)))
            raise
        return gang

    def close(self) -> None:
        """Stops and removes every gang that was launched here. Raises if one remains, and may
        then be repeated."""
        if not self._is_closed:
            self.call(self._close())
            self._end()

    def leave(self) -> None:
        """Ends this control plane alone: the gangs go on."""
        if not self._is_closed:
            with contextlib.suppress(Exception):  # the script is ending
                self.call(self._leave(), timeout=LEAVE_S)
            self._end()

    def fault_of(self, gang: Gang) -> Exception | None:
        """The error that keeps the gang from being observed, if there is one."""
        return self._death or gang.fault

    async def cancel(self, gang: Gang) -> None:
        """Stops the gang, and waits for its end for the length of the grace.

        Raises if the backend did not accept it. The gang goes on then, and nothing stops it later.
        """
        async with gang.cancelling:
            if gang.is_over:
                return
            gang.fault = None
            before = await self.store.get(gang.training.key)
            spec = replace(before.spec, cancel=True)
            await self.store.update_spec(replace(before, spec=spec))
            since = time.perf_counter()
            try:
                # However slow the backend is: until it has answered, nothing is accepted.
                await self.wait([gang], lambda: gang.is_over or gang.is_passed(since), None)
                error = gang.error
                if error is not None and not gang.is_over:
                    if not isinstance(error, Conflict | NotFound):
                        raise error
            except AtollError:
                await self._withdraw_cancel(gang, before)
                raise
            await self.wait([gang], lambda: gang.is_over, gang.grace_ends)

    async def _withdraw_cancel(self, gang: Gang, before: Training) -> None:
        """Want the gang as `before` again. What the backend did after all is observed as usual."""
        gang.fault = None
        while not before.spec.cancel:
            with contextlib.suppress(Conflict):  # a pass was faster
                training = await self.store.get(before.key)
                if training.status.phase.is_terminal:
                    return
                status = replace(training.status, desired=before.status.desired)
                training = await self.store.update_status(training, status)
                spec = replace(training.spec, cancel=False)
                await self.store.update_spec(replace(training, spec=spec))
                return

    async def wait(
        self, gangs: Sequence[Gang], until: Callable[[], bool], deadline: float | None
    ) -> bool:
        """Whether `until` came true in time. Raises the error that keeps a gang from being
        observed."""
        while not until():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            for fault in filter(None, map(self.fault_of, gangs)):
                raise fault
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._news.wait()
        return True

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _end(self) -> None:
        self._is_closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self, make: Callable[[], Executor]) -> Executor:
        executor = make()
        executor.is_shared = True
        self._shared = SharedExecutor(executor, self.store, self._gangs)
        informer = Informer(self.store)
        controller = Controller(
            self.store, {executor.name: self._shared}, informer=informer, on_pass=self._note_pass
        )
        self._running = asyncio.create_task(self._follow_with(controller, informer))
        self._running.add_done_callback(self._note_death)
        return executor

    async def _follow_with(self, controller: Controller, informer: Informer) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(informer.run())
            tasks.create_task(controller.run())
            tasks.create_task(self._follow(informer))

    async def _follow(self, informer: Informer) -> None:
        """Copy each change of the store to its gang, and wake the waiters."""
        async for update in informer.updates():
            gang = self._gangs.get(update.key)
            if gang is not None and gang.training.uid == update.uid:
                gang.training = update.training or gang.training
                gang.is_removed = update.is_removed
                self._wake()

    def _note_pass(self, done: Pass) -> None:
        if gang := self._gangs.get(done.key):  # a backend may report what others launched
            gang.note(done)
            self._wake()

    def _note_death(self, running: asyncio.Task[None]) -> None:
        if not running.cancelled() and (error := running.exception()) is not None:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            self._death = Permanent(f"replicas can no longer be followed: {error}")
            self._death.__cause__ = error
            self._wake()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _launch(self, gang: Gang) -> None:
        await self._begin(gang)
        if gang.training.status.failing == PhaseReason.EXECUTOR_REFUSED:
            raise Permanent(gang.training.status.failing_message)

    async def adopt(self, job_name: str, uid: str | None) -> Gang | None:
        """The gang of that launch, whoever has launched it; None if there is none."""
        training = await self.executor.find(job_name, uid)
        if training is None:
            return None
        self._shared.note_adopted(training)
        is_over = training.status.phase.is_terminal  # its record is all there is to know
        news = {"is_released": True} if is_over else {"observed_generation": 0}
        status = replace(training.status, **news)
        gang = Gang(replace(training, status=status), self, is_own=False)
        if not is_over:
            try:
                await self._begin(gang)  # unobserved, so that the controller observes it
            except BaseException:
                await self._forget(gang)
                raise
        return gang

    async def _forget(self, gang: Gang) -> None:
        """Follow it no longer, without a request to the backend."""
        self._gangs.pop(gang.training.key, None)
        await self.store.remove(gang.training)

    async def _begin(self, gang: Gang) -> None:
        """Stores the training and waits for the first pass over it. Raises its error."""
        self._gangs[gang.training.key] = gang
        started = time.perf_counter()
        gang.training = await self.store.create(gang.training)
        deadline = time.monotonic() + LAUNCH_PATIENCE_S

        def is_decided() -> bool:
            is_late = time.monotonic() >= deadline
            return gang.is_passed(started) and (gang.error is None or is_late)

        if not await self.wait([gang], is_decided, deadline):
            await self.wait([gang], is_decided, None)  # a slow backend is waited for
        if gang.error is not None:
            raise gang.error
        gang.has_begun = True
        gang.training = await self.store.get(gang.training.key)

    async def _delete(self, gang: Gang, *, is_away: bool = False) -> None:
        """Stops and removes it with its logs, within the grace. `is_away`: without waiting for the
        backend.

        Raises the error that keeps the backend from removing it.
        """
        if gang.training.key not in self._gangs or gang.is_removed:
            return
        deadline = 0.0 if is_away else gang.grace_ends
        gang.fault = None
        with contextlib.suppress(Exception):  # nothing more is needed once it is released
            training = await self.store.get(gang.training.key)
            await self.store.update_spec(replace(training, deletion_requested_at=time.time()))
            await self.wait([gang], lambda: gang.is_removed, deadline)
        if not gang.is_removed:
            await self.executor.purge(gang.training)

    async def _close(self) -> None:
        own = [gang for gang in self._gangs.values() if gang.is_own]
        ends = await asyncio.gather(*map(self._delete, own), return_exceptions=True)
        for error in filter(None, ends):
            raise error
        await self._leave()

    async def _leave(self) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self.executor.close()


class SharedExecutor(Executor):
    """The executor that the controller of a script works with."""

    def __init__(self, backend: Executor, store: Store, gangs: Mapping[Key, Gang]) -> None:
        self.name = backend.name
        self._backend = backend
        self._store = store
        self._gangs = gangs
        self._applied: set[str] = set()  # gangs that the backend may have
        self._there: set[str] = set()  # gangs that the backend has had
        self._concluded: set[str] = set()

    def note_adopted(self, training: Training) -> None:
        """The gang was found: should the backend not have it, it was deleted since."""
        self._there.add(training.uid)

    def has_applied(self, training: Training) -> bool:
        """Whether anything of the gang may be with the backend."""
        return training.uid in self._applied

    async def apply(self, training: Training, desired: DesiredState) -> None:
        self._applied.add(training.uid)
        await self._backend.apply(training, desired)

    async def observe(self, training: Training) -> Observation:
        if training.status.phase.is_terminal:
            return Observation(is_supervised=training.uid not in self._concluded)
        observation = await self._backend.observe(training)
        self._gangs[training.key].observed_at = time.perf_counter()
        if observation.desired is not None:
            self._there.add(training.uid)
            await self._follow_others(training, observation.desired)
        elif training.uid in self._there and not observation.is_supervised:
            await self._note_deleted(training)
            return without_gang(training, observation, time.time())
        return observation

    async def release(self, training: Training) -> None:
        await self._backend.release(training)
        self._concluded.add(training.uid)

    async def purge(self, training: Training) -> None:
        await self._backend.purge(training)

    async def perform(self, training: Training, followup: Followup) -> None:
        await self._backend.perform(training, followup)

    def changes(self) -> AsyncIterator[Key]:
        return self._backend.changes()

    async def _follow_others(self, training: Training, accepted: DesiredState) -> None:
        """Adopt the desired state of another process. Raises Conflict: the next pass has it."""
        desired = training.status.desired
        if desired is None or accepted == desired or accepted.version < desired.version:
            return
        status = replace(
            training.status, desired=accepted, discarded_attempts=dict(accepted.discarded_attempts)
        )
        is_cancelled = False
        if accepted.size == 0 and not training.is_cancelling and not status.failing:
            cause = await self._backend.stop_cause(training)
            status = replace(status, failing=cause.reason, failing_message=cause.message)
            is_cancelled = not cause.reason
        stored = await self._store.update_status(training, status)
        if is_cancelled:
            await self._store.update_spec(replace(stored, spec=replace(stored.spec, cancel=True)))
        raise Conflict("another process has changed the launch")

    async def _note_deleted(self, training: Training) -> None:
        if training.is_cancelling:
            return
        self._gangs[training.key].is_deleted = True
        cancelled = replace(training.spec, cancel=True)
        await self._store.update_spec(replace(training, spec=cancelled))
        raise Conflict("the launch no longer exists")


def without_gang(training: Training, observation: Observation, now: float) -> Observation:
    """The observation of a deleted gang: ranks that end then or are missing were stopped."""
    ranks = [_stopped(rank) for rank in observation.ranks]
    visible = {rank.rank for rank in observation.ranks}
    end = Exit(code=None, at=now, reason=ExitReason.DELETED, is_stopped=True)
    ranks += [
        ObservedRank(
            rank=rank.rank,
            state="exited",
            attempt=rank.attempt,
            restarts=rank.restarts,
            started_at=rank.started_at,
            exit=end,
        )
        for rank in training.status.ranks
        if rank.is_alive and rank.rank not in visible
    ]
    return replace(observation, ranks=[rank for rank in ranks if rank.state != "waiting"])


# Ends of a rank's own, which no deletion of its gang explains.
OWN_ENDS = frozenset({ExitReason.ERROR, ExitReason.OOM_KILLED, ExitReason.COMMAND_NOT_FOUND})


def _stopped(rank: ObservedRank) -> ObservedRank:
    if rank.exit is None or rank.exit.is_success or rank.exit.reason in OWN_ENDS:
        return rank
    return replace(rank, exit=replace(rank.exit, is_stopped=True))
