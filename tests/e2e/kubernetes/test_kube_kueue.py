"""Quota and gang admission by a real Kueue, on a cluster that has one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.kubernetes.conftest import Operator, Space

pytestmark = pytest.mark.usefixtures("pods")

FOREVER = ["sh", "-c", 'trap "exit 7" TERM; sleep 1000 & wait']


@pytest.fixture
def queue(space: Space, start_operator: Callable[..., Operator]) -> Iterator[str]:
    """A queue with room for four ranks, and an operator that uses it."""
    versions = "jsonpath={.spec.versions[*].name}"
    crd = ("get", "crd", "workloads.kueue.x-k8s.io", "--ignore-not-found", "-o", versions)
    found = space.site.kubectl(*crd).stdout.split()
    if not found:
        pytest.skip("Kueue is not installed in this cluster")
    api = f"kueue.x-k8s.io/{found[-1]}"
    name = space.name
    quota = [{"name": "cpu", "nominalQuota": "400m"}]
    group = {"coveredResources": ["cpu"], "flavors": [{"name": name, "resources": quota}]}
    space.site.apply(
        {"apiVersion": api, "kind": "ResourceFlavor", "metadata": {"name": name}},
        {
            "apiVersion": api,
            "kind": "ClusterQueue",
            "metadata": {"name": name},
            "spec": {"namespaceSelector": {}, "resourceGroups": [group]},
        },
        {
            "apiVersion": api,
            "kind": "LocalQueue",
            "metadata": {"name": "research", "namespace": name},
            "spec": {"clusterQueue": name},
        },
    )
    start_operator("one", "--options", json.dumps({"kueueQueue": "research"}))
    yield "research"
    space.kubectl("delete", "trainings", "--all", "--timeout=60s", is_checked=False)
    space.site.kubectl("delete", "clusterqueue", name, "--wait=false")


def submit(space: Space, name: str, target: int) -> None:
    world = {"min": 1, "target": target, "max": 6}
    space.submit(name, command=FOREVER, worldSize=world, resources={"cpu": "100m"})


@pytest.mark.usefixtures("queue")
def test_a_training_waits_for_quota_and_is_resized_without_a_restart(space: Space) -> None:
    submit(space, "first", 2)
    space.until_ready("first", 2)
    pods = {p["metadata"]["uid"] for p in space.pods()}
    space.kubectl("scale", "training", "first", "--replicas=3")
    space.until_ready("first", 3)
    submit(space, "second", 2)
    words = "waits in the Kueue queue research until the whole gang fits"
    space.until(
        "second", "it is queued", lambda s: {r.get("message") for r in s["ranks"]} == {words}
    )
    space.kubectl("scale", "training", "first", "--replicas=2")
    space.until_ready("second", 2)
    assert pods <= {p["metadata"]["uid"] for p in space.pods()}


@pytest.mark.usefixtures("queue")
def test_ranks_that_wait_for_more_quota_say_so(space: Space) -> None:
    submit(space, "first", 2)
    space.until_ready("first", 2)
    space.kubectl("scale", "training", "first", "--replicas=6")
    status = space.until(
        "first", "the new ones wait", lambda s: "kueue" in str(s["ranks"][-1].get("message"))
    )
    assert status["world"]["ready"] == 2
    assert status["phase"] == "ready"


@pytest.mark.usefixtures("queue")
def test_a_training_whose_quota_is_taken_back_goes_on_when_it_is_let_in_again(
    space: Space,
) -> None:
    submit(space, "first", 2)
    space.until_ready("first", 2)
    (workload,) = space.json("get", "workloads")["items"]
    name = workload["metadata"]["name"]
    space.kubectl("patch", "workload", name, "--type=merge", "-p", '{"spec":{"active":false}}')
    status = space.until("first", "it is held", lambda s: s["world"]["ready"] == 0)
    assert status["phase"] == "pending"
    space.kubectl("patch", "workload", name, "--type=merge", "-p", '{"spec":{"active":true}}')
    status = space.until_ready("first", 2)
    assert {r.get("restarts", 0) for r in status["ranks"]} == {0}
