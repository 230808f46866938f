"""A training whose executor is not configured: it is told of, and nothing else is done to it.

Its ranks may be running where nobody can look. So it does not fail, nothing of it is released, and
its record stays until the executor is back.
"""

from __future__ import annotations

from msgspec.structs import replace

from atoll.core.executors import MISSING, is_missing
from atoll.core.phase import Phase
from atoll.core.plan import Plan
from atoll.core.status import Condition, Event, Training


def left_alone(training: Training, now: float) -> Plan:
    """The status says that the executor is missing. No action, and no look until a restart."""
    status = training.status
    if status.is_released and training.deletion_requested_at is None:
        return Plan(status)  # nothing is left to do for any executor
    before = next((c for c in status.conditions if c.type == MISSING), None)
    message = _message(training)
    condition = Condition(
        type=MISSING,
        status="True",
        reason=MISSING,
        message=message,
        last_transition_at=before.last_transition_at if before else now,
    )
    others = [c for c in status.conditions if c.type != MISSING]
    after = replace(status, conditions=[*others, condition])
    if not status.phase.is_terminal:
        phase = Phase.PENDING if status.phase is Phase.NONE else status.phase
        after = replace(after, phase=phase, message=message)
    event = Event(type="Warning", reason=MISSING, message=message, at=now)
    return Plan(after, events=() if before == condition else (event,))


def rejoined(training: Training) -> Training:
    """Without the word that its executor is missing: it is there."""
    if not is_missing(training):
        return training
    kept = [c for c in training.status.conditions if c.type != MISSING]
    return replace(training, status=replace(training.status, conditions=kept))


def _message(training: Training) -> str:
    waits = "the training is left alone"
    if training.deletion_requested_at is not None:
        waits = "the removal waits"
    elif training.spec.cancel and not training.status.phase.is_terminal:
        waits = "the cancelling waits"
    return f"the executor {training.executor!r} is not configured: {waits} until it is"
