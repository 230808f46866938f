"""What a look asks for, and that a look does nothing itself."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from atoll.backends.kubernetes.executor import KubernetesBackend
from atoll.backends.kubernetes.followups import (
    DropFinalizer,
    FailLostPods,
    GangWriter,
    KeepLogs,
    MarkStopped,
    OpenGate,
    PatchJob,
    RestoreObjects,
)
from atoll.backends.kubernetes.job import Job
from atoll.backends.kubernetes.names import FINALIZER, START, STOPPED, YIELDED
from atoll.backends.kubernetes.pod import Pod
from atoll.core.errors import Conflict
from atoll.core.status import Followup, Training
from tests.unit.backends.kubernetes.kube import (
    MADE,
    NO_ROOM,
    NOW,
    TAINTED,
    Json,
    Options,
    ended,
    job,
    observation,
    pod,
    running,
    training,
)


def asked(*pods: Json, gang: Json | None = None, **options: Any) -> list[str]:
    """The names of the chores, with the ranks or the reason in them."""
    return [
        _words(followup)
        for followup in observation(*pods, gang=gang, **options).observation.followups
    ]


def _words(followup: Followup) -> str:
    pods: Iterable[Pod] = getattr(followup, "pods", ())
    more = getattr(followup, "why", "") or " ".join(str(p.rank) for p in pods)
    return f"{type(followup).__name__} {more}".strip()


GONE = pod(0, ended(1), phase="Failed", deleted_at=NOW - 20)
STUCK = pod(
    2,
    {"waiting": {"reason": "CreateContainerConfigError", "message": 'configmap "NAME" not found'}},
    phase="Pending",
)
CASES: dict[str, tuple[list[Json], Json | None, list[str]]] = {
    "nothing is asked for where all is well": ([pod(r, running()) for r in range(3)], None, []),
    "the log of a pod that leaves": (
        [pod(0, running(), deleted_at=NOW)],
        None,
        ["KeepLogs 0"],
    ),
    "nobody holds a pod that has ended": ([GONE], None, ["KeepLogs 0"]),
    "a pod that another release holds may go": (
        [pod(0, running(), has_finalizer=True)],
        None,
        ["DropFinalizer 0"],
    ),
    "one on a lost node fails on record": (
        [pod(0, running(), deleted_at=NOW - 100, conditions=TAINTED)],
        None,
        ["FailLostPods 0"],
    ),
    "half a gang gives way": (
        [
            pod(0, running(), made_at=NOW - 700),
            pod(1, None, phase="Pending", node=None, conditions=NO_ROOM, made_at=NOW - 700),
        ],
        None,
        ["MarkStopped 0", "PatchJob half a gang gives way"],
    ),
    "one that gave way waits": ([], job(3, parallelism=0, annotations={YIELDED: str(NOW - 1)}), []),
    "and tries again": (
        [],
        job(3, parallelism=0, annotations={YIELDED: str(NOW - 61)}),
        ["PatchJob a gang that gave way tries again"],
    ),
    "a Job of another size gets its own back": (
        [],
        job(3, parallelism=1),
        ["PatchJob somebody has changed its size"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_look_asks_for(case: str) -> None:
    pods, gang, followups = CASES[case]
    assert asked(*pods, gang=gang) == followups


def test_a_gang_whose_configmap_is_gone_gets_it_back() -> None:
    name = KubernetesBackend(object(), Options())._object_key(training())[1]  # type: ignore[arg-type]
    STUCK["status"]["containerStatuses"][0]["state"]["waiting"]["message"] = (
        f'configmap "{name}" not found'
    )
    assert asked(STUCK) == ["RestoreObjects"]


# (pods, Job, seconds until the next look)
LATER: list[tuple[list[Json], Json | None, float | None]] = [
    ([pod(r, running()) for r in range(3)], None, None),
    ([pod(0, None, phase="Pending")], None, 30.0),
    ([pod(r, running(), deleted_at=NOW) for r in range(3)], None, 5.0),
    ([pod(r, running(), deleted_at=NOW - 100, conditions=TAINTED) for r in range(3)], None, 1.0),
    ([], job(3, parallelism=0, annotations={YIELDED: str(NOW - 50)}), 10.0),
    (
        [
            pod(0, ended(1, at=MADE + 5), phase="Failed"),
            pod(0, running(MADE + 10), made_at=MADE + 8, restarts=1),
            *[pod(r, running()) for r in (1, 2)],
        ],
        None,
        0.0,  # an exit is told first, the rank that runs after it next
    ),
]


@pytest.mark.parametrize(("pods", "gang", "again_in_s"), LATER)
def test_it_says_when_to_look_again(
    pods: list[Json], gang: Json | None, again_in_s: float | None
) -> None:
    assert observation(*pods, gang=gang).observation.again_in_s == again_in_s


class Patches:
    """A cluster that only takes patches, and an archive."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str, Any]] = []

    async def patch(
        self, kind: str, namespace: str, name: str, body: Json, *, type: str = "", part: str = ""
    ) -> Json:
        self.done.append((kind, part, body))
        return body

    def time(self) -> float:
        return NOW

    def capture(self, pod: Pod, ranks: int) -> None:
        self.done.append(("capture", "", pod.rank))

    async def settle(self, pods: Iterable[Pod], timeout_s: float) -> None:
        self.done.append(("settle", "", [pod.rank for pod in pods]))

    async def patch_job(self, training: Training, patch: Json) -> None:
        self.done.append(("jobs", "", patch))

    def perform(self, followup: Followup) -> list[tuple[str, str, Any]]:
        cluster: Any = self
        parts = (cluster, Options(), cluster, self.patch_job)
        self.done = []
        asyncio.run(GangWriter(*parts, is_owner=True).perform(training(), followup))
        return self.done


def test_each_followup_is_performed() -> None:
    perform, gone = Patches().perform, (Pod(GONE),)
    assert perform(KeepLogs(pods=gone, ranks=1)) == [("capture", "", 0)]
    ((kind, part, body),) = perform(FailLostPods(pods=gone))
    assert (kind, part, body["status"]["phase"]) == ("pods", "status", "Failed")
    held = (Pod(pod(0, running(), has_finalizer=True)),)
    assert perform(DropFinalizer(pods=held)) == [
        ("settle", "", [0]),
        ("pods", "", {"metadata": {"$deleteFromPrimitiveList/finalizers": [FINALIZER]}}),
    ]
    ((kind, part, body),) = perform(MarkStopped(pods=gone))
    assert (kind, part, body["status"]["conditions"][0]["type"]) == ("pods", "status", STOPPED)
    assert perform(OpenGate(pods=gone, together=2)) == [
        ("configmaps", "", {"data": {"open": "true"}}),
        ("pods", "", {"metadata": {"annotations": {START: "2"}}}),
    ]
    desired = observation().observation.desired
    assert desired is not None
    restored = perform(RestoreObjects(desired=desired, job=Job(job())))
    assert [kind for kind, _, _ in restored] == ["configmaps", "services"]
    assert perform(PatchJob(why="", patch={"a": 1})) == [("jobs", "", {"a": 1})]


def test_a_job_that_has_changed_since_the_look_is_left_to_the_next_one() -> None:
    async def refuse(training: Training, patch: Json) -> None:
        raise Conflict("it has changed")

    patches = Patches()
    patches.patch_job = refuse  # type: ignore[method-assign]
    assert patches.perform(PatchJob(why="", patch={})) == []
