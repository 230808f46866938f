"""How ranks of a cluster meet: the training's own etcd, the mesh gate, names of ranks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.backends.kubernetes.executor import KubernetesBackend
from atoll.backends.kubernetes.options import KubernetesOptions
from atoll.backends.local.etcd_server import start_etcd, stop_etcd
from atoll.core.mesh import MeshState
from atoll.core.spec import BenchSpec, TrainingSpec, WorldSize
from atoll.core.status import DesiredState, Observation, Training
from atoll.mesh.etcd import EtcdKeys
from tests.e2e.kubernetes.conftest import Operator, Site, Space
from tests.e2e.kubernetes.control_plane import wait_for
from tests.e2e.kubernetes.images import ATOLL, ETCD

pytestmark = pytest.mark.usefixtures("pods")

Json = dict[str, Any]
OPTIONS = {"etcdImage": ETCD, "agentImage": ATOLL}

# Each rank writes its number where the environment says, and waits until it reads the other's.
EXCHANGE = """
import os, sys, time, urllib.request
place, rank = os.environ["BASILICA_RDZV_ENDPOINT"], int(os.environ["RANK"])
def ask(key, method="GET", data=None):
    request = urllib.request.Request(f"http://{place}/v2/keys/{key}", data=data, method=method)
    return urllib.request.urlopen(request, timeout=5).read().decode()
ask(f"said/{rank}", "PUT", f"value=hello-{rank}".encode())
while True:
    try:
        print(ask(f"said/{1 - rank}"), flush=True)
        break
    except urllib.error.HTTPError as error:
        assert error.code == 404, error
        time.sleep(0.1)
"""
GATE = "python -m atoll.mesh_wait --timeout 60; echo passed; sleep 1000 & wait"


@pytest.fixture
def start(start_operator: Callable[..., Operator]) -> Callable[..., Operator]:
    def begin(**more: Any) -> Operator:
        return start_operator("one", "--options", json.dumps({**OPTIONS, **more}))

    return begin


@pytest.fixture
def two_nodes(site: Site) -> None:
    if not site.is_own or len(site.nodes) < 2:
        pytest.skip("needs two nodes of its own, to cut the link between them")


def spread(space: Space, name: str, **spec: Any) -> None:
    """Two ranks on two nodes: a label decides, as nothing else would keep them apart."""
    for node in space.site.nodes:
        space.site.kubectl(
            "label", "node", node.name, f"atoll.dev/provider={node.name}", "--overwrite"
        )
    space.submit(
        name,
        image=ATOLL,
        topologySpread="provider-aware",
        worldSize={"min": 2, "target": 2, "max": 4},
        **spec,
    )


def ranks(space: Space) -> list[Json]:
    return [p for p in space.pods() if p["metadata"]["labels"].get("atoll.dev/part") == "rank"]


def log(space: Space, rank: int) -> str:
    (pod,) = [
        p
        for p in ranks(space)
        if p["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"] == str(rank)
    ]
    return space.kubectl("logs", pod["metadata"]["name"]).stdout


def mesh(status: Json) -> str:
    return (status.get("mesh") or {}).get("state", "")


def condition(status: Json, kind: str) -> Json:
    return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})


def etcd_pods(space: Space) -> list[Json]:
    return [p for p in space.pods() if p["metadata"]["labels"].get("atoll.dev/part") == "etcd"]


def etcd_pod(space: Space) -> Json:
    """The pod of the training's etcd; the newest, while one is being replaced."""
    return etcd_pods(space)[-1]


def is_answering(space: Space, before: str) -> bool:
    """Whether there is an etcd in another pod than that."""
    if not etcd_pods(space):
        return False
    pod = etcd_pod(space)
    is_ready = any(
        c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ())
    )
    return pod["metadata"]["name"] != before and is_ready


def keys(space: Space) -> set[str]:
    """The gate's keys, asked of the training's etcd by its pod's address."""
    return gate_keys(f"{etcd_pod(space)['status']['podIP']}:2379")


def gate_keys(endpoint: str) -> set[str]:
    return {k.removeprefix("basilica/") for k in everything(endpoint) if "mesh-" in k}


def everything(endpoint: str) -> dict[str, str]:
    async def ask() -> dict[str, str]:
        async with EtcdKeys(endpoint) as keys:
            return (await keys.list(""))[0]

    return asyncio.run(ask())


@contextlib.contextmanager
def cut(space: Space) -> Iterator[None]:
    """Packets between the two ranks vanish; everything else goes through."""
    a, b = (p["status"]["podIP"] for p in ranks(space))
    ways = [("from", a, "to", b, "blackhole"), ("from", b, "to", a, "blackhole")]
    for way in ways:
        subprocess.run(["ip", "rule", "add", *way], check=True)
    try:
        yield
    finally:
        for way in ways:
            subprocess.run(["ip", "rule", "del", *way], check=True)


def left_over(space: Space) -> list[str]:
    kinds = "deployments,services,replicasets,pods"
    found = space.json("get", kinds)["items"]
    parts = ("-etcd", "-bench")
    return [
        i["metadata"]["name"] for i in found if any(part in i["metadata"]["name"] for part in parts)
    ]


def test_ranks_meet_in_the_etcd_of_their_training(
    space: Space, start: Callable[..., Operator]
) -> None:
    start(agentImage=None)
    space.submit(
        "tiny",
        image=ATOLL,
        command=["python", "-c", EXCHANGE],
        worldSize={"min": 2, "target": 2, "max": 2},
        rendezvous={"backend": "etcd-v2"},
    )
    status = space.until_phase("tiny", "succeeded", timeout=90)
    assert status["rendezvousEndpoint"].endswith("-etcd:2379")
    assert "hello-1" in log(space, 0)
    assert "hello-0" in log(space, 1)
    wait_for("its etcd is gone", lambda: left_over(space) == [])


@pytest.mark.usefixtures("two_nodes")
def test_the_gate_opens_when_ranks_reach_each_other_and_a_cut_link_is_named(
    space: Space, start: Callable[..., Operator]
) -> None:
    operator = start()
    spread(space, "tiny", command=["sh", "-c", GATE], mesh=True)
    status = space.until("tiny", "mesh is ready", lambda s: mesh(s) == "Ready", timeout=90)
    nodes = {r["node"] for r in status["ranks"]}
    assert nodes == {"node-0", "node-1"}
    assert status["mesh"]["hosts"] == 2
    assert condition(status, "MeshCapable")["status"] == "True"
    # c10d stays at rank 0: only the gate is in etcd.
    assert "-0." in status["rendezvousEndpoint"]
    space.until_ready("tiny", 2)  # before that, kubectl has no log
    for rank in (0, 1):
        wait_for("the gate is passed", lambda rank=rank: "passed" in log(space, rank))
        assert "mesh-wait: OK" in log(space, rank)
    assert keys(space) == {"mesh-ready/node-0", "mesh-ready/node-1"}

    operator.kill()  # whoever leads next goes on from what is in etcd
    with cut(space):
        operator.start()
        a, b = sorted(f"rank-{r['rank']}@{r['node']}" for r in status["ranks"])
        # The first report of the two names its own direction, and the operator is a new one: for
        # as long as a mesh may take to come up it only waits.
        status = space.until(
            "tiny",
            "both directions are named",
            lambda s: (
                f"{a} <-> {b}" in condition(s, "DegradedMesh").get("message", "")
                and condition(s, "DegradedMesh")["status"] == "True"
            ),
            timeout=60,
        )
        assert mesh(status) == "Degraded"
        assert status["phase"] == "ready"
        wait_for(
            "the keys say so",
            lambda: keys(space) == {"mesh-degraded/node-0", "mesh-degraded/node-1"},
        )
    space.until("tiny", "healed", lambda s: mesh(s) == "Ready", timeout=60)
    assert condition(space.status("tiny"), "DegradedMesh")["status"] == "False"

    # Ranks that join are checked too; those that run keep their keys all the while.
    space.kubectl("scale", "training", "tiny", "--replicas=3")
    space.until_ready("tiny", 3, timeout=60)
    wait_for("the newcomer has passed", lambda: "mesh-wait: OK" in log(space, 2))
    assert keys(space) == {"mesh-ready/node-0", "mesh-ready/node-1"}
    restarts = {r.get("restarts", 0) for r in space.status("tiny")["ranks"]}
    assert restarts == {0}

    space.kubectl("patch", "training", "tiny", "--type=merge", "-p", '{"spec":{"cancel":true}}')
    space.until_phase("tiny", "cancelled")
    wait_for("its etcd is gone", lambda: left_over(space) == [])


@pytest.mark.usefixtures("two_nodes")
def test_an_etcd_that_is_killed_is_replaced_and_told_everything_again(
    space: Space, start: Callable[..., Operator]
) -> None:
    start()
    spread(space, "tiny", command=["sh", "-c", GATE], mesh=True)
    space.until("tiny", "mesh is ready", lambda s: mesh(s) == "Ready", timeout=90)
    before = etcd_pod(space)["metadata"]["name"]
    space.kubectl("delete", "pod", before, "--wait=false")
    wait_for("another etcd", lambda: is_answering(space, before), timeout=60)
    ready = {"mesh-ready/node-0", "mesh-ready/node-1"}
    wait_for("its keys are there again", lambda: keys(space) == ready, timeout=60)
    assert mesh(space.status("tiny")) == "Ready"
    assert {r.get("restarts", 0) for r in space.status("tiny")["ranks"]} == {0}


@pytest.mark.usefixtures("two_nodes")
def test_in_an_etcd_that_trainings_share_each_leaves_nothing_behind(
    space: Space, start: Callable[..., Operator], tmp_path: Path
) -> None:
    gateway = space.site.nodes[0].gateway
    server = start_etcd(tmp_path / "etcd", gateway)
    try:
        start(etcdEndpoint=server.endpoint)
        spread(space, "tiny", command=["sh", "-c", GATE], mesh=True)
        space.until("tiny", "mesh is ready", lambda s: mesh(s) == "Ready", timeout=90)
        assert left_over(space) == []
        assert gate_keys(server.endpoint) == {"mesh-ready/node-0", "mesh-ready/node-1"}
        space.kubectl("delete", "training", "tiny", "--timeout=60s")
        wait_for("no key is left", lambda: gate_keys(server.endpoint) == set())
        assert not everything(server.endpoint)
    finally:
        stop_etcd(server)


def test_a_look_costs_one_request_by_list_and_none_by_watch(space: Space, run: Any) -> None:
    """With an etcd, agents and a bench beside the ranks as without."""

    async def scene() -> None:
        cluster = space.site.connect()
        executor = KubernetesBackend(
            cluster, KubernetesOptions(namespace=space.name, etcd_image=ETCD, agent_image=ATOLL)
        )
        training = Training(
            namespace=space.name,
            uid=str(uuid.uuid4()),
            created_at=time.time(),
            spec=TrainingSpec(
                name="tiny",
                image=ATOLL,
                command=["sh", "-c", "sleep 1000 & wait"],
                world_size=WorldSize(min=2, target=2, max=2),
                mesh=True,
                bench=BenchSpec(mode="on-start", placement="strict"),
                executor="kubernetes",
                stop_grace_s=1,
            ),
        )

        async def until(test: Callable[[Observation], Any]) -> None:
            while True:
                observation = await executor.observe(training)
                if test(observation):
                    return
                for followup in observation.followups:
                    await executor.perform(training, followup)
                await asyncio.sleep(0.1)

        try:
            await executor.apply(training, DesiredState(version=1, size=2))
            await until(
                lambda observation: observation.mesh and observation.mesh.state is MeshState.READY
            )
            await executor.measure(training)
            await until(
                lambda observation: observation.bench and "made" not in observation.bench.message
            )
            before = sum(cluster.requests.values())
            for _ in range(5):
                await executor.observe(training)
            assert sum(cluster.requests.values()) - before == 5

            changes = executor.changes()
            await anext(changes)
            await until(lambda observation: executor._jobs.is_live and executor._pods.is_live)
            before = sum(cluster.requests.values())
            for _ in range(5):
                await executor.observe(training)
            assert sum(cluster.requests.values()) == before
            await changes.aclose()
        finally:
            await executor.release(training)
            await executor.purge(training)
            await executor.close()

    run(scene())
    wait_for("nothing is left", lambda: left_over(space) == [])


def test_an_operator_in_a_pod_lends_its_own_image_to_the_agents(
    space: Space, tmp_path: Path, start_operator: Callable[..., Operator]
) -> None:
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "me"},
        "spec": {"containers": [{"name": "operator", "image": ATOLL, "command": ["true"]}]},
    }
    space.kubectl("apply", "-f", "-", stdin=body)
    operator = start_operator("one", "--options", json.dumps({"etcdImage": ETCD}))
    operator.kill()
    operator.environment["POD_NAME"] = "me"
    operator.start()
    space.submit("tiny", command=["sleep", "1000"], mesh=True)
    (job,) = wait_for("the Job", lambda: space.json("get", "jobs")["items"])
    assert job["spec"]["template"]["spec"]["initContainers"][0]["image"] == ATOLL


def test_without_an_image_for_the_agents_a_mesh_is_refused_by_name(
    space: Space, operator: Operator
) -> None:
    space.submit("tiny", command=["true"], mesh=True)
    status = space.until_phase("tiny", "failed")
    assert status["reason"] == "ExecutorRefused"
    assert "agent_image" in status["message"]


def test_an_operator_killed_while_an_etcd_comes_up_goes_on(
    space: Space, start: Callable[..., Operator]
) -> None:
    operator = start()
    space.submit("tiny", image=ATOLL, command=["sh", "-c", GATE], mesh=True)

    def is_there(kind: str) -> bool:
        return bool(space.json("get", kind)["items"])

    for step in (
        lambda: is_there("jobs"),
        lambda: is_there("deployments"),
        lambda: is_answering(space, ""),
        lambda: ranks(space),
    ):
        wait_for("the next step", step, timeout=30)
        operator.kill()
        operator.start()
    space.until("tiny", "mesh is ready", lambda s: mesh(s) == "Ready", timeout=60)
    assert len(space.json("get", "jobs")["items"]) == 1
    assert {r.get("restarts", 0) for r in space.status("tiny")["ranks"]} == {0}

    # An etcd that somebody removes comes back, and the gate's keys with it.
    before = etcd_pod(space)["metadata"]["name"]
    space.kubectl("delete", "deployments", "--all")
    wait_for("another etcd", lambda: is_answering(space, before), timeout=60)
    wait_for("its keys are there again", lambda: keys(space), timeout=60)


def test_a_quota_that_keeps_the_etcd_away_is_what_the_training_waits_for(
    space: Space, start: Callable[..., Operator]
) -> None:
    space.kubectl("create", "quota", "none", "--hard=pods=0")
    start()
    space.submit("tiny", command=["true"], rendezvous={"backend": "etcd-v2"})
    space.until(
        "tiny",
        "the quota's words",
        lambda s: "waits for its etcd" in str(s) and "exceeded quota" in str(s),
    )
    space.kubectl("delete", "quota", "none")
    space.until_phase("tiny", "succeeded", timeout=100)
