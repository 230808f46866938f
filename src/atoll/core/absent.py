"""A training whose executor is absent: not configured, or it does not answer.

Its ranks may be running where nobody can look. So the status says what is wrong, and nothing else
is done: the training does not fail, nothing of it is released, and its record stays until the
executor is back.
"""

from __future__ import annotations

from msgspec.structs import replace

from atoll.core.conditions import clear_condition, set_condition
from atoll.core.executors import MISSING, UNREACHABLE, absence
from atoll.core.phase import Phase
from atoll.core.plan import Plan
from atoll.core.status import Event, Status, Training

MAX_ERROR_CHARS = 500  # characters of an error that a status repeats


def left_alone(training: Training, now: float) -> Plan:
    """The status says that the executor is missing. No action, and no look until a restart."""
    status = training.status
    if status.is_released and training.deletion_requested_at is None:
        return Plan(status)  # nothing is left to do for any executor
    message = _describe_missing(training)
    after = _with_condition(status, MISSING, MISSING, message, now)
    if after.phase is Phase.NONE:
        after = replace(after, phase=Phase.PENDING)
    event = Event(type="Warning", reason=MISSING, message=message, at=now)
    return Plan(after, events=() if after == status else (event,))


def out_of_reach(training: Training, error: Exception, now: float) -> Plan:
    """The status says that the executor does not answer. All else in it is as last seen."""
    words = " ".join(str(error).split())[:MAX_ERROR_CHARS]
    message = f"the executor {training.executor!r} cannot be reached: {words}"
    after = _with_condition(training.status, UNREACHABLE, "Unreachable", message, now)
    event = Event(type="Warning", reason=UNREACHABLE, message=message, at=now)
    return Plan(after, events=() if absence(training) == UNREACHABLE else (event,))


def rejoined(training: Training) -> Training:
    """Without the word that its executor is absent: it is there."""
    if not absence(training):
        return training
    status = training.status
    kept = clear_condition(status.conditions, MISSING, UNREACHABLE)
    return replace(training, status=replace(status, conditions=kept))


def return_of(training: Training, now: float) -> tuple[Event, ...]:
    """What is told of an executor that did not answer and now does."""
    if absence(training) != UNREACHABLE:
        return ()
    message = f"the executor {training.executor!r} answers again"
    return (Event(type="Normal", reason="ExecutorReachable", message=message, at=now),)


def _with_condition(status: Status, kind: str, reason: str, message: str, now: float) -> Status:
    others = clear_condition(status.conditions, *({MISSING, UNREACHABLE} - {kind}))
    after = replace(status, conditions=set_condition(others, kind, reason, message, now))
    return after if status.phase.is_terminal else replace(after, message=message)


def _describe_missing(training: Training) -> str:
    waits = "the training is left alone"
    if training.deletion_requested_at is not None:
        waits = "the removal waits"
    elif training.spec.cancel and not training.status.phase.is_terminal:
        waits = "the cancelling waits"
    return f"the executor {training.executor!r} is not configured: {waits} until it is"
