"""What is made of a Job and its pods. Each pod below is as a cluster shows it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from atoll.backends.kubernetes.deleted_pods import DeletedState
from atoll.backends.kubernetes.job import RELEASE, Job
from atoll.backends.kubernetes.names import SHRINKS
from atoll.backends.kubernetes.pod import WAITING, Pod
from atoll.core.clock import Now
from atoll.core.plan import plan
from atoll.core.spec import WorldSize
from atoll.core.status import Exit, RankStatus, Status, Training
from tests.unit.backends.kubernetes.kube import (
    MADE,
    NO_ROOM,
    NOW,
    TAINTED,
    Json,
    Options,
    ended,
    job,
    known,
    observation,
    observe_gang,
    only,
    pod,
    running,
    training,
)

HOLDING = Options(has_exit_finalizer=True)


def test_an_exit_has_its_times_and_the_last_lines() -> None:
    rank = only(observation(pod(0, ended(1, message="a\nb\n", at=NOW - 7), phase="Failed")))
    assert rank.exit is not None
    assert (rank.started_at, rank.exit.at) == (MADE + 5, NOW - 7)
    assert rank.exit.log_tail == ["a", "b"]
    assert rank.host == "node-1"


def shrunk(size: int, to: int, at: float) -> Json:
    return job(size, annotations={SHRINKS: f"[[{to}, {at}]]"})


@pytest.mark.parametrize("grace", [10, 0])
def test_a_rank_scaled_away_was_stopped_by_us(grace: int) -> None:
    """Also once the kubelet has set the grace to 0, which moves the time of deletion to then."""
    gone = pod(2, ended(7, at=NOW - 15), phase="Failed", deleted_at=NOW - 20 if grace else NOW - 5)
    gone["metadata"]["deletionGracePeriodSeconds"] = grace
    rank = only(observation(gone, gang=shrunk(2, 2, NOW - 20)))
    assert rank.exit is not None
    assert (rank.exit.is_stopped, rank.exit.reason, rank.exit.code) == (True, "Stopped", 7)


def test_a_rank_scaled_away_and_wanted_again_was_still_stopped_by_us() -> None:
    gone = pod(2, ended(143, at=NOW - 15), phase="Failed", deleted_at=NOW - 20)
    rank = only(observation(gone, gang=shrunk(3, 2, NOW - 20)))
    assert rank.exit is not None
    assert rank.exit.is_stopped


def suspended(*, is_now: bool, since: str) -> Json:
    gang = job(3)
    gang["spec"]["suspend"] = is_now
    status = "True" if is_now else "False"
    told = {"type": "Suspended", "status": status, "lastTransitionTime": since}
    gang["status"] = {"conditions": [told]}
    return gang


def iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()


@pytest.mark.parametrize("is_now", [True, False])
def test_a_rank_of_a_suspended_job_was_stopped_also_if_it_goes_on_by_now(is_now: bool) -> None:
    gone = pod(2, ended(143, at=NOW - 15), phase="Failed", deleted_at=NOW - 20)
    since = NOW - 20 if is_now else NOW - 3
    rank = only(observation(gone, gang=suspended(is_now=is_now, since=iso(since))))
    assert rank.exit is not None
    assert (rank.exit.is_stopped, rank.exit.reason) == (True, "Stopped")


def test_a_rank_that_fell_before_the_job_was_suspended_fell() -> None:
    gone = pod(2, ended(1, at=NOW - 50), phase="Failed", deleted_at=NOW - 55)
    rank = only(observation(gone, gang=suspended(is_now=True, since=iso(NOW - 20))))
    assert rank.exit is not None
    assert not rank.exit.is_stopped


def test_a_rank_deleted_after_the_job_was_resumed_fell() -> None:
    gone = pod(2, ended(143, at=NOW - 5), phase="Failed", deleted_at=NOW - 6)
    rank = only(observation(gone, gang=suspended(is_now=False, since=iso(MADE - 9))))
    assert rank.exit is not None
    assert not rank.exit.is_stopped


def test_a_rank_that_fell_before_it_was_stopped_fell() -> None:
    gone = pod(2, ended(1, at=NOW - 50), phase="Failed", deleted_at=NOW - 20)
    rank = only(observation(gone, gang=shrunk(2, 2, NOW - 20)))
    assert rank.exit is not None
    assert not rank.exit.is_stopped


def test_a_shrink_long_before_a_pods_time_does_not_excuse_it() -> None:
    gone = pod(2, ended(143), phase="Failed", deleted_at=NOW - 20)
    gang = job(3, annotations={SHRINKS: f"[[2, {MADE - 60}]]"})
    rank = only(observation(gone, gang=gang))
    assert rank.exit is not None
    assert not rank.exit.is_stopped


def test_exits_are_told_one_at_a_time_oldest_first() -> None:
    first = pod(0, ended(1), phase="Failed", made_at=MADE)
    second = pod(0, running(), restarts=1, made_at=MADE + 50)
    found = observation(first, second)
    rank = only(found)
    assert (rank.attempt, rank.state) == (int(MADE), "exited")
    assert found.has_more


def test_the_successor_is_told_once_the_exit_is_stored() -> None:
    first = pod(0, ended(1), phase="Failed", made_at=MADE)
    second = pod(0, running(), restarts=1, made_at=MADE + 50)
    stored = known(0, attempt=int(MADE), exit=Exit(code=1, at=NOW, reason="Error"))
    found = observe_gang(
        training(status=Status(ranks=[stored])), job(), [first, second], Options(), NOW
    )
    rank = only(found)
    assert (rank.state, rank.attempt, rank.restarts) == ("running", int(MADE) + 50, 1)
    assert not found.has_more


def test_a_held_pod_may_go_once_what_was_seen_of_it_is_stored() -> None:
    gone = pod(0, ended(1), phase="Failed", deleted_at=NOW - 20, has_finalizer=True)
    view = observation(gone, has_exit_finalizer=True)
    assert [p.rank for p in view.may_go] == [0]
    assert only(view).exit is not None
    stored = known(0, attempt=int(MADE), exit=Exit(code=1, at=NOW, reason="Error"))
    for status in (Status(ranks=[stored]), Status(removed_ranks=[stored])):
        found = observe_gang(training(status=status), job(), [gone], HOLDING, NOW)
        assert [p.rank for p in found.may_go] == [0]


def test_a_pod_that_ended_and_is_not_leaving_stays_for_its_log() -> None:
    over = pod(0, ended(0, "Completed"), phase="Succeeded", has_finalizer=True)
    stored = known(0, attempt=int(MADE), exit=Exit(code=0, at=NOW, reason="Completed"))
    found = observe_gang(training(status=Status(ranks=[stored])), job(), [over], HOLDING, NOW)
    assert found.may_go == []


def test_a_pod_whose_rank_ended_is_given_time_to_end_too() -> None:
    just_now = Pod(pod(0, ended(0, "Completed", at=NOW - 1)))
    assert just_now.is_ending(NOW)
    assert not just_now.is_ending(NOW + 30)  # its kubelet is gone
    assert not Pod(pod(0, ended(0, at=NOW - 1), phase="Succeeded")).is_ending(NOW)
    assert not Pod(pod(0, running())).is_ending(NOW)


def test_a_pod_taken_away_before_it_ran_leaves_nothing_to_tell() -> None:
    early = pod(0, None, phase="Pending", deleted_at=NOW - 20, node=None, has_finalizer=True)
    found = observation(early, has_exit_finalizer=True)
    assert not any(r.pod_name for r in found.observation.ranks)
    assert [p.rank for p in found.may_go] == [0]


def test_pods_kept_for_their_logs_are_no_ranks_any_more() -> None:
    over = pod(0, ended(0, "Completed"), phase="Succeeded")
    done = job(annotations=RELEASE["metadata"]["annotations"])
    found = observe_gang(training(), done, [over], Options(), NOW)
    assert (found.observation.ranks, found.observation.desired) == ([], None)


def test_a_silent_node_is_spoken_of_before_it_is_given_up() -> None:
    found = observation(pod(0, running(), conditions={"Ready": {"status": "False"}}))
    rank = only(found)
    assert (rank.state, rank.message) == ("running", "its node node-1 does not answer")
    assert found.lost == []


def test_a_rank_on_a_node_given_up_by_the_cluster_is_replaced() -> None:
    found = observation(pod(0, running(), deleted_at=NOW - 20, conditions=TAINTED))
    assert [p.rank for p in found.lost] == [0]


def test_the_scheduler_says_what_a_rank_waits_for() -> None:
    rank = only(observation(pod(0, None, phase="Pending", node=None, conditions=NO_ROOM)))
    assert rank.state == "waiting"
    assert rank.message == f"no capacity: {NO_ROOM['PodScheduled']['message']}"


@pytest.mark.parametrize("reason", WAITING)
def test_the_kubelet_says_what_a_rank_waits_for(reason: str) -> None:
    waits = {"waiting": {"reason": reason, "message": "because\n of this"}}
    rank = only(observation(pod(0, waits, phase="Pending")))
    assert rank.state == "waiting"
    assert rank.message
    assert "{" not in rank.message
    if "message" in WAITING[reason]:
        assert "because of this" in rank.message


def test_an_unknown_reason_is_passed_on_as_it_is() -> None:
    waits = {"waiting": {"reason": "SomethingNew", "message": "of later versions"}}
    rank = only(observation(pod(0, waits, phase="Pending")))
    assert rank.message == "SomethingNew of later versions"


def bad_image(rank: int, reason: str, made_at: float) -> Json:
    waits = {"waiting": {"reason": reason, "message": "not found"}}
    return pod(rank, waits, phase="Pending", made_at=made_at)


def test_an_image_that_cannot_be_pulled_is_waited_for_and_then_a_fault() -> None:
    early = [bad_image(r, "ImagePullBackOff", NOW - 10) for r in range(3)]
    late = [bad_image(r, "ImagePullBackOff", NOW - 400) for r in range(3)]
    assert observation(*early).observation.fault == ""
    assert "cannot be pulled" in observation(*late).observation.fault


def test_a_name_that_is_no_image_is_a_fault_at_once() -> None:
    assert (
        "is not an image name"
        in observation(*(bad_image(r, "InvalidImageName", NOW) for r in range(3))).observation.fault
    )


def test_one_bad_rank_is_no_fault_while_min_ranks_are_possible() -> None:
    assert (
        observation(
            bad_image(0, "InvalidImageName", NOW), pod(1, running()), pod(2, running())
        ).observation.fault
        == ""
    )


def test_half_a_gang_gives_way_after_its_time() -> None:
    holding = pod(0, running(), made_at=NOW - 700)
    waiting = pod(1, None, phase="Pending", node=None, conditions=NO_ROOM, made_at=NOW - 700)
    assert [p.rank for p in observation(holding, waiting).half] == [0]
    assert observation(holding, waiting, gang_timeout_s=None).half == []
    assert observation(holding, waiting, gang_timeout_s=800.0).half == []


def test_a_world_of_min_ranks_does_not_give_way() -> None:
    held = [pod(r, running(), made_at=NOW - 700) for r in (0, 1)]
    waiting = pod(2, None, phase="Pending", node=None, conditions=NO_ROOM, made_at=NOW - 700)
    assert observation(*held, waiting).half == []


def test_giving_way_and_coming_back_are_kept_in_the_job() -> None:
    gang = job(3)
    gang["metadata"]["resourceVersion"] = "7"  # the patch is refused if it has changed since
    left = Job(gang).give_way(NOW)
    assert left["spec"] == {"parallelism": 0}
    assert Job(gang).try_again() == {
        "metadata": {"resourceVersion": "7", "annotations": {"atoll.dev/yielded": None}},
        "spec": {"parallelism": 3},
    }


def test_a_suspended_gang_says_so() -> None:
    assert observation(gang=job(suspend=True)).observation.message == "the Job is suspended"
    queued = observation(gang=job(suspend=True), kueue_queue="research").observation.message
    assert "Kueue queue research" in queued


def test_a_quota_that_is_used_up_is_told() -> None:
    found = observe_gang(training(), job(), [], Options(), NOW, "exceeded quota: gpus")
    assert found.observation.message == "Kubernetes cannot create the pod: exceeded quota: gpus"


def test_no_job_is_no_wish() -> None:
    assert observe_gang(training(), None, [], Options(), NOW).observation.desired is None
    going = job()
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert Job(going).desired is None


def test_a_finished_job_supervises_nothing() -> None:
    gang = job()
    gang["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    assert Job(gang).end_reason == "Complete"
    assert not observation(gang=gang).observation.is_supervised
    assert observation(gang=gang).observation.is_closed
    assert not observation(gang=job()).observation.is_closed


def test_completions_change_together_with_parallelism_and_are_never_zero() -> None:
    gang = job(3)
    gang["metadata"]["resourceVersion"] = "7"
    desired = Job(gang).desired
    assert desired is not None
    grown = Job(gang).resize(type(desired)(version=2, size=5), NOW)
    assert grown["spec"] == {"completions": 5, "parallelism": 5}
    assert SHRINKS not in grown["metadata"]["annotations"]
    stopped = Job(gang).resize(type(desired)(version=3, size=0), NOW)
    assert stopped["spec"] == {"parallelism": 0}
    assert SHRINKS in stopped["metadata"]["annotations"]


def lives(rank: int, codes: list[int], is_running: bool, leaving: list[bool]) -> list[Json]:
    """The pods of one rank, one after another; the last one may still run."""
    made = []
    for at, code in enumerate(codes):
        start_ticks = MADE + at * 20
        ending = ended(code, at=start_ticks + 10)
        phase = "Failed" if code else "Succeeded"
        left = start_ticks + 8 if leaving[at % len(leaving)] else None
        made.append(
            pod(
                *(rank, ending),
                phase=phase,
                restarts=at,
                made_at=start_ticks,
                deleted_at=left,
                has_finalizer=True,
            )
        )
    if is_running:
        start_ticks = MADE + len(codes) * 20
        made.append(pod(rank, running(start_ticks + 1), restarts=len(codes), made_at=start_ticks))
    return made


LIVES = st.builds(
    lives,
    rank=st.integers(0, 3),
    codes=st.lists(st.sampled_from([1, 137, 143]), max_size=3),
    is_running=st.booleans(),
    leaving=st.lists(st.booleans(), min_size=1, max_size=3),
)


@given(
    st.lists(LIVES, max_size=4, unique_by=lambda pods: pods[0]["metadata"]["name"] if pods else "")
)
def test_every_exit_is_stored_before_its_pod_may_go(ranks: list[list[Json]]) -> None:
    """The controller's own plan, pass after pass, over a world that does not change."""
    pods = [p for mine in ranks for p in mine]
    stored: set[tuple[int, int]] = set()
    before = training(max_restarts=9)
    for _ in range(6):
        found = observe_gang(before, job(3), pods, HOLDING, NOW)
        status = plan(before, found.observation, Now.at(NOW)).status
        for rank in (*status.ranks, *status.removed_ranks):
            if rank.exit is not None:
                stored.add((rank.rank, rank.attempt))
        assert {(p.rank, p.attempt) for p in found.may_go} <= stored
        if not found.has_more and status.ranks == before.status.ranks:
            break
        before = training(max_restarts=9, status=status)
    assert stored == {(p.rank, p.attempt) for p in map(Pod, pods) if p.is_over}


def test_indexes_are_read_as_kubernetes_writes_them() -> None:
    gang = job() | {"status": {"failedIndexes": "1,3-5,9"}}
    assert Job(gang).indexes("completedIndexes") == set()
    assert Job(gang).indexes("failedIndexes") == {1, 3, 4, 5, 9}


def test_a_rank_that_the_job_gave_up_without_a_word_is_lost_and_told_once() -> None:
    gang = job()
    gang["status"] = {"failedIndexes": "1,7"}
    given = training()
    told = observe_gang(given, gang, [pod(0, running())], Options(), NOW)
    (rank,) = [r for r in told.observation.ranks if r.state == "exited"]
    assert rank.exit is not None
    assert (rank.rank, rank.exit.code, rank.exit.reason) == (1, None, "Deleted")
    stored = replace(given, status=plan(given, told.observation, Now.at(NOW)).status)
    assert stored.status.ranks[1].phase == "Failed"
    again = observe_gang(stored, gang, [pod(0, running())], Options(), NOW)
    assert [r.rank for r in again.observation.ranks if r.state == "exited"] == []


def test_a_pod_that_is_gone_is_told_of_before_its_successor() -> None:
    gone = pod(0, ended(7, at=NOW - 30), phase="Failed", deleted_at=NOW - 31)
    successor = pod(0, running(NOW - 20), restarts=1, made_at=NOW - 25)
    given = training(max_restarts=2, status=Status(ranks=[alive(0)]))
    for _ in range(3):
        view = observe_gang(given, job(), [successor], Options(), NOW, deleted=DeletedState([gone]))
        assert view.may_go == view.leaving == []
        given = replace(given, status=plan(given, view.observation, Now.at(NOW)).status)
    rank = given.status.ranks[0]
    assert (rank.phase, rank.restarts, rank.pod_name) == ("Running", 1, name_of(successor))
    assert rank.previous_exit is not None  # after the second look and after the third
    assert (rank.previous_exit.code, rank.previous_exit.reason) == (7, "Deleted")


def alive(rank: int) -> RankStatus:
    made = pod(rank)
    return known(rank, attempt=int(MADE), started_at=MADE + 5, pod_name=name_of(made))


def name_of(manifest: Json) -> str:
    return str(manifest["metadata"]["name"])


# What is known of a rank whose pod left no trace: (status of the Job, shrinks, code, reason)
UNREAD: list[tuple[Json, str, int | None, str]] = [
    ({}, "[]", None, "Deleted"),
    ({"failedIndexes": "0"}, "[]", None, "Deleted"),
    ({"completedIndexes": "0-1"}, "[]", 0, "Completed"),
    ({"completedIndexes": "1,2"}, "[]", None, "Deleted"),
    ({}, f"[[0, {NOW - 9}]]", None, "Stopped"),
    ({}, f"[[0, {MADE - 9}]]", None, "Deleted"),
]


@pytest.mark.parametrize(("status", "shrinks", "code", "reason"), UNREAD)
def test_an_exit_that_nobody_knows_is_unknown_and_never_zero(
    status: Json, shrinks: str, code: int | None, reason: str
) -> None:
    gang = job(annotations={SHRINKS: shrinks}) | {"status": status}
    given = training(max_restarts=2, status=Status(ranks=[alive(0)]))
    deleted = DeletedState([], frozenset({name_of(pod(0))}))
    view = observe_gang(given, gang, [], Options(), NOW, deleted=deleted)
    (told,) = [r for r in view.observation.ranks if r.rank == 0]
    assert told.exit is not None
    assert (told.exit.code, told.exit.reason) == (code, reason)
    assert told.exit.is_stopped == (reason == "Stopped")


def test_a_successor_has_not_exited_because_its_index_is_complete() -> None:
    """Nor has the one before it: the Job counts the index as a whole."""
    gang = job() | {"status": {"completedIndexes": "0"}}
    given = training(max_restarts=2, status=Status(ranks=[alive(0)]))
    successor = pod(0, ended(0, "Completed"), phase="Succeeded", restarts=1, made_at=NOW - 25)
    deleted = DeletedState([], frozenset({name_of(pod(0))}))
    view = observe_gang(given, gang, [successor], Options(), NOW, deleted=deleted)
    told = view.observation.ranks[0].exit
    assert told is not None
    assert (told.code, view.has_more) == (None, True)


def test_a_rank_that_has_a_pod_is_told_of_by_the_pod() -> None:
    gang = job()
    gang["status"] = {"failedIndexes": "1"}
    found = only(observation(pod(1, ended(3), phase="Failed"), gang=gang))
    assert found.exit is not None
    assert found.exit.code == 3


def test_a_pod_that_is_being_deleted_or_scaled_away_is_stopping() -> None:
    pods = [pod(0, running()), pod(1, running(), deleted_at=NOW - 1), pod(2, running())]
    ranks = observation(*pods, gang=job(2)).observation.ranks
    assert [(r.rank, r.state, r.is_stopping) for r in ranks] == [
        (0, "running", False),
        (1, "running", True),
        (2, "running", True),
    ]


def counted(status: Json, size: int = 3, spec_size: int = 3) -> Json:
    """A Job whose pods are gone: what it counts itself is all there is to know."""
    gang = job(size, completions=spec_size)
    gang["status"] = {"startTime": iso(MADE), "completionTime": iso(NOW - 60), **status}
    return gang


def ended_as(gang: Json, given: Training | None = None) -> Status:
    """The status of a process that comes after the pods are gone."""
    desired = Job(gang).desired
    given = given or training(
        world_size=WorldSize(min=1, target=3, max=3), status=Status(desired=desired)
    )
    return plan(
        given, observe_gang(given, gang, [], Options(), NOW).observation, Now.at(NOW)
    ).status


def test_a_gang_that_ended_well_is_known_by_what_its_job_counts() -> None:
    status = ended_as(counted({"completedIndexes": "0-2"}))
    assert status.phase == "succeeded"
    assert [(e.rank, e.exit_code, e.termination_reason) for e in status.rank_exits] == [
        (rank, 0, "Completed") for rank in range(3)
    ]
    assert {e.ended_at for e in status.rank_exits} == {NOW - 60}


def test_a_gang_that_was_cancelled_after_it_had_ended_well_has_ended_well() -> None:
    given = training(world_size=WorldSize(min=1, target=3, max=3), cancel=True)
    gang = counted({"completedIndexes": "0-2", "failedIndexes": ""}, size=0)
    given = replace(given, status=Status(desired=Job(gang).desired))
    assert ended_as(gang, given).phase == "succeeded"


def test_one_that_failed_beside_others_that_ended_well_is_the_one_that_failed() -> None:
    status = ended_as(counted({"completedIndexes": "0,2", "failedIndexes": "1"}))
    assert [r.phase for r in status.ranks] == ["Succeeded", "Failed", "Succeeded"]
    assert [e.exit_code for e in status.rank_exits] == [0, None, 0]


def test_what_a_stopped_job_counts_as_failed_was_stopped() -> None:
    """The Job controller counts the pods that it deletes as failed."""
    gang = counted({"completedIndexes": "0", "failedIndexes": "1-2"}, size=0)
    given = training(world_size=WorldSize(min=1, target=3, max=3), cancel=True)
    status = ended_as(gang, replace(given, status=Status(desired=Job(gang).desired)))
    assert (status.phase, [r.phase for r in status.ranks]) == (
        "cancelled",
        ["Succeeded", "Pending", "Pending"],
    )


def test_an_attempt_that_nobody_saw_counts_also_while_an_earlier_pod_is_there() -> None:
    earlier = pod(0, ended(3, at=NOW - 70), phase="Failed")
    stored = known(0, attempt=int(MADE), started_at=MADE + 5, exit=Exit(code=3, at=1, reason="E"))
    given = training(max_restarts=1, status=Status(ranks=[stored]))
    told = observe_gang(
        given, counted({"completedIndexes": "0"}), [earlier], Options(), NOW
    ).observation
    (rank,) = [r for r in told.ranks if r.rank == 0]
    assert rank.exit is not None
    assert (rank.exit.code, rank.attempt > stored.attempt) == (0, True)


def test_a_rank_whose_end_is_being_read_stays_as_it_was() -> None:
    given = training(status=Status(ranks=[alive(0)]))
    deleted = DeletedState(searching=frozenset({alive(0).pod_name}), searching_ranks=frozenset({1}))
    gang = counted({"failedIndexes": "1"})
    told = observe_gang(given, gang, [], Options(), NOW, deleted=deleted).observation
    assert [(r.rank, r.state) for r in told.ranks] == [
        (0, "running"),
        (1, "waiting"),
        (2, "waiting"),
    ]
    assert "reading how it ended" in told.ranks[0].message


def test_a_quota_is_told_by_the_ranks_that_wait_for_it_and_by_no_others() -> None:
    given = training()
    stuck = pod(1, {"waiting": {"reason": "ContainerCreating"}}, phase="Pending")
    quota = "exceeded quota: few"
    view = observe_gang(given, job(), [pod(0, running()), stuck], Options(), NOW, pod_error=quota)
    ranks = plan(given, view.observation, Now.at(NOW)).status.ranks
    assert quota in ranks[2].message
    assert [quota in rank.message for rank in ranks] == [False, False, True]
    assert ranks[1].message == "its container is being created"


@pytest.mark.parametrize(("before_s", "is_stopped"), [(3, False), (1.5, False), (0.5, True)])
def test_a_rank_that_ended_by_itself_before_a_scale_down_was_not_stopped(
    before_s: float, is_stopped: bool
) -> None:
    """A kubelet tells whole seconds, so that the last one before the stop may be after it."""
    gone = pod(2, ended(7, at=NOW - 20), phase="Failed", deleted_at=NOW - 19)
    rank = only(observation(gone, gang=shrunk(2, 2, NOW - 20 + before_s)))
    assert rank.exit is not None
    assert (rank.exit.is_stopped, rank.exit.reason == "Stopped") == (is_stopped, is_stopped)
