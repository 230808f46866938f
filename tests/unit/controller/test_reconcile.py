"""One pass: in which order things are done, and what is not done when the status is not written."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from atoll.controller.reconcile import Reconciler
from atoll.core.clock import Now
from atoll.core.errors import Conflict, Permanent, StatusRefused, Temporary
from atoll.core.phase import Phase
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import (
    DesiredState,
    Exit,
    Followup,
    Observation,
    ObservedRank,
    Status,
    Training,
)

WORLD = WorldSize(min=1, target=2, max=2)


class Sweep(Followup, frozen=True):
    capacity: str


class Notebook:
    """A store and an executor that write down what is asked of them."""

    def __init__(self, observation: Observation, **failures: Exception) -> None:
        spec = TrainingSpec(name="t", command=["x"], world_size=WORLD)
        self.training = Training(namespace="n", uid="u", spec=spec)
        self.observation = observation
        self.failures = failures
        self.lines: list[str] = []

    def _note(self, line: str) -> None:
        self.lines.append(line)
        if error := self.failures.get(line.split()[0]):
            raise error

    async def get(self, key: Any) -> Training:
        return self.training

    async def update_status(
        self, training: Training, status: Status, events: Any, attempts: Any = ()
    ) -> Training:
        self._note("write")
        self.training = replace(training, status=status)
        return self.training

    async def observe(self, training: Training) -> Observation:
        self._note("observe")
        return self.observation

    async def perform(self, training: Training, followup: Sweep) -> None:
        assert training is self.training, "a chore sees the status that was written"
        self._note(f"perform {followup.capacity}")

    async def apply(self, training: Training, desired: DesiredState) -> None:
        self._note(f"apply {desired.size}")

    async def release(self, training: Training) -> None:
        self.observation = Observation()
        self._note("release")

    async def purge(self, training: Training) -> None:
        self._note("purge")

    async def remove(self, training: Training) -> None:
        self._note("remove")

    def reconcile(self) -> float | None:
        return asyncio.run(self.passes(1))

    async def passes(self, count: int) -> float | None:
        store: Any = self
        executors: Any = {"local": self}
        reconciler = Reconciler(store, executors, lambda: Now.at(100.0))
        for _ in range(count):
            again = await reconciler.reconcile(("n", "t"))
        return again


def followups(*rooms: str, **more: Any) -> Observation:
    return Observation(followups=tuple(Sweep(capacity=capacity) for capacity in rooms), **more)


def test_what_was_seen_is_stored_before_anything_is_done_about_it() -> None:
    book = Notebook(followups("hall", "yard"))
    book.reconcile()
    assert book.lines == ["observe", "write", "perform hall", "perform yard", "apply 2"]


def test_a_look_whose_status_could_not_be_written_does_nothing() -> None:
    book = Notebook(followups("hall"), write=Conflict("somebody was faster"))
    assert book.reconcile() == 0.0
    assert book.lines == ["observe", "write"]


def test_a_look_at_what_another_process_has_changed_is_taken_again_at_once() -> None:
    book = Notebook(followups("hall"), observe=Conflict("somebody was faster"))
    assert book.reconcile() == 0.0
    assert book.lines == ["observe"]


def test_a_chore_is_done_though_an_action_has_to_wait() -> None:
    book = Notebook(followups("hall"), apply=Temporary("its last pod is still there"))
    with pytest.raises(Temporary):
        book.reconcile()
    assert "perform hall" in book.lines


def test_chores_go_on_for_a_training_that_the_executor_refuses() -> None:
    book = Notebook(followups("hall"), apply=Permanent("never"))
    asyncio.run(book.passes(2))
    assert book.lines.count("perform hall") == 2
    assert book.training.status.failing == "ExecutorRefused"


@pytest.mark.parametrize(("again_in_s", "expected"), [(None, 3.0), (0.5, 0.5), (50.0, 3.0)])
def test_the_next_look_is_the_sooner_of_both(again_in_s: float | None, expected: float) -> None:
    """The plan looks again 3 s after it has asked for ranks."""
    assert Notebook(followups(again_in_s=again_in_s)).reconcile() == expected


@pytest.mark.parametrize("error", [Temporary("busy"), Conflict("moved on"), Permanent("never")])
def test_a_chore_that_fails_keeps_no_rank_from_being_stopped(error: Exception) -> None:
    ranks = [ObservedRank(rank=rank, state="running", started_at=99.0) for rank in (0, 1)]
    desired = DesiredState(version=1, size=2)
    observation = followups("hall", "yard", ranks=ranks, desired=desired, is_supervised=True)
    book = Notebook(observation, perform=error)
    spec = replace(book.training.spec, cancel=True)
    status = Status(phase=Phase.READY, desired=desired, gate_opened_at=98.0)
    book.training = replace(book.training, spec=spec, status=status)
    with pytest.raises(type(error), match=str(error)):
        book.reconcile()
    assert book.lines == ["observe", "write", "perform hall", "apply 0"]


def test_a_status_that_the_store_refuses_holds_up_no_removal() -> None:
    ended = Exit(code=1, at=50.0, reason="Error")
    ranks = [ObservedRank(rank=n, state="exited", exit=ended, started_at=1.0) for n in range(2)]
    observation = Observation(
        ranks=ranks, desired=DesiredState(version=1, size=2), is_supervised=True
    )
    book = Notebook(observation, write=StatusRefused("too large"))
    with pytest.raises(StatusRefused):
        book.reconcile()
    assert book.lines == ["observe", "write"], "nothing is torn down that is still wanted"

    desired = Status(desired=DesiredState(version=1, size=2), gate_opened_at=1.0)
    book.training = replace(book.training, deletion_requested_at=60.0, status=desired)
    book.lines.clear()
    asyncio.run(book.passes(6))
    done = [line for line in book.lines if line not in ("observe", "write")]
    assert done[:3] == ["release", "purge", "remove"]
