"""When a gang is looked at again, what is done for its Job, and whose fault an exit was."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.backends.kubernetes import read
from atoll.backends.kubernetes.executor import KubernetesBackend
from atoll.backends.kubernetes.followups import RestoreObjects
from atoll.backends.kubernetes.job import Job
from atoll.backends.kubernetes.names import SHRINKS, UID
from atoll.backends.kubernetes.pod import CLOCK_SKEW_S, Pod
from atoll.backends.kubernetes.read import LEAVING_EVERY_S, LOST_EVERY_S, WAITING_EVERY_S
from atoll.backends.kubernetes.render import gang_name
from atoll.core.status import Status
from tests.unit.backends.kubernetes.kube import (
    MADE,
    NOW,
    TAINTED,
    Json,
    Options,
    Source,
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


def everybody_runs() -> list[Json]:
    return [pod(rank, running()) for rank in range(3)]


def test_a_gang_that_runs_is_not_looked_at_before_something_changes() -> None:
    assert observation(*everybody_runs()).observation.again_in_s is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, WAITING_EVERY_S),
        ({"image_timeout_s": 7.0}, 7.0),
        ({"gang_timeout_s": 9.0}, 9.0),
        ({"gang_timeout_s": None}, WAITING_EVERY_S),
    ],
)
def test_a_gang_of_which_ranks_wait_is_looked_at_again_for_its_timeouts(
    options: Json, expected: float
) -> None:
    assert observation(*everybody_runs()[:2], **options).observation.again_in_s == expected


def test_a_pod_that_leaves_is_looked_at_again_and_one_that_is_lost_sooner() -> None:
    leaving = pod(2, running(), deleted_at=NOW - 1, has_finalizer=True)
    assert observation(*everybody_runs()[:2], leaving).observation.again_in_s == LEAVING_EVERY_S
    lost = pod(2, running(), deleted_at=NOW - 1, conditions=TAINTED, has_finalizer=True)
    assert observation(*everybody_runs()[:2], lost).observation.again_in_s == LOST_EVERY_S


def stuck(rank: int) -> Json:
    message = f'configmap "{gang_name(training())}" not found'
    state = {"waiting": {"reason": "CreateContainerConfigError", "message": message}}
    return pod(rank, state, phase="Pending")


def test_objects_that_a_pod_misses_are_made_again() -> None:
    followups = observation(*everybody_runs()[:2], stuck(2)).observation.followups
    assert [type(followup) for followup in followups] == [RestoreObjects]
    assert observation(*everybody_runs()).observation.followups == ()


def test_objects_with_code_are_made_again_only_when_the_code_is_at_hand() -> None:
    """It is loaded while the controller applies a wish."""
    script = Source(kind="script", content=b"pass", filename="t.py")
    shipped = training(source=script, command=None)
    followups = observe_gang(shipped, job(), [stuck(2)], Options(), NOW).observation.followups
    assert RestoreObjects not in [type(followup) for followup in followups]


def test_a_rank_that_runs_on_a_node_that_answers_has_nothing_to_say() -> None:
    assert {rank.message for rank in observation(*everybody_runs()).observation.ranks} == {""}


SHRUNK = job(2, annotations={SHRINKS: f"[[2, {NOW - 20}]]"})


@pytest.mark.parametrize(
    ("code", "before_s", "is_stopped"),
    [
        (1, 1.0, True),  # whole seconds are all that the cluster tells
        (1, 4.0, False),
        (137, 4.0, True),  # a signal is what a deletion sends, and clocks differ
        (143, 4.0, True),
        (137, CLOCK_SKEW_S + 1.0, False),
    ],
)
def test_an_end_just_before_the_stop_is_the_stops_only_where_a_signal_ended_it(
    code: int, before_s: float, is_stopped: bool
) -> None:
    gone = pod(2, ended(code, at=NOW - 20 - before_s), phase="Failed", deleted_at=NOW - 20)
    rank = only(observation(gone, gang=SHRUNK))
    assert rank.exit is not None
    assert rank.exit.is_stopped == is_stopped


def test_a_rank_that_ended_and_is_not_leaving_was_not_stopped() -> None:
    stays = pod(2, ended(1, at=NOW - 15), phase="Failed")
    rank = only(observation(stays, gang=SHRUNK))
    assert rank.exit is not None
    assert not rank.exit.is_stopped


def test_a_rank_below_the_size_that_somebody_deletes_is_not_excused_by_a_shrink() -> None:
    gone = pod(1, ended(143, at=NOW - 15), phase="Failed", deleted_at=NOW - 16)
    rank = only(observation(gone, gang=SHRUNK))
    assert rank.exit is not None
    assert (rank.exit.is_stopped, rank.exit.reason) == (False, "Deleted")


@given(st.data())
def test_a_steady_pod_is_reported_as_any_other_is(data: st.DataObject) -> None:
    """The short way for pods that just run reports what the long way reports."""
    flags = st.booleans()
    manifests = [
        pod(
            rank,
            running() if data.draw(flags) else ended(1),
            deleted_at=NOW - 1 if data.draw(flags) else None,
            has_finalizer=data.draw(flags),
            restarts=data.draw(st.integers(0, 2)),
            conditions={"Ready": {"status": data.draw(st.sampled_from(["True", "False"]))}},
            gate={"terminated": {"exitCode": 0}} if data.draw(flags) else None,
        )
        for rank in data.draw(st.lists(st.integers(0, 4), max_size=6))
    ]
    for manifest in manifests:
        manifest["status"]["hostIP"] = data.draw(st.sampled_from(["10.0.0.1", "10.0.0.2"]))
    subject = training(status=Status(ranks=[known(0, attempt=int(MADE), pod_name="x")]))
    gang, silent = job(data.draw(st.integers(0, 5))), {"10.0.0.2"}
    short, long = ([Pod(manifest) for manifest in manifests] for _ in range(2))
    for each in long:
        each.is_steady = False
    for _ in range(2):  # the second time from what the first has kept
        views = [
            read.observe_gang(subject, gang and Job(gang), pods, Options(), NOW, silent=silent)
            for pods in (short, long)
        ]
        assert views[0].observation.ranks == views[1].observation.ranks
        assert views[0].observation.again_in_s == views[1].observation.again_in_s
        names = [[p.name for p in view.leaving + view.lost + view.may_go] for view in views]
        assert names[0] == names[1]


def test_a_pod_is_parsed_once_however_often_it_is_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = []
    parse = Pod.__init__

    def count(self: Pod, manifest: Json) -> None:
        parsed.append(manifest)
        parse(self, manifest)

    monkeypatch.setattr(Pod, "__init__", count)

    async def work() -> None:
        cluster: Any = SimpleNamespace(time=lambda: NOW)
        backend = KubernetesBackend(cluster, Options(kubelet_port=None))
        for mirror in (backend._jobs, backend._pods):
            mirror.is_live = True
        gang = job()
        gang["metadata"] |= {"labels": {UID: training().uid}, "name": gang_name(training())}
        backend._jobs.put(gang)
        for rank in range(3):
            manifest = pod(rank, running())
            manifest["metadata"]["labels"] = {UID: training().uid}
            backend._pods.put(manifest)
        for _ in range(5):
            observation = await backend.observe(training())
            assert [r.state for r in observation.ranks] == ["running"] * 3

    asyncio.run(work())
    assert len(parsed) == 3
