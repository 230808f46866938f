"""How long periods are: by steps, by pairs, by the clock, and in the ramp of a new run."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from atoll.core.errors import ValidationError
from atoll.diloco import DiLoCo, RoundReport
from atoll.diloco.periods import PeriodPlan, Periods, read_periods
from atoll.diloco.round.effects import RunState
from atoll.diloco.round.objects import ZERO, Manifest


def make_loop(**options: Any) -> tuple[DiLoCo, Any]:
    """A loop, and a step with a constant gradient: a weight falls by one a step."""
    model = torch.nn.Linear(2, 2)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    loop = DiLoCo(model, inner, **options)

    def step(gradient: float = 1.0) -> None:
        for value in model.parameters():
            value.grad = torch.full_like(value, gradient)
        inner.step()

    return loop, step


def train(steps: int, **options: Any) -> list[RoundReport]:
    reports: list[RoundReport] = []
    loop, step = make_loop(on_round=reports.append, **options)
    with loop:
        for _ in range(steps):
            step()
        loop.sync()
    return reports


def test_a_ramp_doubles_the_periods_with_plain_averages_and_then_the_outer_rule_begins() -> None:
    reports = train(30, sync_every=8, warmup="ramp")
    assert [report.steps for report in reports] == [1, 1, 2, 2, 4, 4, 8, 8, 0]
    assert [report.is_ramp for report in reports[:7]] == [True] * 6 + [False]
    settings = [(report.outer_lr, report.outer_momentum) for report in reports]
    assert settings[:6] == [(1.0, 0.0)] * 6
    assert settings[6] == (0.7, 0.5)  # its momentum grows from here on, not from round 0


def test_in_a_ramp_replicas_take_the_mean_of_their_parameters() -> None:
    uri = f"memory:///{uuid.uuid4()}"

    def replica(rank: int) -> list[float]:
        where: dict[str, Any] = {"uri": uri, "rank": rank, "world_size": 2, "min_replicas": 2}
        loop, step = make_loop(sync_every=4, warmup="ramp", outer_lr=0.1, **where)
        seen = []
        with loop:
            for _ in range(2 + 2 * 2):
                step(1.0 + 2 * rank)  # the mean of both is 2
                if loop.steps in (1, 2, 4, 6):
                    seen.append(loop.global_parameters()["weight"][0, 0].item())
        return seen

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(replica, range(2))) == [[-2.0, -4.0, -8.0, -12.0]] * 2


def test_a_resumed_run_does_not_ramp_again() -> None:
    where: dict[str, Any] = {"uri": f"memory:///{uuid.uuid4()}", "rank": 0, "world_size": 1}
    first = train(4, sync_every=8, warmup="ramp", **where)
    second = train(10, sync_every=8, **where)  # it takes the run's settings
    third = train(16, sync_every=8, **where)
    assert [report.steps for report in first] == [1, 1, 2, 0]
    # The round that ended the first life was one of the ramp.
    assert [report.steps for report in second[:-1]] == [4, 4]
    assert [report.steps for report in third[:-1]] == [8, 8]
    assert not any(report.is_ramp for report in third)


def test_a_replica_with_another_warmup_is_refused_and_one_that_says_none_takes_the_runs() -> None:
    where: dict[str, Any] = {"uri": f"memory:///{uuid.uuid4()}", "rank": 0, "world_size": 1}
    train(1, sync_every=8, warmup="ramp", **where)
    with pytest.raises(ValidationError, match="warmup: 'none'.*began with a ramp of 6 rounds"):
        make_loop(sync_every=8, warmup="none", **where)
    loop, _ = make_loop(sync_every=8, **where)
    with loop:
        assert loop.describe()["warmup"].startswith("ramp: 6 plain averages")


def test_with_fragments_and_overlap_the_ramp_counts_turns_and_waits_for_its_averages() -> None:
    options = {"fragments": 2, "overlap_steps": 3, "mix": 0.5}
    loop, step = make_loop(sync_every=8, warmup="ramp", **options)
    with loop:
        for _ in range(12):
            step()
            flight = loop._flight
            assert flight is None or not flight.is_background
        reports = list(loop.reports)
        # Two turns of each length, a round of each fragment in a turn.
        assert [report.fragment for report in reports] == [0, 1] * 4
        periods = np.diff([0, *np.cumsum([report.steps for report in reports])])
        assert list(periods) == [1, 1, 1, 1, 2, 2, 2, 2]
        step()  # the first full period uploads after one step, and trains on
        assert loop._flight is not None
        assert loop._flight.is_background
        assert loop._flight.mix == 0.5
        for _ in range(3):
            step()
    assert loop.metrics()["ramp_rounds"] == 8
    assert not loop.reports[-1].is_ramp


def test_pairs_change_the_period_from_their_step_of_the_run_on() -> None:
    reports = train(24, sync_every=[(0, 2), (4, 8)])
    assert [report.steps for report in reports] == [2, 2, 8, 8, 4]
    assert read_periods([(0, 30), (1000, 100)]).description == (
        "every 30 steps, 100 from step 1000 on"
    )


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("60", "sync_every: '60'.*seconds as '60s'"),
        ("soon", "sync_every: 'soon'"),
        ("0s", "sync_every: '0s'"),
        ([], r"sync_every: \[\]"),
        ([(0, 0)], "sync_every: 0"),
        ([(5, 10), (5, 20)], r"sync_every: \(5, 20\).*a step after 5"),
        ([3], r"sync_every: 3.*\(0, 30\)"),
        (None, "sync_every: None.*or a preset"),
    ],
)
def test_a_period_that_cannot_be_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make_loop(sync_every=value)
    with pytest.raises(ValidationError, match="warmup: 'slow'.*'ramp' or 'none'"):
        make_loop(sync_every=3, warmup="slow")
    with pytest.raises(ValidationError, match="overlap_steps: 'a whole period'"):
        make_loop(sync_every="5s", preset="eager")


def test_a_ramp_by_the_clock_doubles_seconds_up_to_the_period() -> None:
    periods = read_periods("64s")
    periods = periods._replace(ramp=periods.full_ramp)
    assert [periods.seconds_at(round) for round in range(14)] == [
        *(1, 1, 2, 2, 4, 4, 8, 8, 16, 16, 32, 32),
        *(64, 64),
    ]
    assert Periods(((0, 30),)).full_ramp == 2 * 5  # of 1, 2, 4, 8 and 16


def test_a_period_by_the_clock_ends_with_the_last_step_that_ends_before() -> None:
    plan = PeriodPlan(read_periods("10s"), 0, lambda decide: decide(), now=100.0)
    state = RunState(round=1, manifest_at=110.0)
    for step, now in enumerate((103.0, 106.0, 109.0), 1):
        assert plan.end_at == 0
        plan.advance(step, RunState(), now)
    assert plan.upload_at == plan.end_at == 3  # a fourth would end at 112
    manifest = Manifest(0, ZERO, "flat", 1, 0, 1, (), next_s=30.0)  # it counts, not the own setting
    plan.settle(state._replace(last=manifest, is_current=True))
    assert plan.steps_left(1, 113.0) == 9  # as fast as in the period before
    plan.settle(state._replace(last=manifest))  # late, or a joiner: the next round at once
    plan.advance(1, state, 113.0)
    assert plan.end_at == 1


def test_processes_of_a_replica_agree_on_the_clock_in_a_few_looks() -> None:
    looks: list[int] = []

    def agree(decide: Callable[[], int]) -> int:
        looks.append(decide())
        return looks[-1]

    plan = PeriodPlan(read_periods("100s"), 2, agree, now=0.0, is_many=True)
    steps = 0
    while not plan.end_at:
        steps += 1
        plan.advance(steps, RunState(), float(steps))
    assert (plan.upload_at, plan.end_at) == (100, 102)  # with overlap, the result comes later
    assert len(looks) < 12


class FakeTime:
    """The clock of a test: every step takes as long as the test says."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def test_periods_by_the_clock_have_more_steps_where_steps_are_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = FakeTime()
    monkeypatch.setattr("atoll.diloco.diloco.time", clock)
    monkeypatch.setattr("atoll.diloco.setup.time", clock)
    loop, step = make_loop(sync_every="12s")
    lengths, before = [], 0
    with loop:
        for step_s in (3.0,) * 8 + (1.0,) * 24 + (5.0,) * 4:
            clock.now += step_s
            step()
            if len(loop.reports) > len(lengths):
                lengths.append(loop.steps - before)
                before = loop.steps
    assert lengths == [4, 4, 12, 12, 2, 2]


def test_replicas_by_the_clock_weigh_what_they_trained_and_hold_the_same_bits() -> None:
    uri = f"memory:///{uuid.uuid4()}"

    def replica(rank: int) -> tuple[Any, list[RoundReport]]:
        where: dict[str, Any] = {"uri": uri, "rank": rank, "world_size": 2, "min_replicas": 2}
        loop, step = make_loop(sync_every="50ms", **where)
        with loop:
            for _ in loop.until(rounds=4):
                step(1.0 + rank)
                if rank:  # a slow one
                    time.sleep(0.005)
            return loop.global_parameters(), list(loop.reports)

    with ThreadPoolExecutor(2) as pool:
        (one, fast), (two, slow) = pool.map(replica, range(2))
    assert np.array_equal(one["weight"], two["weight"])
    assert [report.members for report in fast] == [(0, 1)] * 4
    assert all(report.weight == report.steps for report in fast + slow)
