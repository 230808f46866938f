"""How ranks of a cluster meet: the training's own etcd, the mesh gate, names of ranks."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

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
def apart(site: Site) -> None:
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


def keys(space: Space) -> set[str]:
    """The gate's keys, asked of the training's etcd by its pod's address."""
    (pod,) = [p for p in space.pods() if p["metadata"]["labels"].get("atoll.dev/part") == "etcd"]
    place = f"http://{pod['status']['podIP']}:2379/v2/keys/basilica?recursive=true"
    import urllib.request

    with urllib.request.urlopen(place, timeout=5) as answer:
        found = json.load(answer)["node"]
    return {
        n["key"].removeprefix("/basilica/")
        for d in found.get("nodes", ())
        for n in d.get("nodes", ())
    }


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


@pytest.mark.usefixtures("apart")
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
    for rank in (0, 1):
        wait_for("the gate is passed", lambda rank=rank: "passed" in log(space, rank))
        assert "mesh-wait: OK" in log(space, rank)
    assert keys(space) == {"mesh-ready/node-0", "mesh-ready/node-1"}

    operator.kill()  # whoever leads next goes on from what is in etcd
    with cut(space):
        operator.start()
        status = space.until("tiny", "degraded", lambda s: mesh(s) == "Degraded", timeout=60)
        told = condition(status, "DegradedMesh")
        assert told["status"] == "True"
        pair = sorted(f"rank-{r['rank']}@{r['node']}" for r in status["ranks"])
        assert f"{pair[0]} <-> {pair[1]}" in told["message"]
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
