"""Nodes that fall silent or are removed, and gangs that do not fit: what the cluster does then."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.kubernetes.conftest import Operator, Site, Space, is_ready
from tests.e2e.kubernetes.control_plane import wait_for
from tests.e2e.kubernetes.nodes import Node
from tests.e2e.kubernetes.room import give_back, slot, take_room

pytestmark = pytest.mark.usefixtures("pods")

Json = dict[str, Any]
FOREVER = ["sh", "-c", 'trap "exit 7" TERM; echo rank $RANK; sleep 1000 & wait']


@pytest.fixture
def spare(site: Site, spare_node: Callable[[], Node]) -> Iterator[Node]:
    if not site.is_own:
        pytest.skip("killing a node of a cluster that others use is no test")
    node = spare_node()
    yield node
    node.stop()
    site.kubectl("delete", "node", node.name, "--wait=false", is_checked=False)


def spread(space: Space) -> None:
    """Two ranks over the first node and the spare one."""
    for node in space.site.nodes[1:]:
        space.site.kubectl("cordon", node.name)
    try:
        space.submit("tiny", command=FOREVER, maxRestarts=2)
        space.until_ready("tiny", 2)
    finally:
        for node in space.site.nodes[1:]:
            space.site.kubectl("uncordon", node.name)


def test_a_node_that_falls_silent_costs_its_ranks_one_restart(
    space: Space, spare: Node, start_operator: Callable[..., Operator]
) -> None:
    start_operator("one", "--options", '{"lostNodeS": 2}')
    spread(space)
    on_spare = {p["metadata"]["name"] for p in space.pods() if p["spec"]["nodeName"] == spare.name}
    if not on_spare:
        pytest.fail("the scheduler put no rank on the spare node")
    spare.kill_kubelet()
    status = space.until(
        "tiny",
        "all ranks run elsewhere",
        lambda s: s["world"]["ready"] == 2 and all(r["node"] != spare.name for r in s["ranks"]),
        timeout=90,
    )
    told = [e["message"] for e in status["events"] if e["reason"] == "RankRestarting"]
    assert len(told) == len(on_spare)
    assert all("HostLost" in text and "does not answer" in text for text in told)
    others = [r for r in status["ranks"] if r.get("restarts", 0) == 0]
    assert len(others) == 2 - len(on_spare)


def test_a_node_that_falls_silent_is_told_of_before_the_cluster_notices(
    space: Space, spare: Node, operator: Operator
) -> None:
    spread(space)
    (rank,) = (r["rank"] for r in space.status("tiny")["ranks"] if r["node"] == spare.name)

    def told(status: Json) -> str:
        return str(status["ranks"][rank].get("message", ""))

    with cut_off(spare):
        space.until("tiny", "it is told of", lambda s: spare.name in told(s))
        assert is_ready(space.site, spare.name)
    status = space.until("tiny", "it is back", lambda s: not told(s))
    assert [r.get("restarts", 0) for r in status["ranks"]] == [0, 0]


@contextlib.contextmanager
def cut_off(node: Node) -> Iterator[None]:
    """Nothing that is sent to the node's kubelet arrives; it still reports to the cluster."""
    rule = ["-d", node.address, "-p", "tcp", "--dport", "10250", "-j", "DROP"]
    subprocess.run(["iptables", "-I", "OUTPUT", *rule], check=True)
    try:
        yield
    finally:
        subprocess.run(["iptables", "-D", "OUTPUT", *rule], check=True)


@pytest.mark.timeout(240)  # the cluster waits up to 80 s before it gives its pods up
def test_a_node_that_is_removed_costs_its_ranks_one_restart(
    space: Space, spare: Node, start_operator: Callable[..., Operator]
) -> None:
    start_operator("one", "--options", '{"lostNodeS": 2}')
    spread(space)
    on_spare = [p for p in space.pods() if p["spec"]["nodeName"] == spare.name]
    assert on_spare
    spare.kill_kubelet()
    space.site.kubectl("delete", "node", spare.name)
    status = space.until(
        "tiny",
        "all ranks run elsewhere",
        lambda s: s["world"]["ready"] == 2 and all(r["node"] != spare.name for r in s["ranks"]),
        timeout=180,
    )
    told = [e["message"] for e in status["events"] if e["reason"] == "RankRestarting"]
    assert len(told) == len(on_spare)
    assert all("HostLost" in text for text in told)


def test_half_a_gang_gives_way_and_comes_back(
    space: Space, start_operator: Callable[..., Operator]
) -> None:
    """Two of four ranks fit. They give way after the timeout, and start once all fit."""
    options = {"gangTimeoutS": 4, "gangBackoffS": 3}
    start_operator("one", "--options", json.dumps(options))
    take_room(space, "squatter", node=1, slots=4)
    space.submit(
        "tiny",
        command=FOREVER,
        worldSize={"min": 4, "target": 4, "max": 4},
        resources={"cpu": slot(space.site, 2)},
    )
    status = space.until(
        "tiny", "two hold room", lambda s: said(s, "start gate: 2 of 4 ranks are ready to start")
    )
    assert status["phase"] == "pending"
    space.until("tiny", "gave way", lambda s: said(s, "gave way"))
    wait_for("the room is free", lambda: not [p for p in space.pods() if holds_room(p)])
    give_back(space, "squatter")
    status = space.until_ready("tiny", 4, timeout=90)
    assert {r.get("restarts", 0) for r in status["ranks"]} == {0}
    told = [e["reason"] for e in status["events"]]
    assert not {"RankStopped", "RankRestarting", "RankLost"} & set(told)  # none had run


def said(status: Json, words: str) -> bool:
    return any(words in rank.get("message", "") for rank in status.get("ranks", ()))


def holds_room(pod: Json) -> bool:
    return pod["metadata"]["name"] != "squatter" and "nodeName" in pod["spec"]
