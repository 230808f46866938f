"""What the status says while an executor is missing, does not answer, or fails at an action. Pure.

The ranks may be running where nobody can observe them. So the status says what is wrong and
nothing else happens: the training does not fail, none of its ranks is stopped, and its record
stays until the executor is back.
"""

from __future__ import annotations

from msgspec.structs import replace

from atoll.core.conditions import clear_condition, has_condition, set_condition
from atoll.core.executors import EXECUTOR_MISSING, EXECUTOR_UNREACHABLE
from atoll.core.phase import Phase
from atoll.core.plan import Plan
from atoll.core.status import Event, EventType, Status, Training

BACKEND_FAILING = "BackendFailing"
# A status repeats this much of an error: a sentence and a path, not a page of HTML from a proxy.
MAX_ERROR_CHARS = 500


def plan_without_executor(training: Training, now: float) -> Plan:
    """Nothing until the control plane is started again with this executor configured."""
    status = training.status
    if status.is_released and training.deletion_requested_at is None:
        return Plan(status)  # no executor has anything left to do
    message = _missing_message(training)
    after = _set_unavailable(status, EXECUTOR_MISSING, EXECUTOR_MISSING, message, now)
    if after.phase is Phase.NONE:
        after = replace(after, phase=Phase.PENDING)
    events = () if after == status else (_event("Warning", EXECUTOR_MISSING, message, now),)
    return Plan(after, events=events)


def report_unreachable(training: Training, error: Exception, now: float) -> Plan:
    """The executor does not answer. The rest of the status stays as last observed."""
    status, name = training.status, training.executor
    message = f"the executor {name!r} cannot be reached: {_shorten(error)}"
    after = _set_unavailable(status, EXECUTOR_UNREACHABLE, "Unreachable", message, now)
    is_new = not has_condition(status, EXECUTOR_UNREACHABLE)
    event = _event("Warning", EXECUTOR_UNREACHABLE, message, now)
    return Plan(after, events=(event,) if is_new else ())


def clear_unavailable(training: Training) -> Training:
    """The training without the conditions of an executor that is back."""
    status = training.status
    conditions = clear_condition(status.conditions, EXECUTOR_MISSING, EXECUTOR_UNREACHABLE)
    if conditions == status.conditions:
        return training
    return replace(training, status=replace(status, conditions=conditions))


def reachable_again(training: Training, now: float) -> tuple[Event, ...]:
    """The event of an executor that did not answer and now does."""
    if not has_condition(training.status, EXECUTOR_UNREACHABLE):
        return ()
    message = f"the executor {training.executor!r} answers again"
    return (_event("Normal", "ExecutorReachable", message, now),)


def report_failing(training: Training, error: Exception, now: float) -> Plan:
    """An action fails again and again. It is retried without end."""
    status, name = training.status, training.executor
    message = f"the executor {name!r} fails, and atoll tries again: {_shorten(error)}"
    conditions = set_condition(status.conditions, BACKEND_FAILING, "ExecutorError", message, now)
    is_new = not has_condition(status, BACKEND_FAILING)
    event = _event("Warning", BACKEND_FAILING, message, now)
    return Plan(replace(status, conditions=conditions), events=(event,) if is_new else ())


def report_working(training: Training, now: float) -> Plan:
    """The action that failed has succeeded."""
    conditions = clear_condition(training.status.conditions, BACKEND_FAILING)
    message = f"the executor {training.executor!r} works again"
    event = _event("Normal", "BackendWorking", message, now)
    return Plan(replace(training.status, conditions=conditions), events=(event,))


def _set_unavailable(status: Status, type: str, reason: str, message: str, now: float) -> Status:
    """With one of the two conditions; an executor is either missing or unreachable."""
    other = {EXECUTOR_MISSING, EXECUTOR_UNREACHABLE} - {type}
    others = clear_condition(status.conditions, *other)
    after = replace(status, conditions=set_condition(others, type, reason, message, now))
    return after if status.phase.is_terminal else replace(after, message=message)


def _missing_message(training: Training) -> str:
    effect = "nothing happens to the training"
    if training.deletion_requested_at is not None:
        effect = "the deletion waits"
    elif training.spec.cancel and not training.status.phase.is_terminal:
        effect = "the cancellation waits"
    return f"the executor {training.executor!r} is not configured: {effect} until it is"


def _shorten(error: Exception) -> str:
    return " ".join(str(error).split())[:MAX_ERROR_CHARS]


def _event(type: EventType, reason: str, message: str, now: float) -> Event:
    return Event(type=type, reason=reason, message=message, at=now)
