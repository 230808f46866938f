"""An executor that goes and comes back: what the status says meanwhile, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from atoll.controller.reconcile import LASTING_S, REPORT_AGAIN_S, Reconciler
from atoll.core.clock import Now
from atoll.core.errors import Denied, Temporary
from atoll.core.phase import ConditionType, Phase
from atoll.core.ports import Executor
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import (
    AttemptStatus,
    DesiredState,
    Event,
    Observation,
    ObservedRank,
    Status,
    Training,
    has_condition,
)
from atoll.store.sqlite import MemoryStore

KEY = ("n", "t")
SPEC = TrainingSpec(
    name="t", command=["x"], world_size=WorldSize(min=1, target=1, max=1), executor="eu"
)
DOWN = Temporary("the API server did not answer")


class Eu(Executor):
    """An executor that runs whatever it is asked for, unless it is away."""

    name = "eu"

    def __init__(self) -> None:
        self.away: Exception | None = None
        self.desired: DesiredState | None = None
        self.refuses: Exception | None = None
        self.applied: list[int] = []

    async def observe(self, training: Training) -> Observation:
        if self.away is not None:
            raise self.away
        ranks = range(self.desired.size if self.desired else 0)
        observation = [ObservedRank(rank=r, state="running", started_at=100.0) for r in ranks]
        return Observation(
            ranks=observation, desired=self.desired, is_supervised=self.desired is not None
        )

    async def apply(self, training: Training, desired: DesiredState) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.applied.append(desired.size)
        self.desired = desired


class Notes(MemoryStore):
    """Counts the writes of a status, and keeps the reasons of its events."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0
        self.reasons: list[str] = []

    async def update_status(
        self,
        training: Training,
        status: Status,
        events: Sequence[Event] = (),
        attempts: Sequence[AttemptStatus] = (),
    ) -> Training:
        self.writes += 1
        self.reasons += [event.reason for event in events]
        return await super().update_status(training, status, events, attempts)


class Plane:
    """A control plane over a store, which a restart leaves as it is."""

    def __init__(self) -> None:
        self.store, self.eu, self.now = Notes(), Eu(), 100.0
        training = Training(namespace="n", uid="u", spec=SPEC, created_at=self.now)
        asyncio.run(self.store.create(training))
        self.restart(eu=self.eu)

    def restart(self, **executors: Any) -> None:
        self.reconciler = Reconciler(self.store, executors, lambda: Now.at(self.now))

    def looks(self, count: int = 1) -> None:
        for _ in range(count):
            asyncio.run(self.reconciler.reconcile(KEY))

    def fails(self, count: int = 1) -> None:
        for _ in range(count):
            with pytest.raises((Temporary, Denied)):
                self.looks()

    @property
    def training(self) -> Training:
        return asyncio.run(self.store.get(KEY))

    @property
    def absences(self) -> list[str]:
        kinds = [c.type for c in self.training.status.conditions]
        return [kind for kind in kinds if kind.startswith("Executor")]


def test_one_failed_look_is_told_to_nobody() -> None:
    plane = Plane()
    plane.eu.away = DOWN
    plane.fails()
    assert plane.store.writes == 0
    plane.eu.away = None
    plane.looks()
    plane.eu.away = DOWN
    before = plane.training
    plane.fails()
    assert plane.training == before


@pytest.mark.parametrize("error", [DOWN, Denied("the token has expired")], ids=["away", "denied"])
def test_a_second_one_is_written_once_however_often_it_is_tried(error: Exception) -> None:
    plane = Plane()
    plane.eu.away = error
    plane.fails(10)
    assert plane.store.writes == 1
    assert plane.absences == ["ExecutorUnreachable"]
    assert plane.training.status.message == f"the executor 'eu' cannot be reached: {error}"
    assert plane.training.status.phase is Phase.NONE
    assert plane.store.reasons == ["ExecutorUnreachable"]


def test_words_that_change_with_every_look_are_not_written_with_every_look() -> None:
    plane = Plane()
    for number in range(10):
        plane.eu.away = Temporary(f"request {number} was not answered")
        plane.fails()
    assert plane.store.writes == 1
    plane.now += REPORT_AGAIN_S
    plane.fails(2)
    assert plane.store.writes == 2
    assert "request 9" in plane.training.status.message
    assert plane.store.reasons == ["ExecutorUnreachable"]


def test_it_is_taken_back_by_the_first_look_that_works() -> None:
    plane = Plane()
    plane.looks(2)
    running = plane.training.status
    assert running.phase is Phase.READY
    plane.store.reasons.clear()
    plane.eu.away = DOWN
    plane.fails(3)
    assert plane.training.status.phase is Phase.READY
    plane.restart(eu=plane.eu)  # what the status says outlives the one who wrote it
    plane.eu.away = None
    plane.looks()
    assert plane.training.status == running
    assert plane.store.reasons == ["ExecutorUnreachable", "ExecutorReachable"]


def test_a_training_goes_on_once_its_executor_is_configured_again() -> None:
    plane = Plane()
    plane.looks(2)
    running = plane.training.status
    plane.restart()
    plane.looks(2)
    assert plane.absences == ["ExecutorMissing"]
    assert plane.training.status.ranks == running.ranks
    cancelled = replace(plane.training, spec=replace(SPEC, cancel=True))
    asyncio.run(plane.store.update_spec(cancelled))
    plane.looks()
    assert "the cancellation waits" in plane.training.status.message
    assert plane.eu.applied == [1]
    plane.restart(eu=plane.eu)
    plane.looks(3)
    assert plane.absences == []
    assert plane.eu.applied == [1, 0]


def test_an_action_that_keeps_failing_is_told_and_cleared_when_it_works() -> None:
    plane = Plane()
    plane.eu.refuses = Denied("may not create jobs")
    plane.fails(3)
    assert not has_condition(plane.training.status, ConditionType.BACKEND_FAILING)  # it may pass
    plane.now += LASTING_S
    plane.fails(3)
    (told,) = [c for c in plane.training.status.conditions if c.type == "BackendFailing"]
    assert "may not create jobs" in told.message
    assert plane.store.reasons.count("BackendFailing") == 1
    written = plane.store.writes
    plane.fails(5)
    assert plane.store.writes == written
    plane.eu.refuses = None
    plane.looks(2)
    assert not has_condition(plane.training.status, ConditionType.BACKEND_FAILING)
    assert plane.store.reasons[-1] in ("BackendWorking", "Ready")
    assert plane.store.reasons.count("BackendWorking") == 1
    assert plane.eu.applied == [1]
