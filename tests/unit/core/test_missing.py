"""A training whose executor is not configured is told of, and nothing is done to it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from atoll.core.missing import left_alone, rejoined
from atoll.core.phase import Phase
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
    made = left_alone(training, 5.0)
    assert made.actions == ()
    assert made.requeue_after_s is None
    assert made.status.phase is phase
    assert made.status.message == (
        "the executor 'eu' is not configured: the training is left alone until it is"
    )
    assert [(c.type, c.status) for c in made.status.conditions] == [("ExecutorMissing", "True")]
    assert [e.reason for e in made.events] == ["ExecutorMissing"]


def test_it_says_so_once() -> None:
    told = replace(READY, status=left_alone(READY, 5.0).status)
    again = left_alone(told, 9.0)
    assert again.status == told.status
    assert again.events == ()


def test_a_removal_and_a_cancelling_wait() -> None:
    removed = replace(READY, deletion_requested_at=4.0)
    cancelled = replace(READY, spec=replace(SPEC, cancel=True))
    for training, words in ((removed, "the removal waits"), (cancelled, "the cancelling waits")):
        made = left_alone(training, 5.0)
        assert made.actions == ()
        assert words in made.status.message


def test_a_verdict_stays_and_its_record_too() -> None:
    over = replace(READY, status=Status(phase=Phase.FAILED, message="why", is_released=True))
    assert left_alone(over, 5.0).status == over.status
    removed = left_alone(replace(over, deletion_requested_at=4.0), 5.0)
    assert removed.status.message == "why"
    assert removed.actions == ()


def test_it_is_forgotten_once_the_executor_is_back() -> None:
    told = replace(READY, status=left_alone(READY, 5.0).status)
    assert rejoined(told).status.conditions == []
    assert rejoined(READY) is READY
