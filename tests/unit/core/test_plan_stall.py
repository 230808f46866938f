from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from atoll.core.clock import Now
from atoll.core.errors import ValidationError
from atoll.core.plan import Plan, check_again_s, plan, with_idle_times
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Condition, DesiredState, Observation, ObservedRank, Status, Training

SPEC = TrainingSpec(
    name="t", command=["true"], world_size=WorldSize(min=1, target=3, max=3), stall_s=10.0
)


def after(status: Status, now: float, *idle_s: float | None, spec: TrainingSpec = SPEC) -> Plan:
    ranks = [
        ObservedRank(rank=rank, state="running", started_at=1.0, idle_s=quiet)
        for rank, quiet in enumerate(idle_s)
    ]
    training = Training(namespace="n", uid="u", spec=spec, status=status)
    observation = Observation(
        ranks=ranks, desired=DesiredState(version=1, size=3), is_supervised=True
    )
    return plan(training, observation, Now.at(now))


def stalled(status: Status) -> Condition | None:
    return next((c for c in status.conditions if c.type == "Stalled"), None)


def reasons(made: Plan) -> list[tuple[str, str]]:
    return [(e.reason, e.message) for e in made.events if e.reason in ("RankStalled", "RankMoves")]


def test_a_rank_that_does_not_move_is_told_of_once_and_taken_back() -> None:
    calm = after(Status(), 100.0, 0.0, 9.9, None)
    assert stalled(calm.status) is None
    assert reasons(calm) == []
    one = after(calm.status, 101.0, 0.0, 10.0, None)
    assert one.status.stalled == {1: 91.0}
    assert reasons(one) == [
        (
            "RankStalled",
            "rank 1 has reported nothing, printed nothing and used no CPU within its stall timeout",
        )
    ]
    condition = stalled(one.status)
    assert condition is not None
    assert (condition.status, condition.message) == (
        "True",
        "rank 1 idle for longer than the stall timeout",
    )
    assert one.status.message.endswith("; stalled: rank 1")
    same = after(one.status, 105.0, 1.0, 14.0, None)
    assert same.status == one.status
    assert reasons(same) == []
    back = after(same.status, 106.0, 0.0, 0.5, None)
    assert back.status.stalled == {}
    assert reasons(back) == [("RankMoves", "rank 1 moves again")]
    condition = stalled(back.status)
    assert condition is not None
    assert condition.status == "False"


def test_a_stalled_rank_that_is_scaled_away_does_not_move_again() -> None:
    one = after(Status(), 101.0, 0.0, 10.0, None)
    assert one.status.stalled == {1: 91.0}
    smaller = replace(SPEC, world_size=WorldSize(min=1, target=1, max=3))
    away = after(one.status, 102.0, 0.0, 0.1, spec=smaller)
    assert away.status.stalled == {}
    assert reasons(away) == []


def test_nothing_is_told_where_nobody_asked() -> None:
    made = after(Status(), 100.0, 1e6, 1e6, 1e6, spec=replace(SPEC, stall_s=None))
    assert made.status.stalled == {}
    assert stalled(made.status) is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"stall_s": 0.5}, "stall_s"),
        ({"stall_s": float("nan")}, "stall_s"),
        ({"stall_restart": True}, "stall_restart"),
        ({"stall_restart": True, "stall_s": 5.0}, "stall_restart"),
        ({"stall_restart": "yes", "stall_s": 5.0, "max_restarts": 1}, "stall_restart"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        TrainingSpec(name="t", command=["x"], world_size=SPEC.world_size, **fields)
    assert refusal.value.field == field


def test_looks_are_neither_rare_nor_too_many() -> None:
    assert [check_again_s(s) for s in (1.0, 10.0, 600.0)] == [0.25, 2.5, 30.0]


def test_what_is_known_from_elsewhere_is_put_where_the_executor_saw_nothing() -> None:
    training = Training(namespace="n", uid="u", spec=SPEC)
    ranks = [
        ObservedRank(rank=r, state="running", idle_s=q) for r, q in enumerate([3.0, None, None])
    ]
    observation = with_idle_times(
        training, Observation(ranks=ranks, again_in_s=100.0), {0: 50.0, 1: 60.0}
    )
    assert [observed_rank.idle_s for observed_rank in observation.ranks] == [3.0, 60.0, None]
    assert observation.again_in_s == 2.5, "it is looked at again before stall_s has passed"
    unasked = replace(training, spec=replace(SPEC, stall_s=None))
    assert with_idle_times(unasked, Observation(ranks=ranks), {1: 60.0}).ranks == ranks
