"""Events of one pass, and the words of a failure, for any number of ranks."""

from __future__ import annotations

from atoll.core.describe import describe_failure, describe_status, events_between
from atoll.core.phase import Phase
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Exit, RankExit, RankPhase, RankStatus, Status, Training, WorldStatus


def ended(rank: int, code: int, phase: RankPhase = "Failed") -> RankStatus:
    return RankStatus(
        rank=rank, phase=phase, attempt=0, exit=Exit(code=code, at=1.0, reason="Error")
    )


def told(ranks: list[RankStatus]) -> list[tuple[str, str]]:
    before = [RankStatus(rank=r.rank, phase="Running", attempt=0, started_at=0.5) for r in ranks]
    old, new = Status(phase=Phase.READY, ranks=before), Status(phase=Phase.READY, ranks=ranks)
    return [(e.reason, e.message) for e in events_between(old, new, 2.0)]


def test_a_training_that_nobody_observed_yet_has_no_counts() -> None:
    assert describe_status(Status()) == "not started yet"
    assert describe_status(Status(phase=Phase.PENDING)) == "0 of 0 ranks ready, min 0"


def test_one_rank_is_told_by_its_number() -> None:
    assert told([ended(1, 3)]) == [("RankLost", "rank 1: exit_code=3 reason=Error")]


def test_ranks_that_end_alike_are_one_event_with_ranges() -> None:
    ranks = [ended(n, 127) for n in range(1_000) if n not in (193, 194)]
    assert told(ranks) == [("RankLost", "ranks 0-192, 195-999: exit_code=127 reason=Error")]


def test_each_kind_of_end_is_one_event() -> None:
    ranks = [
        ended(0, 1),
        ended(1, 0, "Succeeded"),
        ended(2, 2),
        ended(3, 1),
        ended(4, 9, "Pending"),
    ]
    assert told(ranks) == [
        ("RankLost", "ranks 0, 3: exit_code=1 reason=Error; rank 2: exit_code=2 reason=Error"),
        ("RankSucceeded", "rank 1: exit_code=0 reason=Error"),
        ("RankRestarting", "rank 4: exit_code=9 reason=Error"),
    ]


def test_ten_thousand_different_ends_are_one_event_of_bounded_length() -> None:
    ((_, message),) = told([ended(n, n + 1) for n in range(10_000)])
    assert len(message) < 2_000
    assert message.endswith("ranks 20-9999: in 9980 other ways")


def test_an_error_names_each_failed_rank_and_of_thousands_their_ranges() -> None:
    world = WorldSize(min=1, target=2, max=3)
    spec = TrainingSpec(name="a", command=["x"], world_size=world)

    def words(count: int) -> str:
        exits = [RankExit(rank=n, exit_code=7, termination_reason="Error") for n in range(count)]
        status = Status(phase=Phase.FAILED, rank_exits=exits, root_cause=exits[0])
        return describe_failure(Training(namespace="n", uid="u", spec=spec, status=status))

    assert "rank 1: exit_code=7 reason=Error" in words(3)
    assert "ranks 0-9999: exit_code=7 reason=Error" in words(10_000)
    assert len(words(10_000)) < 200


def test_one_rank_is_wanted_and_two_ranks_are() -> None:
    def accepted(target: int) -> str:
        world = WorldStatus(ready=0, target=target, min=1, max=2, below_minimum=True)
        new = Status(phase=Phase.PENDING, world=world)
        return next(e.message for e in events_between(Status(), new, 1.0) if e.reason == "Accepted")

    assert [accepted(1), accepted(2)] == ["1 rank wanted", "2 ranks wanted"]
