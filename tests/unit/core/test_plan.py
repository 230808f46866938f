"""plan(): one decision a test, on worlds written out by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from atoll.core.clock import Now
from atoll.core.phase import Phase
from atoll.core.plan import Apply, Delete, Plan, Stop, plan
from atoll.core.ranks import MAX_TEXT_BYTES
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import DesiredState, Exit, Observation, ObservedRank, Training, usage

replace = msgspec.structs.replace


class Story:
    """A training and its machine, told step by step."""

    def __init__(self, low: int = 2, target: int = 4, high: int = 8, **changes: Any) -> None:
        world = WorldSize(min=low, target=target, max=high)
        spec = TrainingSpec(name="t", command=["x"], world_size=world, **changes)
        self.training = Training(namespace="n", uid="u", spec=spec, created_at=0.0)
        self.observation = Observation()
        self.now = 0.0
        self.told: list[str] = []
        self.last: Plan | None = None

    def observe(self, after_s: float = 1.0, **changes: Any) -> Plan:
        """One pass, its status written and its wish accepted."""
        self.now += after_s
        self.observation = replace(self.observation, **changes)
        made = plan(self.training, self.observation, Now.at(self.now))
        self.training = replace(self.training, status=made.status)
        self.told += [event.reason for event in made.events]
        for action in made.actions:
            if isinstance(action, Apply):
                self.observation = replace(
                    self.observation, desired=action.desired, is_supervised=True
                )
        self.last = made
        return made

    def ranks(self, **how: str) -> Plan:
        """`r0="running", r1="exit 3"`: how each rank is now."""
        ranks = {r.rank: r for r in self.observation.ranks}
        for name, text in how.items():
            rank = int(name[1:])
            ranks[rank] = self._rank(rank, text, ranks.get(rank))
        return self.observe(ranks=list(ranks.values()))

    def _rank(self, rank: int, text: str, before: ObservedRank | None) -> ObservedRank:
        word, _, rest = text.partition(" ")
        attempt = before.attempt if before else 0
        restarts = before.restarts if before else 0
        if word == "again":
            return ObservedRank(
                rank=rank, state="running", attempt=attempt + 1, restarts=restarts + 1,
                started_at=self.now,
            )  # fmt: skip
        started_at = before.started_at if before and before.started_at else self.now
        ended = None
        if word in ("exit", "stopped"):
            code = None if rest == "unknown" else int(rest or 143)
            ended = Exit(code=code, at=self.now, reason="Error", is_stopped=word == "stopped")
        return ObservedRank(
            rank=rank,
            state="exited" if ended else "running",
            attempt=attempt,
            restarts=restarts,
            started_at=started_at,
            exit=ended,
        )

    def spec(self, **changes: Any) -> None:
        spec = replace(self.training.spec, **changes)
        generation = self.training.generation + 1
        self.training = replace(self.training, spec=spec, generation=generation)

    def scale(self, target: int) -> None:
        self.spec(world_size=replace(self.training.spec.world_size, target=target))

    @property
    def status(self) -> Any:
        return self.training.status

    @property
    def desired_size(self) -> int | None:
        return self.observation.desired.size if self.observation.desired else None


def running(story: Story, count: int = 4) -> Story:
    story.observe()
    story.ranks(**{f"r{i}": "running" for i in range(count)})
    return story


def test_ranks_are_asked_for_at_once_where_there_is_no_limit() -> None:
    story = Story()
    made = story.observe()
    assert [a.desired.size for a in made.actions if isinstance(a, Apply)] == [4]
    assert story.status.phase is Phase.PENDING


def test_nothing_is_asked_twice() -> None:
    story = running(Story())
    assert story.observe().actions == ()
    before = story.status
    assert story.observe().status == before


def test_ready_at_the_minimum() -> None:
    story = Story()
    story.observe()
    story.ranks(r0="running")
    assert story.status.phase is Phase.PENDING
    story.ranks(r1="running")
    assert story.status.phase is Phase.READY
    assert story.status.world.ready == 2


def test_the_gate_waits_for_all_of_them() -> None:
    story = Story(start_grace_s=30)
    assert story.observe(capacity=3, message="3 of 3 slots").actions == ()
    assert "capacity for 3 of 4" in story.status.ranks[0].message
    made = story.observe(capacity=4)
    assert [type(a) for a in made.actions] == [Apply]


def test_the_gate_opens_for_the_minimum_after_the_grace() -> None:
    story = Story(start_grace_s=30)
    made = story.observe(capacity=3)
    assert made.requeue_after_s == pytest.approx(29.0)
    story.observe(after_s=29.0)
    assert story.desired_size == 3
    assert story.status.ranks[3].message.startswith("no capacity")


def test_the_gate_stays_shut_below_the_minimum_however_long_it_takes() -> None:
    story = Story(start_grace_s=30)
    story.observe(after_s=1000.0, capacity=1)
    assert story.desired_size is None


def admitted(story: Story) -> str:
    (condition,) = [c for c in story.status.conditions if c.type == "Admitted"]
    return str(condition.status)


def test_where_ranks_are_let_go_at_once_they_are_admitted_by_the_plan() -> None:
    story = Story(start_grace_s=30)
    story.observe(capacity=3)
    assert (admitted(story), story.status.gate_opened_at) == ("False", None)
    story.observe(capacity=4)
    assert (admitted(story), story.status.gate_opened_at) == ("True", story.now)


def test_an_executor_with_a_gate_is_asked_for_ranks_before_it_opens() -> None:
    story = Story()
    story.observe(has_gate=True)
    assert story.desired_size == 4
    assert (admitted(story), story.status.gate_opened_at) == ("False", None)
    assert story.status.reason == "WaitingForCapacity"


def test_a_deadline_does_not_count_while_ranks_wait_at_the_executors_gate() -> None:
    story = Story(deadline_s=60)
    story.observe(has_gate=True)
    story.observe(after_s=1000.0)
    assert (admitted(story), story.status.failing) == ("False", "")
    opened_at = story.now + 1.0
    story.observe(after_s=2.0, gate_opened_at=opened_at)
    assert (admitted(story), story.status.gate_opened_at) == ("True", opened_at)
    story.ranks(**{f"r{rank}": "running" for rank in range(4)})
    assert story.observe(after_s=50.0).status.failing == ""
    story.observe(after_s=10.0)
    assert story.status.failing == "DeadlineExceeded"
    assert story.status.failing_message == "still running 60 s after the start"


def test_when_the_gate_opened_is_told_once() -> None:
    """A Job that was deleted, or is read late, takes nothing back."""
    story = Story()
    story.observe(has_gate=True, gate_opened_at=7.0)
    story.observe(gate_opened_at=None)
    story.observe(gate_opened_at=9.0)
    assert story.status.gate_opened_at == 7.0


def test_a_later_rank_joins_when_there_is_room() -> None:
    story = Story(start_grace_s=0)
    story.observe(capacity=2)
    story.ranks(r0="running", r1="running")
    story.observe(capacity=4)
    assert story.desired_size == 4
    assert story.status.phase is Phase.READY


def test_a_failed_rank_is_awaited_while_it_has_restarts_left() -> None:
    story = running(Story(low=4, max_restarts=1))
    story.ranks(r1="exit 1")
    assert story.status.phase is Phase.PENDING
    assert "WorldShrunkBelowMin" in story.told
    assert not story.status.failing
    story.ranks(r1="again")
    assert story.status.phase is Phase.READY
    assert story.status.ranks[1].restarts == 1


def test_exits_that_only_the_executor_tells_of_are_a_condition() -> None:
    story = running(Story(low=2))
    story.ranks(r3="exit 9")
    assert not [c for c in story.status.conditions if c.type == "ExitsFromBackend"]
    silent = Exit(code=9, at=story.now, reason="Error", is_from_backend=True)
    observation = {r.rank: r for r in story.observation.ranks}
    observation[2] = replace(observation[2], state="exited", exit=silent)
    story.observe(ranks=list(observation.values()))
    (told,) = [c for c in story.status.conditions if c.type == "ExitsFromBackend"]
    assert told.status == "True"
    assert "the exits of 2:" in told.message


def test_a_rank_lost_above_the_minimum_is_a_condition() -> None:
    story = running(Story(low=2))
    story.ranks(r3="exit 9")
    assert story.status.phase is Phase.READY
    lost = next(c for c in story.status.conditions if c.type == "RanksLost")
    assert "3" in lost.message
    story.ranks(r0="exit 0", r1="exit 0", r2="exit 0")
    assert story.status.phase is Phase.SUCCEEDED
    assert story.status.world.ready == 3
    assert story.status.root_cause is None


def test_below_the_minimum_for_good_the_rest_are_stopped_then_it_fails() -> None:
    story = running(Story(low=4))
    story.ranks(r1="exit 3")
    assert story.desired_size == 0
    assert story.status.phase is Phase.PENDING
    assert story.status.rank_exits == []
    story.ranks(r0="stopped", r2="stopped", r3="exit 1")
    assert story.status.phase is Phase.FAILED
    assert story.status.root_cause.rank == 1
    assert [e.collateral for e in story.status.rank_exits] == [True, False, True, True]
    assert [e.exit_code for e in story.status.rank_exits] == [143, 3, 143, 1]


def test_the_first_to_fail_is_to_blame_even_if_it_ended_last() -> None:
    story = running(Story(low=4))
    at = story.now + 1
    peers = [
        ObservedRank(
            rank=r, state="exited", started_at=2.0, exit=Exit(code=1, at=at, reason="Error")
        )
        for r in (0, 2, 3)
    ]
    slow = Exit(code=1, at=at + 0.5, failed_at=at - 0.2, reason="Error")
    culprit = ObservedRank(rank=1, state="exited", started_at=2.0, exit=slow)
    story.observe(ranks=[*peers, culprit])
    assert story.status.phase is Phase.FAILED
    assert story.status.root_cause.rank == 1


def test_a_rank_lost_long_ago_is_not_to_blame_for_the_end() -> None:
    story = running(Story(low=3))
    story.ranks(r3="exit 1")
    story.now += 3600
    story.ranks(r2="exit 7")
    story.ranks(r0="stopped", r1="stopped")
    assert story.status.root_cause.rank == 2
    assert [e.rank for e in story.status.rank_exits if e.collateral] == [0, 1]


def test_who_is_to_blame_has_its_last_lines_even_where_an_earlier_end_left_no_room() -> None:
    story = running(Story(low=3))

    def exits(rank: int, log_tail: list[str]) -> None:
        ended = Exit(code=1, at=story.now, reason="Error", log_tail=log_tail)
        ranks = list(story.observation.ranks)
        ranks[rank] = replace(ranks[rank], state="exited", exit=ended)
        story.observe(ranks=ranks)

    exits(3, ["x" * (MAX_TEXT_BYTES - 1000)])
    story.now += 3600
    exits(2, ["y" * 2000])
    assert story.status.ranks[2].exit.log_tail == []
    story.ranks(r0="stopped", r1="stopped")
    assert story.status.root_cause.rank == 2
    assert story.status.root_cause.log_tail == ["y" * 2000]


def test_an_unknown_exit_is_a_failure_and_never_zero() -> None:
    story = running(Story(low=1, target=1), 1)
    story.ranks(r0="exit unknown")
    assert story.status.phase is Phase.FAILED
    assert story.status.rank_exits[0].exit_code is None
    assert "exit_code=unknown" in story.status.message


def test_scaling_down_stops_the_highest_ranks_and_keeps_their_exits() -> None:
    story = running(Story())
    story.scale(2)
    story.observe()
    assert story.desired_size == 2
    assert story.status.observed_generation == 2
    assert story.status.world.target == story.status.world.ready == 2
    assert story.status.ranks[3].message == "stopping: scaled down"
    story.ranks(r2="stopped", r3="stopped 0")
    assert [r.rank for r in story.status.ranks] == [0, 1]
    story.ranks(r0="exit 0", r1="exit 0")
    assert story.status.phase is Phase.SUCCEEDED
    assert [e.rank for e in story.status.rank_exits] == [0, 1, 2, 3]


def test_a_rank_scaled_away_and_wanted_again_starts_anew() -> None:
    story = running(Story(low=2))
    story.ranks(r3="exit 1")
    story.scale(3)
    story.observe()
    story.scale(4)
    story.observe()
    assert story.observation.desired is not None
    assert story.observation.desired.discarded_attempts == {3: 0}
    assert story.status.ranks[3].phase == "Pending"
    story.ranks(r3="again")
    assert story.status.world.ready == 4


def test_a_finished_world_is_not_over_while_a_scaled_away_rank_lives() -> None:
    story = running(Story(low=2))
    story.scale(2)
    story.observe()
    story.ranks(r0="exit 0", r1="exit 0")
    assert story.status.phase is Phase.READY
    story.ranks(r2="stopped", r3="stopped")
    assert story.status.phase is Phase.SUCCEEDED


def test_a_look_that_does_not_show_the_newest_wish_says_nothing_of_what_became_of_it() -> None:
    story = running(Story(low=1, target=2), count=2)
    first = story.observation.desired
    story.scale(3)
    story.observe()
    story.scale(2)
    story.observe()
    # Taken before the third rank was asked for; it may have been started since.
    story.observation = replace(story.observation, desired=first)
    made = story.ranks(r0="exit 0", r1="exit 0")
    assert made.status.phase is Phase.READY
    assert [a.desired for a in made.actions if isinstance(a, Apply)] == [story.status.desired]
    # The third wish is being kept, and nobody is left of the second one.
    assert story.observe().status.phase is Phase.SUCCEEDED


def test_cancel_stops_then_ends_and_keeps_the_record() -> None:
    story = running(Story())
    story.spec(cancel=True)
    story.observe()
    assert story.desired_size == 0
    assert story.status.phase is Phase.PENDING
    story.ranks(r0="stopped", r1="stopped", r2="stopped", r3="exit 0")
    assert story.status.phase is Phase.CANCELLED
    assert not any(e.collateral for e in story.status.rank_exits)
    assert story.status.root_cause is None


def test_cancel_before_anything_was_asked_ends_at_once() -> None:
    story = Story()
    story.spec(cancel=True)
    made = story.observe()
    assert made.actions == ()
    assert story.status.phase is Phase.CANCELLED


def test_a_late_look_does_not_end_a_training_that_is_starting() -> None:
    story = Story()
    story.observe()
    story.spec(cancel=True)
    accepted, story.observation = story.observation, Observation()
    story.observe(after_s=0.1)
    assert story.status.phase is Phase.PENDING
    story.observation = accepted
    story.observe(after_s=0.1)
    assert story.desired_size == 0
    assert story.status.phase is Phase.PENDING
    story.observe(after_s=0.1)
    assert story.status.phase is Phase.CANCELLED


def test_a_deadline_fails_it_with_nobody_to_blame() -> None:
    story = running(Story(deadline_s=10))
    made = story.observe()
    assert made.requeue_after_s is not None
    story.observe(after_s=10)
    assert story.desired_size == 0
    story.ranks(r0="stopped", r1="stopped", r2="stopped", r3="stopped")
    assert story.status.phase is Phase.FAILED
    assert story.status.reason == "DeadlineExceeded"
    assert story.status.root_cause is None


def test_an_executor_that_never_will_fails_it_with_its_words() -> None:
    story = Story()
    story.observe(fault="no such image")
    assert story.status.phase is Phase.FAILED
    assert story.status.message == "no such image"


def test_a_rank_that_is_not_seen_any_more_is_given_up_within_five_seconds() -> None:
    story = running(Story(low=4))
    missing_at = story.now + 1
    made = story.observe(ranks=[r for r in story.observation.ranks if r.rank != 2])
    assert story.status.ranks[2].message == "not observed any more"
    while not story.status.failing:
        assert made.requeue_after_s is not None
        made = story.observe(after_s=made.requeue_after_s)
    assert story.now - missing_at < 5.0
    story.ranks(r0="stopped", r1="stopped", r3="stopped")
    assert story.status.phase is Phase.FAILED
    assert story.status.root_cause.rank == 2
    assert story.status.root_cause.exit_code is None


def test_a_supervisor_that_died_is_asked_again_for_what_is_left() -> None:
    story = running(Story(low=4, max_restarts=1))
    ended = [
        replace(r, state="exited", exit=Exit(code=137, at=story.now, reason="SupervisorLost"))
        for r in story.observation.ranks
    ]
    made = story.observe(ranks=ended, is_supervised=False)
    assert [type(a) for a in made.actions] == [Apply]
    assert story.status.phase is Phase.PENDING


def test_after_the_end_it_is_released_then_kept() -> None:
    story = running(Story(low=1, target=1), 1)
    made = story.ranks(r0="exit 0")
    assert story.status.phase is Phase.SUCCEEDED
    assert (made.actions, made.requeue_after_s) == ((), 0.0)
    made = story.observe()
    assert (made.actions, made.requeue_after_s) == ((Stop(),), 0.0)
    story.observation = Observation()
    made = story.observe()
    assert (made.actions, made.requeue_after_s) == ((), 0.0)
    assert story.status.is_released
    assert story.observe().requeue_after_s is None


@pytest.mark.parametrize("way", ["ttl", "delete"])
def test_the_record_goes_only_after_the_release(way: str) -> None:
    story = running(Story(low=1, target=1, ttl_seconds=60 if way == "ttl" else None), 1)
    story.ranks(r0="exit 0")
    if way == "delete":
        story.training = replace(story.training, deletion_requested_at=story.now)
    assert story.observe().actions == (Stop(),)
    story.observation = Observation()
    assert story.observe().actions == ()
    if way == "ttl":
        made = story.observe()
        assert made.requeue_after_s is not None
        assert made.actions == ()
        story.observe(after_s=made.requeue_after_s)
        assert story.last is not None
        assert story.last.actions == (Delete(),)
    else:
        assert story.observe().actions == (Delete(),)


def test_usage_stops_with_the_ranks() -> None:
    story = running(Story(low=1, target=1, max_restarts=1), 1)
    began = story.now
    story.now = began + 9
    story.ranks(r0="exit 1")
    ran = story.status.ranks[0].metered_s
    assert usage(story.training, Now.at(story.now + 100)).rank_seconds == ran > 0


def test_a_finished_world_keeps_its_count() -> None:
    story = running(Story())
    story.ranks(r0="exit 0", r1="exit 0", r2="exit 0", r3="exit 0")
    assert story.status.phase is Phase.SUCCEEDED
    assert story.status.world.ready == 4
    assert not story.status.world.below_minimum


def closed(story: Story, size: int) -> Story:
    """As after a wish for more that came when every rank of the last one had ended."""
    desired = DesiredState(version=1, size=size)
    story.observation = replace(
        story.observation, desired=desired, is_closed=True, is_supervised=False
    )
    return story


def test_a_scale_up_that_comes_after_all_ranks_ended_does_not_undo_their_success() -> None:
    story = running(Story(low=1, target=2), 2)
    story.scale(4)
    closed(story, 2).ranks(r0="exit 0", r1="exit 0")
    assert story.status.phase is Phase.SUCCEEDED
    assert (story.status.world.ready, story.status.world.target) == (2, 2)
    assert story.status.observed_generation == story.training.generation
    assert story.told[-1] == "UDTerminalState"
    assert "Failed" not in story.told


def test_a_scale_up_that_the_executor_could_not_take_any_more_is_given_up() -> None:
    story = running(Story(low=1, target=2), 2)
    story.scale(4)
    assert [type(a) for a in story.observe().actions] == [Apply]
    closed(story, 2).ranks(r0="exit 0", r1="exit 0")
    assert story.desired_size == 2
    story.observe(is_supervised=False)
    assert story.status.phase is Phase.SUCCEEDED
    assert story.told.count("UDTerminalState") == 1


def test_a_late_scale_up_does_not_undo_a_failure_either() -> None:
    story = running(Story(low=2, target=2), 2)
    story.scale(4)
    closed(story, 2).ranks(r0="exit 0", r1="exit 3")
    assert story.status.phase is Phase.FAILED
    assert story.status.root_cause.rank == 1


def test_ranks_that_never_found_room_are_still_wanted() -> None:
    """An executor that can take more is not closed, though all it was asked for has ended."""
    story = Story(start_grace_s=0)
    story.observe(capacity=2)
    story.ranks(r0="running", r1="running")
    story.ranks(r0="exit 0", r1="exit 0")
    assert not story.status.phase.is_terminal


def test_no_verdict_while_the_executor_does_not_know_whether_a_stopped_rank_ran() -> None:
    story = running(Story(low=4))
    story.ranks(r3="exit 9")
    story.ranks(r0="stopped", r1="stopped", r2="stopped")
    assert story.status.phase == "failed"
    story = running(Story(low=4))
    story.ranks(r3="exit 9")
    story.observe(unsettled=1)
    story.ranks(r0="stopped", r1="stopped", r2="stopped")
    assert story.status.phase == "pending"
    story.observe(unsettled=0)
    assert story.status.phase == "failed"


def test_a_rank_that_was_told_to_stop_is_not_ready_until_its_successor_runs() -> None:
    story = running(Story())
    story.scale(2)
    story.observe()
    told = [replace(r, is_stopping=r.rank >= 2) for r in story.observation.ranks]
    story.observe(ranks=told)
    assert story.training.has_surplus
    story.scale(4)
    for _ in range(2):
        story.observe()
        assert (story.status.world.ready, story.status.phase) == (2, Phase.READY)
        assert [r.message for r in story.status.ranks[2:]] == [
            "stopping: it restarts once it has ended"
        ] * 2
    story.ranks(r2="stopped", r3="stopped")
    story.observe()
    assert story.status.world.ready == 2
    story.ranks(r2="again", r3="again")
    assert story.status.world.ready == 4
    assert not story.training.has_surplus


def test_an_older_look_does_not_make_a_stopping_rank_ready_again() -> None:
    story = running(Story())
    before = story.observation.ranks
    story.observe(ranks=[replace(r, is_stopping=r.rank == 3) for r in before])
    story.observe(ranks=before)
    assert story.status.world.ready == 3


def test_ranks_of_a_cancelled_training_are_not_ready_while_they_stop() -> None:
    story = running(Story())
    story.spec(cancel=True)
    story.observe()
    story.observe(ranks=[replace(r, is_stopping=True) for r in story.observation.ranks])
    assert story.status.world.ready == 0
    assert "WorldShrunkBelowMin" not in story.told


def timed(story: Story, wall: float, monotonic: float, at: float | None = None) -> Plan:
    """One pass at that moment of the wall clock, the steady one and the executor's."""
    observation = replace(story.observation, at=at)
    made = plan(story.training, observation, Now.at(wall, wall - monotonic))
    story.training = replace(story.training, status=made.status)
    return made


def test_a_deadline_counts_from_the_start_by_the_executors_clock() -> None:
    """Neither the wait for the first rank nor a clock that was set uses it up."""
    story = Story(target=2, deadline_s=3600)
    story.observe()
    assert timed(story, 9000.0, 9000.0).status.failing == ""  # asked for, and nothing has started
    ranks = [ObservedRank(rank=n, state="running", started_at=50_000.0) for n in (0, 1)]
    story.observation = replace(story.observation, ranks=ranks)
    made = timed(story, 9001.0, 9001.0, at=50_001.0)
    assert made.requeue_after_s == pytest.approx(3599.0)
    made = timed(story, 9002.0 + 7200, 9002.0, at=50_002.0)  # the wall clock was set by two hours
    assert made.status.failing == ""
    assert made.requeue_after_s == pytest.approx(3598.0)
    assert usage(story.training, Now.at(9002.0 + 7200, 7200)).rank_seconds == pytest.approx(4.0)
    assert timed(story, 9002.0, 12_600.0, at=53_600.0).status.failing == "DeadlineExceeded"


@pytest.mark.parametrize("skew", [0.0, 40_000.0], ids=["one clock", "another clock there"])
def test_no_deadline_counts_the_time_that_a_machine_was_off(skew: float) -> None:
    """The executor's clock has gone on meanwhile, as the machine's own has."""
    story = Story(target=2, deadline_s=3600)
    story.observe()
    ranks = [ObservedRank(rank=n, state="running", started_at=9000.0 + skew) for n in (0, 1)]
    story.observation = replace(story.observation, ranks=ranks)
    timed(story, 9010.0, 9010.0, at=9010.0 + skew)
    made = timed(story, 99_020.0, 9020.0, at=99_020.0 + skew)  # after 25 hours
    assert made.status.failing == ""
    assert made.requeue_after_s == pytest.approx(3580.0)
    made = timed(story, 102_599.0, 12_599.0, at=102_599.0 + skew)
    assert made.status.failing == ""
    assert made.requeue_after_s == pytest.approx(1.0)
    made = timed(story, 102_600.0, 12_600.0, at=102_600.0 + skew)
    assert made.status.failing == "DeadlineExceeded"


def test_a_record_lives_as_long_as_it_is_to_by_the_steady_clock() -> None:
    story = running(Story(target=2, ttl_seconds=600), 2)
    story.observation = replace(story.observation, ranks=[
        replace(r, state="exited", exit=Exit(code=0, at=5.0, reason="Completed"))
        for r in story.observation.ranks
    ])  # fmt: skip
    timed(story, 5000.0, 10.0)
    assert story.status.phase is Phase.SUCCEEDED
    assert story.status.ended_at == 5000.0
    story.observation = Observation()
    timed(story, 5000.0, 10.0)
    made = timed(story, 50_000.0, 20.0)
    assert (made.actions, made.requeue_after_s) == ((), pytest.approx(590.0))
    assert timed(story, 100.0, 610.0).actions == (Delete(),)


def test_a_start_grace_is_measured_and_not_dated() -> None:
    story = Story(start_grace_s=30)
    story.observation = replace(story.observation, capacity=3)
    timed(story, 7200.0, 1.0)
    assert timed(story, 9000.0, 2.0).actions == ()
    made = timed(story, 10.0, 31.0)
    assert [a.desired.size for a in made.actions if isinstance(a, Apply)] == [3]


def test_no_step_of_a_clock_makes_a_rank_missing_or_an_executor_lost() -> None:
    story = running(Story())
    story.observation = Observation()
    timed(story, 3.0, 3.0)
    assert timed(story, 9000.0, 3.5).status.failing == ""
    assert all(r.is_alive for r in story.status.ranks)
    assert all(r.exit is not None for r in timed(story, 9.0, 6.1).status.ranks)
