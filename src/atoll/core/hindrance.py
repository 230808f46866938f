"""A training for which the executor fails, again and again, to do what it is asked to.

It is tried again without end; the condition says so, until it works.
"""

from __future__ import annotations

from msgspec.structs import replace

from atoll.core.conditions import clear_condition, set_condition
from atoll.core.plan import Plan
from atoll.core.status import Event, Status, Training

HINDERED = "ActionFailing"
MAX_ERROR_CHARS = 500  # characters of an error that a status repeats


def is_hindered(status: Status) -> bool:
    return any(c.type == HINDERED for c in status.conditions)


def hindered(training: Training, error: Exception, now: float) -> Plan:
    """The status says what fails, and since when. All else in it is as it was."""
    words = " ".join(str(error).split())[:MAX_ERROR_CHARS]
    message = f"the executor {training.executor!r} fails, and is asked again: {words}"
    status = training.status
    conditions = set_condition(status.conditions, HINDERED, "ExecutorError", message, now)
    event = Event(type="Warning", reason=HINDERED, message=message, at=now)
    after = replace(status, conditions=conditions)
    return Plan(after, events=() if is_hindered(status) else (event,))


def unhindered(training: Training, now: float) -> Plan:
    """What was asked is done."""
    kept = clear_condition(training.status.conditions, HINDERED)
    message = f"the executor {training.executor!r} has done what it was asked"
    event = Event(type="Normal", reason="ActionDone", message=message, at=now)
    return Plan(replace(training.status, conditions=kept), events=(event,))
