"""When the link bench is run, what became of it, and what a floor forbids."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from atoll.core.clock import Now
from atoll.core.plan import Apply, Measure, Plan, Stop, plan
from atoll.core.spec import BenchSpec, TrainingSpec, WorldSize
from atoll.core.status import (
    BENCH_LIMIT_S,
    BenchResult,
    DesiredState,
    Exit,
    Observation,
    ObservedBench,
    ObservedRank,
    Training,
)

RESULT = BenchResult(measured_at=5.0, probe_node_a="a", probe_node_b="b", busbw_gbps_p50=9.5)
IDLE, RUNNING = ObservedBench(state="idle"), ObservedBench(state="running")
DONE = ObservedBench(state="done", result=RESULT)


def training(**bench: Any) -> Training:
    spec = TrainingSpec(
        name="t",
        world_size=WorldSize(min=1, target=1, max=1),
        command=["true"],
        bench=BenchSpec(**bench),
    )
    return Training(namespace="n", uid="u", spec=spec)


def after(made: Plan, of: Training) -> Training:
    return replace(of, status=made.status)


def run(of: Training, *looks: tuple[Observation, float]) -> tuple[Training, Plan]:
    made = None
    for observation, now in looks:
        made = plan(of, observation, Now.at(now))
        of = after(made, of)
    assert made is not None
    return of, made


def running(bench: ObservedBench | None, desired: DesiredState | None = None) -> Observation:
    rank = ObservedRank(rank=0, state="running", started_at=1.0)
    return Observation(
        ranks=[rank],
        desired=desired or DesiredState(version=1, size=1),
        is_supervised=True,
        bench=bench,
    )


def ended(bench: ObservedBench | None) -> Observation:
    rank = ObservedRank(
        rank=0, state="exited", started_at=1.0, exit=Exit(code=0, at=9.0, reason="Completed")
    )
    return Observation(ranks=[rank], desired=DesiredState(version=1, size=1), bench=bench)


def kinds(made: Plan) -> list[type]:
    return [type(action) for action in made.actions]


def test_off_is_never_measured_and_says_nothing() -> None:
    _, made = run(training(), (Observation(bench=IDLE), 1.0))
    assert kinds(made) == [Apply]
    assert made.status.bench.phase == ""


def test_ranks_start_at_once_and_the_bench_beside_them() -> None:
    of, made = run(training(mode="on-start"), (Observation(bench=IDLE), 1.0))
    assert kinds(made) == [Apply, Measure]
    assert made.status.bench.phase == "Pending"
    of, made = run(of, (running(RUNNING), 2.0))
    assert made.status.phase == "ready"
    assert (made.status.bench.phase, made.status.bench.started_at) == ("Running", 2.0)
    of, made = run(of, (running(DONE), 3.0))
    assert (made.status.bench.phase, made.status.bench.result) == ("Succeeded", RESULT)
    assert made.status.bench.message == "a <-> b: 9.5 Gbit/s"
    assert [e.reason for e in made.events] == ["BenchSucceeded"]
    _, made = run(of, (running(IDLE), 4.0))
    assert made.status.bench.phase == "Succeeded"
    assert made.actions == ()


def test_killed_while_it_ran_it_is_run_again_within_the_same_limit() -> None:
    of, _ = run(training(mode="on-start"), (Observation(bench=IDLE), 1.0), (running(RUNNING), 2.0))
    again, made = run(of, (running(IDLE), 10.0))
    assert kinds(made) == [Measure]
    _, made = run(again, (running(RUNNING), 2.0 + BENCH_LIMIT_S))
    assert made.status.bench.phase == "TimedOut"
    assert made.status.phase == "ready"


def test_a_failed_bench_does_not_harm_the_training() -> None:
    broken = ObservedBench(state="failed", message="no route")
    of, made = run(
        training(mode="on-start"), (Observation(bench=IDLE), 1.0), (running(broken), 2.0)
    )
    assert (made.status.bench.phase, made.status.bench.message) == ("Failed", "no route")
    _, made = run(of, (ended(broken), 10.0))
    assert made.status.phase == "succeeded"


def test_a_training_that_ends_first_skips_it_and_says_so() -> None:
    _, made = run(training(mode="on-start"), (Observation(bench=IDLE), 1.0), (ended(RUNNING), 10.0))
    assert made.status.phase == "succeeded"
    assert made.status.bench.phase == "Skipped"
    assert "ended before" in made.status.bench.message


def test_an_executor_that_cannot_measure_skips_it_and_says_so() -> None:
    _, made = run(training(mode="on-start"), (Observation(), 1.0))
    assert kinds(made) == [Apply]
    assert made.status.bench.phase == "Skipped"
    assert "'local' cannot measure" in made.status.bench.message


def test_one_that_has_to_wait_stays_pending_with_the_reason() -> None:
    waiting = ObservedBench(state="waiting", message="no two workers on two hosts with room")
    _, made = run(training(mode="on-start", placement="strict"), (Observation(bench=waiting), 1.0))
    assert kinds(made) == [Apply]
    assert made.status.bench.phase == "Pending"
    assert made.status.bench.message == waiting.message


def test_hosts_that_are_not_the_workers_own_are_said_to_be_so() -> None:
    other = ObservedBench(state="done", result=replace(RESULT, is_worker_pair=False))
    _, made = run(training(mode="on-start"), (running(other), 2.0))
    assert "not both hosts of this training's ranks" in made.status.bench.message


def test_a_floor_holds_the_start_until_the_link_is_known() -> None:
    of, made = run(training(mode="on-start", require_gbps=5.0), (Observation(bench=IDLE), 1.0))
    assert kinds(made) == [Measure]
    of, made = run(of, (Observation(bench=RUNNING), 2.0))
    assert made.actions == ()
    assert "link must be measured first" in made.status.ranks[0].message
    _, made = run(of, (Observation(bench=DONE), 3.0))
    assert kinds(made) == [Apply]


@pytest.mark.parametrize(
    ("look", "reason", "words"),
    [
        (DONE, "LinkTooSlow", "a <-> b: 9.5 Gbit/s"),
        (ObservedBench(state="failed", message="no route"), "BenchNotMeasured", "no route"),
        (None, "BenchNotMeasured", "cannot measure"),
    ],
)
def test_a_floor_that_is_not_met_or_not_known_fails_the_training_before_a_rank_ran(
    look: ObservedBench | None, reason: str, words: str
) -> None:
    of, made = run(training(mode="on-start", require_gbps=10.0), (Observation(bench=look), 1.0))
    assert Apply not in kinds(made)
    assert (made.status.phase, made.status.reason) == ("failed", reason)
    assert "bench_require_gbps=10" in made.status.message
    assert words in made.status.message
    assert made.status.rank_exits == []


def test_a_measurement_that_still_runs_is_stopped_with_the_training() -> None:
    of, _ = run(training(mode="on-start", require_gbps=1.0), (Observation(bench=RUNNING), 1.0))
    of = replace(of, spec=replace(of.spec, cancel=True))
    of, made = run(of, (Observation(bench=RUNNING), 2.0))
    assert made.status.phase == "cancelled"
    assert made.status.bench.phase == "Skipped"
    _, made = run(of, (Observation(bench=RUNNING), 3.0))
    assert kinds(made) == [Stop]
