"""A training whose executor is absent says so, and nothing is done to it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from atoll.controller.reconcile import (
    clear_unavailable,
    plan_without_executor,
    reachable_again,
    report_unreachable,
)
from atoll.core.errors import Temporary
from atoll.core.phase import Phase
from atoll.core.plan import Plan
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Status, Training

SPEC = TrainingSpec(
    name="t", command=["true"], world_size=WorldSize(min=1, target=1, max=1), executor="eu"
)
NEW = Training(namespace="default", uid="u", spec=SPEC)
READY = replace(NEW, status=Status(phase=Phase.READY, message="1 of 1 ranks ready"))


@pytest.mark.parametrize(
    ("training", "phase"), [(NEW, Phase.PENDING), (READY, Phase.READY)], ids=["new", "ready"]
)
def test_it_says_so_and_does_nothing(training: Training, phase: Phase) -> None:
    made = plan_without_executor(training, 5.0)
    assert made.actions == ()
    assert made.requeue_after_s is None
    assert made.status.phase is phase
    assert made.status.message == (
        "the executor 'eu' is not configured: nothing happens to the training until it is"
    )
    assert [(c.type, c.status) for c in made.status.conditions] == [("ExecutorMissing", "True")]
    assert [e.reason for e in made.events] == ["ExecutorMissing"]


def test_it_says_so_once() -> None:
    told = replace(READY, status=plan_without_executor(READY, 5.0).status)
    again = plan_without_executor(told, 9.0)
    assert again.status == told.status
    assert again.events == ()


def test_a_removal_and_a_cancelling_wait() -> None:
    removed = replace(READY, deletion_requested_at=4.0)
    cancelled = replace(READY, spec=replace(SPEC, cancel=True))
    for training, words in ((removed, "the deletion waits"), (cancelled, "the cancellation waits")):
        made = plan_without_executor(training, 5.0)
        assert made.actions == ()
        assert words in made.status.message


def test_a_verdict_stays_and_its_record_too() -> None:
    over = replace(READY, status=Status(phase=Phase.FAILED, message="why", is_released=True))
    assert plan_without_executor(over, 5.0).status == over.status
    removed = plan_without_executor(replace(over, deletion_requested_at=4.0), 5.0)
    assert removed.status.message == "why"
    assert removed.actions == ()


def test_it_is_forgotten_once_the_executor_is_back() -> None:
    told = replace(READY, status=plan_without_executor(READY, 5.0).status)
    assert clear_unavailable(told).status.conditions == []
    assert clear_unavailable(READY) is READY


DOWN = Temporary("the API server did not answer:\n  refused")
WORDS = "the executor 'eu' cannot be reached: the API server did not answer: refused"


@pytest.mark.parametrize("training", [NEW, READY], ids=["new", "ready"])
def test_an_executor_that_does_not_answer_is_told_of_and_nothing_else_changes(
    training: Training,
) -> None:
    made = report_unreachable(training, DOWN, 5.0)
    assert made.actions == ()
    (condition,) = made.status.conditions
    assert (condition.type, condition.reason) == ("ExecutorUnreachable", "Unreachable")
    assert made.status.message == condition.message == WORDS
    assert replace(made.status, conditions=[], message=training.status.message) == training.status
    assert [(e.type, e.reason, e.message) for e in made.events] == [
        ("Warning", "ExecutorUnreachable", WORDS)
    ]


def test_its_beginning_and_its_end_are_one_event_each() -> None:
    told = replace(READY, status=report_unreachable(READY, DOWN, 5.0).status)
    assert report_unreachable(told, DOWN, 9.0) == Plan(told.status)
    other = report_unreachable(told, Temporary("bad DNS"), 9.0)
    assert other.status.message.endswith("bad DNS")
    assert other.status.conditions[0].last_transition_at == 5.0
    assert other.events == ()
    assert [(e.type, e.reason) for e in reachable_again(told, 9.0)] == [
        ("Normal", "ExecutorReachable")
    ]
    assert reachable_again(READY, 9.0) == ()
    assert clear_unavailable(told).status.conditions == []


def test_a_verdict_keeps_its_words_while_its_executor_does_not_answer() -> None:
    over = replace(READY, status=Status(phase=Phase.FAILED, message="why"))
    made = report_unreachable(over, DOWN, 5.0)
    assert made.status.message == "why"
    assert [c.message for c in made.status.conditions] == [WORDS]


def test_an_executor_is_absent_in_one_way_at_a_time() -> None:
    told = replace(READY, status=report_unreachable(READY, DOWN, 5.0).status)
    gone = plan_without_executor(told, 6.0)
    assert [c.type for c in gone.status.conditions] == ["ExecutorMissing"]
    back = report_unreachable(replace(READY, status=gone.status), DOWN, 7.0)
    assert [c.type for c in back.status.conditions] == ["ExecutorUnreachable"]
    assert len(back.events) == 1
