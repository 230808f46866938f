"""plan(): what it must never do, each rule alone."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from atoll.core.phase import Phase
from atoll.core.plan import STALE_S, Apply, Delete, Stop
from atoll.core.spec import BenchSpec
from atoll.core.status import BENCH_LIMIT_S, ObservedBench, ObservedRank
from tests.unit.core.test_plan import Story, running, timed


@pytest.mark.parametrize("is_supervised", [False, True])
def test_ranks_that_have_run_are_not_asked_for_again_where_the_wish_is_not_seen(
    is_supervised: bool,
) -> None:
    """The look is late, or the wish is lost: an executor that is asked again starts them twice."""
    story = Story()
    story.observe()
    story.ranks(**{f"r{rank}": "running" for rank in range(4)})
    desired = story.status.desired
    made = story.observe(after_s=0.5, ranks=[], desired=None, is_supervised=is_supervised)
    assert made.actions == ()
    assert (made.status.desired, made.status.failing) == (desired, "")


def test_ranks_that_have_never_run_are_asked_for_again_where_the_wish_is_not_seen() -> None:
    story = Story()
    story.observe()
    made = story.observe(desired=None, is_supervised=False)
    assert [action.desired.size for action in made.actions if isinstance(action, Apply)] == [4]


def discarded(story: Story) -> dict[int, int]:
    assert story.observation.desired is not None
    return story.observation.desired.discarded_attempts


def test_a_rank_that_atoll_stopped_and_still_wants_starts_anew() -> None:
    story = running(Story())
    story.ranks(r1="stopped")
    assert discarded(story) == {1: 0}
    assert story.status.ranks[1].phase == "Pending"


@pytest.mark.parametrize("why", ["cancelled", "failing"])
def test_a_rank_that_was_stopped_for_good_does_not_start_anew(why: str) -> None:
    story = running(Story(low=4, max_restarts=0))
    if why == "cancelled":
        story.spec(cancel=True)
        story.observe()
    else:
        story.ranks(r0="exit 1")
        assert story.status.failing == "RankFailed"
    story.ranks(r1="stopped")
    assert discarded(story) == {}
    assert story.status.discarded_attempts == {}


def test_an_end_that_nobody_asked_to_change_refuses_nothing() -> None:
    story = running(Story(target=2), 2)
    story.ranks(r0="exit 0", r1="exit 0")
    assert story.status.phase is Phase.SUCCEEDED
    assert "UDTerminalState" not in story.told


def test_a_look_that_tells_no_time_is_dated_by_the_skew_that_is_known() -> None:
    story = Story(target=2, deadline_s=3600)
    story.observe()
    ranks = [ObservedRank(rank=rank, state="running", started_at=50_000.0) for rank in (0, 1)]
    story.observation = replace(story.observation, ranks=ranks)
    timed(story, 9000.0, 9000.0, at=50_000.0)
    made = timed(story, 9010.0, 9010.0)
    assert made.status.failing == ""
    assert made.requeue_after_s == pytest.approx(3590.0)
    assert timed(story, 12_600.0, 12_600.0).status.failing == "DeadlineExceeded"


def test_a_start_grace_is_counted_from_the_first_look_by_the_steady_clock() -> None:
    """The wall clock that dated the training may have been far off."""
    story = Story(start_grace_s=30)
    story.training = replace(story.training, created_at=7200.0)
    story.observation = replace(story.observation, capacity=3)
    timed(story, 7200.0, 1.0)
    assert timed(story, 7201.0, 30.0).actions == ()
    (action,) = timed(story, 7202.0, 31.0).actions
    assert isinstance(action, Apply)
    assert action.desired.size == 3


@pytest.mark.parametrize("step", [-5000.0, 0.0, 5000.0])
def test_a_bench_is_given_up_after_its_limit_by_the_steady_clock(step: float) -> None:
    story = Story(bench=BenchSpec(mode="on-start"))
    story.observation = replace(story.observation, bench=ObservedBench(state="idle"))
    running(story)
    story.observation = replace(story.observation, bench=ObservedBench(state="running"))
    made = timed(story, 10.0 + step, 10.0)
    assert made.status.bench.phase == "Running"
    made = timed(story, 20.0, 20.0)
    assert made.requeue_after_s == pytest.approx(BENCH_LIMIT_S - 10.0)
    assert timed(story, 10.0, 9.0 + BENCH_LIMIT_S).status.bench.phase == "Running"
    assert timed(story, 10.0, 10.0 + BENCH_LIMIT_S).status.bench.phase == "TimedOut"


def test_ranks_that_fail_while_they_are_cancelled_make_no_failure_of_it() -> None:
    story = running(Story(low=4, max_restarts=0))
    story.spec(cancel=True)
    story.ranks(r0="exit 1")
    assert story.status.failing == ""
    story.ranks(r1="stopped", r2="stopped", r3="stopped")
    assert story.status.phase is Phase.CANCELLED


def test_the_first_reason_to_fail_stays_whatever_comes_after_it() -> None:
    story = running(Story(low=4, max_restarts=0, deadline_s=60))
    story.ranks(r0="exit 1")
    story.observe(after_s=100.0)
    assert (story.status.failing, story.status.failing_message) == ("RankFailed", "")
    story.ranks(r1="stopped", r2="stopped", r3="stopped")
    assert (story.status.phase, story.status.reason) == (Phase.FAILED, "RankFailed")


ENDS = {"Ready", "Complete", "Succeeded", "Failed", "Cancelled", "RanksLost"}


def conditions(story: Story) -> set[str]:
    """Those that are true of how it goes and how it ended."""
    return {c.type for c in story.status.conditions if c.status == "True"} & ENDS


def ended(how: str) -> Story:
    story = running(Story(low=2, target=2, max_restarts=0), 2)
    if how == "cancelled":
        story.spec(cancel=True)
        story.observe()
        story.ranks(r0="exit 1")
    if how == "failed":
        story.ranks(r0="exit 1")
    story.ranks(r0="exit 0" if how == "succeeded" else "exit 1", r1="exit 0")
    assert story.status.phase == how
    return story


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("succeeded", {"Complete", "Succeeded"}),
        ("failed", {"Failed", "RanksLost"}),
        ("cancelled", {"Cancelled", "RanksLost"}),
    ],
)
def test_conditions_say_how_it_ended_and_nothing_else(how: str, expected: set[str]) -> None:
    assert conditions(ended(how)) == expected
    assert conditions(running(Story())) == {"Ready"}


def test_only_a_failure_has_a_root_cause() -> None:
    causes = {how: ended(how).status.root_cause for how in ("succeeded", "failed", "cancelled")}
    assert {how for how, cause in causes.items() if cause is not None} == {"failed"}


def test_how_many_ranks_are_ready_is_told_beside_the_minimum() -> None:
    story = Story()
    story.observe()
    story.ranks(r0="running")
    (below,) = [c for c in story.status.conditions if c.type == "BelowMinimum"]
    assert (below.status, below.message) == ("True", "1 of 4 ranks ready")


def test_ranks_are_not_given_up_while_somebody_supervises_them() -> None:
    story = running(Story())
    story.observe(after_s=100.0, desired=None, is_supervised=True)
    assert story.status.failing == ""
    story.observe(after_s=100.0, is_supervised=False)
    assert story.status.failing == "ExecutorLost"


def test_a_cancel_asks_nothing_of_an_executor_whose_wish_is_not_seen() -> None:
    story = Story()
    story.observe()
    story.spec(cancel=True)
    made = story.observe(after_s=0.5, desired=None, is_supervised=False)
    assert made.actions == ()
    assert story.status.phase is Phase.PENDING


def test_a_change_after_the_end_is_refused_aloud_and_a_deletion_is_not() -> None:
    story = ended("succeeded")
    story.scale(3)
    assert story.observe().requeue_after_s == 0.0
    assert story.told[-1] == "UDTerminalState"
    assert story.status.observed_generation == story.training.generation
    story.told.clear()
    story.training = replace(
        story.training, generation=story.training.generation + 1, deletion_requested_at=story.now
    )
    story.observe()
    assert story.told == []
    assert story.status.observed_generation == story.training.generation


def test_what_is_supervised_after_the_end_is_released() -> None:
    story = ended("succeeded")
    assert story.observe(desired=None, ranks=[], is_supervised=True).actions == (Stop(),)
    assert story.observe(is_supervised=False).actions == ()
    assert story.status.is_released


def test_a_record_goes_when_its_time_is_over() -> None:
    story = running(Story(target=2, ttl_seconds=600), 2)
    story.ranks(r0="exit 0", r1="exit 0")
    for _ in range(2):
        story.observe(after_s=1.0, desired=None, ranks=[], is_supervised=False)
    assert story.observe(after_s=500.0).actions == ()
    assert story.observe(after_s=100.0).actions == (Delete(),)


def test_ranks_that_wait_are_not_asked_for_again_while_somebody_supervises_them() -> None:
    story = Story(target=2)
    story.observe()
    assert story.ranks(r0="running").actions == ()


def test_nothing_is_asked_of_an_executor_without_a_supervisor_where_no_work_is_left() -> None:
    story = running(Story(target=2), 2)
    assert story.observe(is_supervised=False).actions == ()


def test_what_was_asked_for_is_looked_at_again_once_a_look_cannot_be_late() -> None:
    assert Story().observe().requeue_after_s == STALE_S


def test_the_newest_rendezvous_endpoint_counts_and_none_takes_nothing_back() -> None:
    story = Story()
    for endpoint in ("a:1", "", "b:2"):
        story.observe(rendezvous_endpoint=endpoint)
        assert story.status.rendezvous_endpoint == (endpoint or "a:1")


def test_every_new_wish_has_the_next_version() -> None:
    """An executor ignores what is older than what it has."""
    story = running(Story())
    versions = [story.status.desired.version]
    for target in (6, 3, 6):
        story.scale(target)
        story.observe()
        versions.append(story.status.desired.version)
    assert versions == [1, 2, 3, 4]


def test_a_world_of_exactly_min_ranks_goes_on() -> None:
    story = running(Story(low=3, max_restarts=0))
    story.ranks(r0="exit 1")
    assert (story.status.phase, story.status.failing) == (Phase.READY, "")
    story.ranks(r1="exit 1")
    assert story.status.failing == "RankFailed"


def test_a_single_rank_is_stopped_by_a_cancel() -> None:
    story = running(Story(low=1, target=1), 1)
    story.spec(cancel=True)
    story.observe()
    assert story.desired_size == 0


def test_a_cancel_is_not_over_while_somebody_may_still_start_ranks() -> None:
    story = Story()
    story.observe()
    story.spec(cancel=True)
    story.observe(after_s=100.0, desired=None, is_supervised=True)
    assert story.status.phase is Phase.PENDING
    story.observe(is_supervised=False)
    assert story.status.phase is Phase.CANCELLED
