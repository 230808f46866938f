"""The one writer of conditions. A condition keeps its time of change until its status changes."""

from __future__ import annotations

from collections.abc import Iterable

from atoll.core.ranks import in_ms
from atoll.core.status import Condition, ConditionStatus, Status


def set_condition(
    conditions: Iterable[Condition],
    type: str,
    reason: str,
    message: str,
    now: float,
    *,
    is_true: bool = True,
) -> list[Condition]:
    """The conditions with this one replaced, or added as the last."""
    by_type = {condition.type: condition for condition in conditions}
    status: ConditionStatus = "True" if is_true else "False"
    known = by_type.get(type)
    is_same = known is not None and known.status == status
    by_type[type] = Condition(
        type=type,
        status=status,
        reason=reason,
        message=message,
        last_transition_at=known.last_transition_at if known and is_same else in_ms(now),
    )
    return list(by_type.values())


def clear_condition(conditions: Iterable[Condition], *types: str) -> list[Condition]:
    """The conditions without those of these types."""
    return [condition for condition in conditions if condition.type not in types]


def has_condition(status: Status, type: str) -> bool:
    return any(condition.type == type for condition in status.conditions)
