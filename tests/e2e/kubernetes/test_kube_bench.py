"""The link bench on a cluster: two pods that measure each other, where the user wants them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.kubernetes.conftest import Operator, Site, Space
from tests.e2e.kubernetes.control_plane import wait_for
from tests.e2e.kubernetes.images import ATOLL

pytestmark = pytest.mark.usefixtures("pods", "provider_labels")

Json = dict[str, Any]
FOREVER = ["sh", "-c", "sleep 1000 & wait"]
TWO = {"min": 2, "target": 2, "max": 2}
ONE = {"min": 1, "target": 1, "max": 2}


@pytest.fixture
def provider_labels(site: Site) -> None:
    if not site.is_own or len(site.nodes) < 2:
        pytest.skip("needs two nodes of its own, to choose where ranks go")
    for node in site.nodes:
        site.kubectl("label", "node", node.name, f"atoll.dev/provider={node.name}", "--overwrite")


@pytest.fixture
def operator(start_operator: Callable[..., Operator]) -> Operator:
    return start_operator("one", "--options", json.dumps({"agentImage": ATOLL}))


@contextlib.contextmanager
def cordoned(site: Site, *names: str) -> Iterator[None]:
    for name in names:
        site.kubectl("cordon", name)
    try:
        yield
    finally:
        for name in names:
            site.kubectl("uncordon", name)


def submit(space: Space, name: str, world: Json, **bench: Any) -> None:
    space.submit(
        name,
        command=FOREVER,
        worldSize=world,
        topologySpread="provider-aware",
        bench={"mode": "on-start", **bench},
    )


def until_bench(space: Space, name: str, phase: str) -> Json:
    status = space.until(
        name, f"bench {phase}", lambda s: s.get("bench", {}).get("phase") == phase, timeout=90
    )
    found: Json = status["bench"]
    return found


def is_cleared(space: Space) -> bool:
    found = space.json("get", "jobs,services,pods")["items"]
    return not any("-bench" in item["metadata"]["name"] for item in found)


def hosts(space: Space, name: str) -> set[str]:
    return {rank["node"] for rank in space.status(name)["ranks"]}


def test_the_workers_own_link_is_measured_whoever_is_killed(
    space: Space, operator: Operator
) -> None:
    submit(space, "tiny", TWO, placement="strict")
    until_bench(space, "tiny", "Running")
    operator.kill()
    operator.start()
    found = until_bench(space, "tiny", "Succeeded")
    result = found["result"]
    assert {result["probeNodeA"], result["probeNodeB"]} == {"node-0", "node-1"}
    assert "isWorkerPair" not in result  # the default: it is
    assert result["busbwGbpsP50"] > 0
    assert result["sizeBytesSwept"][0] == 4096
    assert result["latencyUsAt1Mib"] > 0
    wait_for("it is cleared away", lambda: is_cleared(space))
    assert space.until_ready("tiny", 2)["phase"] == "ready"


def test_preferred_falls_back_to_another_node_and_says_so(space: Space, operator: Operator) -> None:
    submit(space, "tiny", ONE)
    found = until_bench(space, "tiny", "Succeeded")
    assert {found["result"]["probeNodeA"], found["result"]["probeNodeB"]} == {"node-0", "node-1"}
    assert found["result"]["isWorkerPair"] is False
    assert "not both hosts of this training's ranks" in found["message"]


def test_strict_waits_for_a_second_host_in_the_schedulers_words(
    space: Space, operator: Operator
) -> None:
    submit(space, "tiny", ONE, placement="strict")
    status = space.until(
        "tiny",
        "the scheduler's words",
        lambda s: "no capacity: 0/2 nodes" in s.get("bench", {}).get("message", ""),
    )
    assert status["bench"]["phase"] == "Pending"
    assert "affinity" in status["bench"]["message"]
    assert space.until_ready("tiny", 1)["phase"] == "ready"
    # A second rank on the other node makes it a pair.
    space.kubectl("scale", "training", "tiny", "--replicas=2")
    found = until_bench(space, "tiny", "Succeeded")
    assert {found["result"]["probeNodeA"], found["result"]["probeNodeB"]} == hosts(space, "tiny")


def test_where_there_is_one_node_it_is_measured_with_itself_and_called_that(
    space: Space, operator: Operator
) -> None:
    with cordoned(space.site, "node-1"):
        submit(space, "tiny", ONE)
        found = until_bench(space, "tiny", "Succeeded")
    assert "node-0 with itself (loopback" in found["message"]
    assert found["result"]["probeNodeA"] == found["result"]["probeNodeB"] == "node-0"


def test_a_floor_that_is_not_met_starts_no_rank(space: Space, operator: Operator) -> None:
    submit(space, "tiny", TWO, requireGbps=100_000.0)
    status = space.until_phase("tiny", "failed", timeout=90)
    assert status["reason"] == "LinkTooSlow"
    assert "bench_require_gbps=100000" in status["message"]
    assert status["bench"]["result"]["isWorkerPair"] is False
    assert space.json("get", "jobs")["items"] == [] or is_cleared(space)
    wait_for("it is cleared away", lambda: is_cleared(space))
    assert space.pods() == []


def test_a_floor_that_is_met_lets_ranks_start(space: Space, operator: Operator) -> None:
    submit(space, "tiny", TWO, requireGbps=0.001)
    status = space.until_ready("tiny", 2, timeout=90)
    assert status["bench"]["phase"] == "Succeeded"


def test_a_training_that_ends_first_leaves_no_bench_behind(
    space: Space, operator: Operator
) -> None:
    space.submit(
        "tiny",
        command=["sh", "-c", "sleep 2"],
        worldSize=ONE,
        bench={"mode": "on-start", "placement": "strict"},
    )
    status = space.until_phase("tiny", "succeeded")
    assert status["bench"]["phase"] == "Skipped"
    wait_for("it is cleared away", lambda: is_cleared(space))
