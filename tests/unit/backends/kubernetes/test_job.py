"""What somebody has changed or deleted of a gang is seen, and put back."""

from __future__ import annotations

from atoll.backends.kubernetes.job import Job
from atoll.backends.kubernetes.names import QUEUE, YIELDED
from atoll.backends.kubernetes.pod import Pod
from atoll.core.status import DesiredState
from tests.unit.backends.kubernetes.kube import NOW, job, pod, running

DESIRED = DesiredState(version=1, size=3)


def test_a_job_of_another_size_gets_its_own_back() -> None:
    assert Job(job(3)).restore_size(DESIRED) == {}
    assert Job(job(3, parallelism=1)).restore_size(DESIRED)["spec"] == {
        "parallelism": 3,
        "completions": 3,
    }
    assert Job(job(3, parallelism=1)).restore_size(DesiredState(version=2, size=0))["spec"] == {
        "parallelism": 0
    }


def test_a_job_whose_size_another_decides_is_left_alone() -> None:
    gave_way = job(3, parallelism=0, annotations={YIELDED: str(NOW)})
    assert Job(gave_way).restore_size(DESIRED) == {}
    queued = job(3, parallelism=1)
    queued["metadata"]["labels"] = {QUEUE: "research"}
    assert Job(queued).restore_size(DESIRED) == {}


def test_a_pod_tells_which_configmap_it_misses() -> None:
    def stuck(message: str) -> Pod:
        state = {"waiting": {"reason": "CreateContainerConfigError", "message": message}}
        return Pod(pod(0, state, phase="Pending"))

    assert stuck('configmap "tiny-gpt-0" not found').misses("tiny-gpt-0")
    assert not stuck('secret "tokens" not found').misses("tiny-gpt-0")


def test_a_container_in_the_making_is_told_from_one_at_the_gate() -> None:
    creating = {"waiting": {"reason": "ContainerCreating"}}
    initializing = {"waiting": {"reason": "PodInitializing"}}
    assert Pod(pod(0, creating, phase="Pending")).is_being_created
    assert Pod(pod(0, initializing, phase="Pending", gate=initializing)).is_being_created
    assert not Pod(pod(0, initializing, phase="Pending", gate=running())).is_being_created
    assert not Pod(pod(0, creating, phase="Pending", node=None)).is_being_created
    assert not Pod(pod(0, creating, phase="Pending", deleted_at=NOW)).is_being_created
    assert not Pod(pod(0, running())).is_being_created
