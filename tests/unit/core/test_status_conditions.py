"""Conditions are written in one place: their times change with their status, and only then."""

from __future__ import annotations

from atoll.core.status import Condition, clear_condition, set_condition


def test_the_time_of_a_condition_is_that_of_its_last_change_of_status() -> None:
    first = set_condition([], "Ready", "Waiting", "no rank", 1.0004, is_true=False)
    again = set_condition(first, "Ready", "Waiting", "one rank", 2.0, is_true=False)
    assert [(c.message, c.last_transition_at) for c in again] == [("one rank", 1.0)]
    (changed,) = set_condition(again, "Ready", "Quorum", "", 3.0)
    assert (changed.status, changed.reason, changed.last_transition_at) == ("True", "Quorum", 3.0)


def test_a_condition_keeps_its_place_and_a_new_one_is_the_last() -> None:
    both = [Condition(type="A", status="True"), Condition(type="B", status="True")]
    assert [c.type for c in set_condition(both, "A", "", "", 1.0, is_true=False)] == ["A", "B"]
    assert [c.type for c in set_condition(both, "C", "", "", 1.0)] == ["A", "B", "C"]
    assert [c.type for c in clear_condition(both, "A", "C")] == ["B"]
