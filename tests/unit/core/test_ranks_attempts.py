from __future__ import annotations

from atoll.core.clock import Now
from atoll.core.plan import plan
from atoll.core.ranks import MAX_ATTEMPTS, attempts_of, newest_attempts, superseded_attempts
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import (
    AttemptStatus,
    DesiredState,
    Exit,
    Observation,
    ObservedRank,
    RankStatus,
    Status,
    Training,
)

ONE = WorldSize(min=1, target=1, max=1)


def training(status: Status) -> Training:
    spec = TrainingSpec(name="t", command=["true"], world_size=ONE, max_restarts=9)
    return Training(namespace="n", uid="u", spec=spec, status=status)


def failed(at: float, code: int = 1) -> Exit:
    return Exit(code=code, at=at, reason="Error", message="it broke", log_tail=["long"])


def test_an_attempt_is_kept_when_its_successor_is_seen() -> None:
    desired = DesiredState(version=1, size=1)
    first = ObservedRank(
        rank=0, state="exited", attempt=0, started_at=1.0, exit=failed(2.0), host="h"
    )
    observation = Observation(ranks=[first], desired=desired, is_supervised=True)
    one = plan(training(Status()), observation, Now.at(3.0))
    assert one.attempts == ()
    again = ObservedRank(rank=0, state="running", attempt=1, restarts=1, started_at=4.0, host="h")
    two = plan(
        training(one.status),
        Observation(ranks=[again], desired=desired, is_supervised=True),
        Now.at(5.0),
    )
    assert two.attempts == (
        AttemptStatus(
            rank=0,
            attempt=0,
            started_at=1.0,
            ended_at=2.0,
            exit_code=1,
            reason="Error",
            message="it broke",
            host="h",
        ),
    )
    (old, new) = attempts_of(two.status, two.attempts)
    assert (old.attempt, new.attempt, new.started_at, new.ended_at) == (0, 1, 4.0, None)


def test_attempts_that_came_and_went_unseen_are_taken_from_the_executor() -> None:
    past = tuple(AttemptStatus(rank=0, attempt=n, started_at=n, ended_at=n + 0.5) for n in range(4))
    observed_rank = ObservedRank(rank=0, state="running", attempt=4, started_at=4.0, attempts=past)
    old = Status(ranks=[RankStatus(rank=0, attempt=1, started_at=1.0)])
    new = Status(ranks=[RankStatus(rank=0, attempt=4, started_at=4.0)])
    assert superseded_attempts(old, new, Observation(ranks=[observed_rank])) == past


def test_an_end_that_nobody_saw_is_unknown() -> None:
    old = Status(ranks=[RankStatus(rank=0, attempt=0, started_at=1.0)])
    new = Status(ranks=[RankStatus(rank=0, attempt=3, started_at=9.0)])
    (only,) = superseded_attempts(old, new, Observation())
    assert (only.attempt, only.exit_code, only.ended_at, only.reason) == (0, None, 9.0, "Vanished")


def test_nothing_is_kept_of_ranks_that_did_not_restart() -> None:
    ranks = [RankStatus(rank=n, attempt=0, started_at=1.0) for n in range(3)]
    assert superseded_attempts(Status(), Status(ranks=ranks), Observation()) == ()
    assert [a.rank for a in attempts_of(Status(ranks=ranks), ())] == [0, 1, 2]


def test_the_newest_are_kept() -> None:
    many = [
        AttemptStatus(rank=rank, attempt=n, ended_at=float(n))
        for rank in (1, 0)
        for n in range(MAX_ATTEMPTS + 5)
    ]
    kept = newest_attempts(many)
    assert [(a.rank, a.attempt) for a in kept] == [
        (rank, n) for rank in (0, 1) for n in range(5, MAX_ATTEMPTS + 5)
    ]
    assert [(a.rank, a.attempt) for a in newest_attempts(many, 4)] == [
        (0, MAX_ATTEMPTS + 3),
        (0, MAX_ATTEMPTS + 4),
        (1, MAX_ATTEMPTS + 3),
        (1, MAX_ATTEMPTS + 4),
    ]


def test_attempts_that_are_told_apart_by_their_times_are_counted() -> None:
    at = 1_700_000_000
    stored = [AttemptStatus(rank=1, attempt=at, ended_at=at + 1.0)]
    ranks = [RankStatus(rank=n, attempt=at + n * 5, started_at=float(at)) for n in (0, 1)]
    known = attempts_of(Status(ranks=ranks), stored)
    assert [(a.rank, a.attempt) for a in known] == [(0, 0), (1, 0), (1, 1)]
