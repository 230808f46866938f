"""Warnings of a training: found once, told as event and condition, and never taken back."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from atoll.core.clock import Now
from atoll.core.plan import plan
from atoll.core.ranks import MAX_WARNINGS, find_warnings, merge_warnings
from atoll.core.rounds import RankRounds, RoundFacts, StoredRound, summary_of, with_rounds
from atoll.core.spec import RendezvousSpec, TrainingSpec, WorldSize
from atoll.core.status import (
    DesiredState,
    Exit,
    Observation,
    ObservedRank,
    ObservedRounds,
    RankPhase,
    RankStatus,
    Training,
)

SAME = "round 0: ranks 0 and 1 were given the same batches"


def training(target: int = 3) -> Training:
    size = WorldSize(min=2, target=target, max=target)
    rendezvous = RendezvousSpec(backend="none")
    spec = TrainingSpec(name="t", world_size=size, command=["x"], rendezvous=rendezvous)
    return Training(namespace="n", uid="u", spec=spec)


def running(*started: float | None) -> list[RankStatus]:
    return [
        RankStatus(rank=rank, phase="Running" if at else "Pending", started_at=at, attempt=0)
        for rank, at in enumerate(started)
    ]


def seen_ranks(rounds: ObservedRounds | None) -> Observation:
    ranks = [ObservedRank(rank=rank, state="running", started_at=1.0) for rank in range(3)]
    return Observation(
        ranks=ranks, desired=DesiredState(version=1, size=3), is_supervised=True, rounds=rounds
    )


def events(made: Any) -> list[tuple[str, str]]:
    return [(e.type, e.message) for e in made.events if e.reason == "TrainingWarning"]


def test_a_warning_is_an_event_once_a_condition_and_stays() -> None:
    first = plan(training(), seen_ranks(ObservedRounds(warnings=[SAME])), Now.at(10.0))
    assert events(first) == [("Warning", SAME)]
    assert first.status.warnings == [SAME]
    now = replace(training(), status=first.status)
    again = plan(now, seen_ranks(None), Now.at(20.0))  # a control plane that was started again
    assert again.status.warnings == [SAME]
    assert not events(again)
    (condition,) = [c for c in again.status.conditions if c.type == "Warnings"]
    assert (condition.status, condition.message) == ("True", SAME)


def test_a_warning_that_comes_after_the_end_is_told_too() -> None:
    ended = [
        ObservedRank(
            rank=r, state="exited", started_at=1.0, exit=Exit(code=0, at=5.0, reason="Completed")
        )
        for r in range(3)
    ]
    done = plan(training(), replace(seen_ranks(None), ranks=ended), Now.at(10.0)).status
    done = plan(
        replace(training(), status=done), replace(seen_ranks(None), ranks=ended), Now.at(11.0)
    ).status
    assert done.phase == "succeeded"
    over = replace(training(), status=replace(done, is_released=True))
    reported = Observation(rounds=ObservedRounds(warnings=[SAME]))
    late = plan(over, reported, Now.at(12.0))
    assert events(late) == [("Warning", SAME)]
    assert late.requeue_after_s == 0.0
    assert late.status.phase == "succeeded"
    assert not late.actions
    settled = plan(
        replace(over, status=late.status),
        Observation(rounds=ObservedRounds(warnings=[SAME])),
        Now.at(13.0),
    )
    assert settled.status == late.status
    assert not settled.events


def test_a_contribution_that_was_not_finite_names_the_rank_and_the_round() -> None:
    found = find_warnings(training(), (), ObservedRounds(newest=9, last={0: 9, 1: 9}, bad={1: 3}))
    assert found == ["round 3 left out rank 1: its pseudo-gradient was not finite"]


def test_a_rank_that_runs_and_is_absent_from_ten_rounds_is_told_of() -> None:
    rounds = ObservedRounds(newest=20, recent_since=100.0, last={0: 20, 2: 20})
    words = ["rank 1 was in none of 10 rounds in a row while it ran"]
    assert find_warnings(training(), running(1.0, 1.0, 1.0), rounds) == words
    assert find_warnings(training(), running(1.0, 150.0, 1.0), rounds) == []  # it came later
    assert find_warnings(training(), running(1.0, None, 1.0), rounds) == []  # it does not run
    assert find_warnings(training(), running(1.0, 1.0, 1.0), replace(rounds, left=[1])) == []
    there = replace(rounds, last={0: 20, 1: 11, 2: 20})
    assert find_warnings(training(), running(1.0, 1.0, 1.0), there) == []
    young = replace(rounds, recent_since=None)
    assert find_warnings(training(), running(1.0, 1.0, 1.0), young) == []


def test_one_replica_of_all_ranks_has_no_absent_ranks() -> None:
    spec = replace(training().spec, rendezvous=RendezvousSpec(backend="c10d"))
    whole = replace(training(), spec=spec)
    rounds = ObservedRounds(newest=20, recent_since=100.0, last={0: 20})
    assert find_warnings(whole, running(1.0, 1.0, 1.0), rounds) == []


def test_warnings_are_bounded() -> None:
    many = [f"warning {at}" for at in range(100)]
    assert merge_warnings([SAME], many) == [SAME, *many[: MAX_WARNINGS - 1]]


def test_the_words_of_rounds_name_ranks_of_the_training_that_were_not_in_the_newest() -> None:
    facts = RoundFacts(run="r", round=9, members=[0, 2], at=5.0)
    counts = [RankRounds(rank=rank, rounds=10, last=9) for rank in (0, 2)]
    summary = summary_of("r", [StoredRound(observed=facts)], 0.0, None, ranks=counts)
    assert summary is not None
    now = training()

    def words(*started: float | None) -> str:
        status = replace(now.status, ranks=running(*started))
        shown = with_rounds(replace(now, status=status), summary).rounds
        assert shown is not None
        return shown.message

    assert words(1.0, 1.0, 1.0) == "10 rounds committed, the last with 2 of 3 (rank 1 starting)"
    assert words(1.0, None, 1.0) == "10 rounds committed, the last with 2 of 3 (rank 1 waiting)"

    def after(phase: RankPhase) -> str:
        ranks = [replace(each, phase="Succeeded") for each in running(1.0, 1.0, 1.0)]
        ranks[1] = replace(ranks[1], phase=phase)
        shown = with_rounds(replace(now, status=replace(now.status, ranks=ranks)), summary).rounds
        assert shown is not None
        return shown.message

    assert after("Stopped") == "10 rounds committed, the last with 2 of 3 (rank 1 stopped)"
    assert after("Succeeded") == "10 rounds committed, the last with 2 of 3 (rank 1 finished)"
    assert after("Failed") == "10 rounds committed, the last with 2 of 3 (rank 1 lost)"
