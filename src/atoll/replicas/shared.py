"""Gangs that several processes follow at once: what others ask for counts, nothing is torn down.

Each process has a controller of its own. They never disturb each other: a wish carries a version,
and the newest one is everybody's; what has ended stays to be read until its launcher removes it.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from atoll.core.errors import Conflict
from atoll.core.ports import Executor, Key, Store
from atoll.core.reasons import ExitReason
from atoll.core.status import (
    DesiredState,
    Exit,
    Followup,
    LogLine,
    Observation,
    ObservedRank,
    Status,
    Training,
)


class StopCause(NamedTuple):
    """Why a gang was stopped, as in `Status.failing`; empty if it was cancelled."""

    reason: str = ""
    message: str = ""


class SharedBackend(Executor):
    """To be placed before the class of a backend: any process can find its gangs.

    Its `release` keeps what others may read.
    """

    async def find(self, job_name: str, uid: str | None) -> Training | None:
        """The launch of that name, as far as the backend knows it; None if there is none."""
        raise NotImplementedError

    async def stop_cause(self, training: Training) -> StopCause:
        """Why another process has stopped it."""
        raise NotImplementedError


class SharedExecutor(Executor):
    """The executor that the controller of a script works with."""

    def __init__(
        self,
        backend: SharedBackend,
        store: Store,
        on_gone: Callable[[Key], None],
        on_observed: Callable[[Key], None] = lambda key: None,
    ) -> None:
        self.name = backend.name
        self._backend = backend
        self._store = store
        self._on_gone = on_gone
        self._on_observed = on_observed
        self._asked: set[str] = set()  # gangs that the backend was asked for
        self._there: set[str] = set()  # gangs that the backend has had
        self._concluded: set[str] = set()

    def note_found(self, training: Training) -> None:
        """The gang was found: should the backend not have it, it was deleted since."""
        self._there.add(training.uid)

    def has_asked(self, training: Training) -> bool:
        """Whether anything of the gang may be with the backend."""
        return training.uid in self._asked

    async def apply(self, training: Training, desired: DesiredState) -> None:
        self._asked.add(training.uid)
        await self._backend.apply(training, desired)

    async def observe(self, training: Training) -> Observation:
        if training.status.phase.is_terminal:
            return Observation(is_supervised=training.uid not in self._concluded)
        observation = await self._backend.observe(training)
        self._on_observed(training.key)
        if observation.desired is not None:
            self._there.add(training.uid)
            await self._follow_others(training, observation.desired)
        elif training.uid in self._there and not observation.is_supervised:
            await self._note_gone(training)
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

    async def result(self, training: Training, rank: int) -> tuple[str, bytes] | None:
        return await self._backend.result(training, rank)

    def logs(
        self,
        training: Training,
        *,
        ranks: Sequence[int] | None = None,
        tail: int | None = None,
        follow: Callable[[], bool] | None = None,
    ) -> AsyncIterator[LogLine]:
        return self._backend.logs(training, ranks=ranks, tail=tail, follow=follow)

    async def _follow_others(self, training: Training, accepted: DesiredState) -> None:
        """Takes over a wish of another process. Raises Conflict: the pass begins anew with it."""
        desired = training.status.desired
        if desired is None or accepted == desired or accepted.version < desired.version:
            return
        status = replace(
            training.status, desired=accepted, discarded_attempts=dict(accepted.discarded_attempts)
        )
        is_stopped = accepted.size == 0 and not training.is_cancelling and not status.failing
        cause = await self._backend.stop_cause(training) if is_stopped else StopCause()
        stored = await self._store.update_status(training, with_cause(status, cause))
        if is_stopped and not cause.reason:
            await self._store.update_spec(replace(stored, spec=replace(stored.spec, cancel=True)))
        raise Conflict("another process has changed the gang")

    async def _note_gone(self, training: Training) -> None:
        if training.is_cancelling:
            return
        self._on_gone(training.key)
        cancelled = replace(training.spec, cancel=True)
        await self._store.update_spec(replace(training, spec=cancelled))
        raise Conflict("the gang no longer exists")


def with_cause(status: Status, cause: StopCause) -> Status:
    if not cause.reason:
        return status
    return replace(status, failing=cause.reason, failing_message=cause.message)


def without_gang(training: Training, observation: Observation, now: float) -> Observation:
    """What is seen of a gang that was deleted: whatever ends or is missing then, was stopped."""
    ranks = [_stopped(rank) for rank in observation.ranks]
    visible = {rank.rank for rank in observation.ranks}
    missing = [r for r in training.status.ranks if r.is_alive and r.rank not in visible]
    for rank in missing:
        end = Exit(code=None, at=now, reason=ExitReason.DELETED, is_stopped=True)
        ranks.append(
            ObservedRank(
                rank=rank.rank,
                state="exited",
                attempt=rank.attempt,
                restarts=rank.restarts,
                started_at=rank.started_at,
                exit=end,
            )
        )
    return replace(observation, ranks=[rank for rank in ranks if rank.state != "waiting"])


# Ends of a rank's own, which no deletion of its gang explains.
OWN_ENDS = frozenset({ExitReason.ERROR, ExitReason.OOM_KILLED, ExitReason.COMMAND_NOT_FOUND})


def _stopped(rank: ObservedRank) -> ObservedRank:
    if rank.exit is None or rank.exit.is_success or rank.exit.reason in OWN_ENDS:
        return rank
    return replace(rank, exit=replace(rank.exit, is_stopped=True))
