"""The start gate of a gang: when it opens, who is let through, what is told of those who wait."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from atoll.backends.kubernetes.deleted_pods import DeletedState
from atoll.backends.kubernetes.followups import OpenGate, PatchJob
from atoll.backends.kubernetes.job import Job
from atoll.backends.kubernetes.names import GATE_COUNT, GATE_OPENED, START, YIELDED
from atoll.backends.kubernetes.pod import Pod
from atoll.backends.kubernetes.read import GangView, StartGate
from atoll.backends.kubernetes.render import render_job
from atoll.core.clock import Now
from atoll.core.phase import Phase
from atoll.core.plan import plan
from atoll.core.spec import WorldSize
from atoll.core.status import DesiredState, Status, Training
from tests.unit.backends.kubernetes.kube import (
    MADE,
    NO_ROOM,
    NOW,
    Json,
    Options,
    Resources,
    ended,
    job,
    observe_gang,
    only,
    pod,
    running,
    stamp,
    training,
)

INITIALIZING = {"waiting": {"reason": "PodInitializing"}}
GRACE_S = 30.0  # of a TrainingSpec that names none


def gated(*, started_at: float | None = NOW - 5, annotations: Json | None = None) -> Json:
    template = {"spec": {"initContainers": [{"name": "start-gate"}]}}
    made = job(annotations=annotations, template=template)
    if started_at is not None:
        made["status"] = {"startTime": stamp(started_at)}
    return made


def opened(**rest: Any) -> Json:
    return gated(annotations={GATE_OPENED: str(NOW - 1)}, **rest)


def waiting(rank: int, **rest: Any) -> Json:
    return pod(rank, INITIALIZING, phase="Pending", gate=running(), **rest)


def homeless(rank: int, **rest: Any) -> Json:
    return pod(rank, None, phase="Pending", node=None, conditions=NO_ROOM, **rest)


def turned_away(rank: int, code: int = 143, **rest: Any) -> Json:
    return pod(rank, INITIALIZING, phase="Failed", gate=ended(code), **rest)


def observation(gang: Json, *pods: Json, **spec: Any) -> GangView:
    """A world of min 2 and target 3."""
    return observe_gang(training(**spec), gang, pods, Options(), NOW)


def ranks(found: GangView) -> list[int]:
    return [to_start.rank for to_start in found.gate.to_start]


def test_it_opens_when_all_ranks_have_reached_it() -> None:
    found = observation(gated(), waiting(0), waiting(1), waiting(2))
    assert found.gate.is_due
    assert ranks(found) == [0, 1, 2]


def test_opening_it_is_asked_for_and_not_done_by_the_look() -> None:
    decision, told = observation(gated(), waiting(0), waiting(1), waiting(2)).observation.followups
    assert isinstance(decision, PatchJob)
    assert decision.patch == {"metadata": {"annotations": {GATE_OPENED: str(NOW), GATE_COUNT: "3"}}}
    assert isinstance(told, OpenGate)
    assert [pod.rank for pod in told.pods] == [0, 1, 2]


@pytest.mark.parametrize("how", ["cancel", "failing"])
def test_it_is_not_opened_for_ranks_that_are_about_to_be_stopped(how: str) -> None:
    changes: Json = (
        {"cancel": True} if how == "cancel" else {"status": Status(failing="RankFailed")}
    )
    found = observation(gated(), waiting(0), waiting(1), waiting(2), **changes)
    assert found.observation.followups == ()


def pass_over(given: Training, gang: Json | None, *pods: Json, now: float) -> Training:
    """One pass of the controller, as far as its status goes."""
    found = observe_gang(given, gang, pods, Options(is_controlled=True, is_start_gated=True), now)
    return replace(given, status=plan(given, found.observation, Now.at(now)).status)


def admitted(given: Training) -> str:
    return next(c.status for c in given.status.conditions if c.type == "Admitted")


def test_unschedulable_pods_are_not_admitted_and_use_up_no_deadline() -> None:
    given = training(deadline_s=60)
    given = pass_over(given, None, now=NOW)
    assert given.status.desired is not None  # pods must be there to wait
    gang = gated(started_at=NOW)
    for now in (NOW + 1, NOW + 62, NOW + 3600):
        given = pass_over(given, gang, *map(homeless, range(3)), now=now)
        assert (admitted(given), given.status.gate_opened_at) == ("False", None)
        assert (given.status.phase, given.status.failing) == (Phase.PENDING, "")
    opened_at = NOW + 4000
    gang = gated(started_at=NOW, annotations={GATE_OPENED: str(opened_at)})
    given = pass_over(given, gang, *map(waiting, range(3)), now=opened_at + 1)
    assert (admitted(given), given.status.gate_opened_at) == ("True", opened_at)
    ranks = [pod(rank, running(opened_at)) for rank in range(3)]
    assert pass_over(given, gang, *ranks, now=opened_at + 59).status.failing == ""
    given = pass_over(given, gang, *ranks, now=opened_at + 60)
    assert given.status.failing == "DeadlineExceeded"


def test_without_a_gate_ranks_are_let_go_when_the_first_one_runs() -> None:
    given = training(deadline_s=60)
    given = pass_over(given, job(), *map(homeless, range(3)), now=NOW)
    assert admitted(given) == "False"
    given = pass_over(given, job(), pod(0, running(NOW + 70)), homeless(1), now=NOW + 75)
    assert (admitted(given), given.status.gate_opened_at) == ("True", NOW + 70)


def deadlines(gang: Json, now: float = NOW, **options: Any) -> list[int]:
    ranks = [pod(rank, running(NOW - 1)) for rank in range(3)]
    found = observe_gang(training(deadline_s=60), gang, ranks, Options(**options), now)
    patches = [
        c.patch.get("spec", {}) for c in found.observation.followups if isinstance(c, PatchJob)
    ]
    return [p["activeDeadlineSeconds"] for p in patches if "activeDeadlineSeconds" in p]


def test_the_jobs_own_deadline_counts_from_the_same_instant() -> None:
    """A Job counts from when it could start; ranks were let go 99 s after that."""
    gang = opened(started_at=NOW - 100)
    assert deadlines(gang, deadline_margin_s=5) == [99 + 60 + 5]
    gang["spec"]["activeDeadlineSeconds"] = 164
    assert deadlines(gang, deadline_margin_s=5) == []
    closed = gated(started_at=NOW - 100)
    found = observe_gang(training(deadline_s=60), closed, [waiting(0)], Options(), NOW)
    assert found.observation.followups == ()
    made = render_job(
        training(deadline_s=60), DesiredState(version=1, size=3), Options(is_controlled=True)
    )
    assert "activeDeadlineSeconds" not in made["spec"]


def test_a_job_that_carries_its_deadline_may_be_over_before_a_rank_could_start() -> None:
    over = job(activeDeadlineSeconds=60)
    over["status"] = {
        "conditions": [{"type": "Failed", "status": "True", "reason": "DeadlineExceeded"}]
    }
    assert observation(over).observation.fault == "no rank could start within 60 s"
    assert observation(over, pod(0, running())).observation.fault == ""


def test_ranks_that_wait_say_so_and_do_not_run() -> None:
    found = observation(gated(), waiting(0), waiting(1), homeless(2))
    assert not found.gate.is_due
    assert ranks(found) == []
    told = {r.rank: (r.state, r.message.split(":")[0]) for r in found.observation.ranks}
    assert told == {0: ("waiting", "start gate"), 1: ("waiting", "start gate"),
                    2: ("waiting", "no capacity")}  # fmt: skip
    assert found.observation.ranks[0].message == "start gate: 2 of 3 ranks are ready to start"
    assert found.gate.due_in_s == GRACE_S - 5


# (when the Job could start, ranks at the gate, whether it opens)
GRACES = [
    (NOW - GRACE_S, 2, True),
    (NOW - GRACE_S, 1, False),
    (NOW - GRACE_S + 1, 2, False),
    (None, 2, False),  # still in a queue
]


@pytest.mark.parametrize(("started_at", "able", "is_due"), GRACES)
def test_min_ranks_start_once_the_grace_is_over(
    started_at: float | None, able: int, is_due: bool
) -> None:
    pods = [*map(waiting, range(able)), *map(homeless, range(able, 3))]
    found = observation(gated(started_at=started_at), *pods)
    assert found.gate.is_due is is_due
    assert ranks(found) == (list(range(able)) if is_due else [])


def test_a_pod_on_its_way_out_does_not_count() -> None:
    found = observation(gated(), waiting(0), waiting(1), waiting(2, deleted_at=NOW - 1))
    assert not found.gate.is_due


def test_a_gang_that_gives_way_is_not_let_through() -> None:
    gang = gated(started_at=NOW - 100, annotations={YIELDED: str(NOW - 1)})
    assert not observation(gang, waiting(0), waiting(1), waiting(2)).gate.is_due


def test_ranks_beyond_the_target_neither_count_nor_pass() -> None:
    world = training().spec.world_size
    smaller = type(world)(min=1, target=2, max=8)
    found = observation(gated(), waiting(0), homeless(1), waiting(2), world_size=smaller)
    assert not found.gate.is_due
    found = observation(gated(), waiting(0), waiting(1), waiting(2), world_size=smaller)
    assert ranks(found) == [0, 1]


def test_what_a_killed_operator_left_undone_is_done_by_the_next_look() -> None:
    """The decision is in the Job; one of three pods was told of it."""
    told = waiting(0, annotations={START: "true"})
    found = observation(opened(), told, waiting(1), waiting(2))
    assert not found.gate.is_due
    assert ranks(found) == [1, 2]


def test_ranks_are_told_how_many_the_gate_let_go() -> None:
    """Fewer than all: the number is decided once, kept in the Job, and told to each of them."""
    late = gated(started_at=NOW - 100)
    found = observation(late, waiting(0), waiting(1), homeless(2))
    decided, opening = found.observation.followups
    assert isinstance(decided, PatchJob)
    assert isinstance(opening, OpenGate)
    assert (decided.patch["metadata"]["annotations"][GATE_COUNT], opening.together) == ("2", 2)
    late["metadata"]["annotations"] |= decided.patch["metadata"]["annotations"]
    # The operator was killed; by the time of the next look a third rank is there.
    (again,) = observation(late, waiting(0), waiting(1), waiting(2)).observation.followups
    assert isinstance(again, OpenGate)
    assert (again.together, len(again.pods)) == (2, 3)


def test_the_number_reaches_a_rank_where_the_gate_may_let_fewer_than_all_go() -> None:
    def variable(least: int, *, is_gated: bool = True) -> Json | None:
        given = training(world_size=WorldSize(min=least, target=3, max=8))
        made = render_job(given, DesiredState(version=1, size=3), Options(is_start_gated=is_gated))
        env = made["spec"]["template"]["spec"]["containers"][0]["env"]
        return next((v for v in env if v["name"] == "ATOLL_STARTED_TOGETHER"), None)

    told = variable(2)
    assert told is not None
    assert told["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.annotations['{START}']"
    assert variable(3) == {"name": "ATOLL_STARTED_TOGETHER", "value": "3"}
    assert variable(2, is_gated=False) is None


def test_once_open_nothing_is_done_for_pods_that_passed() -> None:
    passed = [pod(r, running(), gate=ended(0, "Completed")) for r in range(3)]
    found = observation(opened(), *passed)
    assert (found.gate.is_due, ranks(found), found.gate.due_in_s) == (False, [], None)
    assert {r.state for r in found.observation.ranks} == {"running"}


def test_a_job_made_without_a_gate_has_none() -> None:
    assert observation(job(), pod(0, running())).gate == StartGate()


def test_a_gang_that_passed_the_gate_does_not_give_way() -> None:
    pods = [pod(0, running()), homeless(1, made_at=NOW - 700), homeless(2, made_at=NOW - 700)]
    assert [p.rank for p in observation(gated(), *pods).half] == [0]
    assert observation(opened(), *pods).half == []


def test_a_pod_stopped_at_the_gate_never_ran() -> None:
    found = observation(gated(), turned_away(1, deleted_at=NOW - 2))
    assert [r for r in found.observation.ranks if r.pod_name] == []
    evicted = observation(gated(), turned_away(1, reason="Evicted", message="low on memory"))
    assert [r for r in evicted.observation.ranks if r.pod_name] == []


def test_a_node_lost_at_the_gate_costs_a_restart_and_is_told() -> None:
    found = observation(gated(), waiting(1, deleted_at=NOW - 100))
    rank = only(found)
    assert (rank.state, rank.exit and rank.exit.reason) == ("exited", "HostLost")
    assert [p.rank for p in found.lost] == [1]
    marked = pod(1, INITIALIZING, phase="Failed", gate=running(), deleted_at=NOW - 100,
                 reason="NodeLost", message="the node does not answer")  # fmt: skip
    ended_so = only(observation(gated(), marked)).exit
    assert ended_so is not None
    assert (ended_so.code, ended_so.reason) == (None, "HostLost")


def test_a_rank_lost_after_the_gate_ended_when_it_was_given_up_not_at_the_gate() -> None:
    passed = ended(0, "Completed", at=MADE + 4)
    gone = pod(1, running(MADE + 5), gate=passed, deleted_at=NOW - 50)
    told = only(observation(opened(), gone)).exit
    assert told is not None
    assert (told.reason, told.at) == ("HostLost", NOW - 50)


def test_an_image_without_a_shell_is_told_with_what_to_do() -> None:
    said = 'exec: "sh": executable file not found in $PATH'
    broken = pod(0, INITIALIZING, phase="Failed", gate=ended(128, "StartError", said))
    told = only(observation(gated(), broken)).exit
    assert told is not None
    assert (told.code, told.reason) == (None, "StartGateFailed")
    for words in ("start gate", said, "ghcr.io/acme/train:1", "is_start_gated=False"):
        assert words in told.message


def test_an_image_that_cannot_be_pulled_is_told_before_the_gate_too() -> None:
    state = {"waiting": {"reason": "ErrImagePull", "message": "no such host"}}
    found = only(observation(gated(), pod(0, INITIALIZING, phase="Pending", gate=state)))
    assert "cannot be pulled: no such host" in found.message


def test_a_job_read_before_it_could_start_is_read_again() -> None:
    pods = [waiting(0), waiting(1), waiting(2)]
    assert not Job(gated(started_at=None)).is_current(map(Pod, pods))
    assert Job(gated()).is_current(map(Pod, pods))
    assert Job(job()).is_current(map(Pod, pods))


def test_the_gate_asks_for_no_more_than_the_rank_and_keeps_its_class_of_service() -> None:
    needs = Resources(cpu="2", memory="4Gi", gpu_count=1)
    given = training(resources=needs)
    made = render_job(given, DesiredState(version=1, size=3), Options(is_start_gated=True))
    template = made["spec"]["template"]["spec"]
    (gate,), (rank,) = template["initContainers"], template["containers"]
    assert gate["image"] == rank["image"]
    amounts = {"cpu": "2", "memory": "4Gi"}
    assert gate["resources"] == {"requests": amounts, "limits": amounts}
    assert rank["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_the_grace_is_counted_from_when_the_job_could_start() -> None:
    """Not from when the training was made, which may have been long before."""
    assert MADE + GRACE_S < NOW
    assert not observation(
        gated(started_at=NOW - 1), waiting(0), waiting(1), homeless(2)
    ).gate.is_due


def test_a_gang_whose_other_pods_a_quota_forbids_gives_its_room_back() -> None:
    to_start = waiting(0, made_at=NOW - 700)
    refused = "exceeded quota: pods=1"
    assert [
        p.rank for p in observe_gang(training(), gated(), [to_start], Options(), NOW, refused).half
    ] == [0]
    assert (
        observe_gang(training(), gated(), [to_start], Options(), NOW).half == []
    )  # they are just being made
    early = waiting(0, made_at=NOW - 100)
    assert observe_gang(training(), gated(), [early], Options(), NOW, refused).half == []


def test_a_rank_let_through_and_stopped_before_its_kubelet_spoke_may_have_run() -> None:
    """Its exit would be lost if the verdict did not wait for that word."""
    passed = ended(0, "Completed", at=NOW - 2)
    silent = pod(1, INITIALIZING, phase="Pending", gate=passed, deleted_at=NOW - 1)
    view = observation(opened(), silent)
    assert view.observation.unsettled == 1
    assert view.observation.again_in_s is not None
    late = pod(1, INITIALIZING, phase="Pending", gate=passed, deleted_at=NOW - 60)
    assert observation(opened(), late).observation.unsettled == 0
    gone = observe_gang(training(), opened(), [], Options(), NOW, deleted=DeletedState([silent]))
    assert gone.observation.unsettled == 0  # nothing more will be heard of it


def test_a_rank_stopped_at_a_shut_gate_or_turned_away_never_ran() -> None:
    assert observation(gated(), waiting(1, deleted_at=NOW - 1)).observation.unsettled == 0
    assert observation(opened(), turned_away(1, deleted_at=NOW - 1)).observation.unsettled == 0
