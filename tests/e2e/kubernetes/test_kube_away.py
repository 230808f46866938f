"""What users of a cluster do to its nodes and pods while no operator is there to see it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from atoll.backends.kubernetes.pod import Pod
from tests.e2e.kubernetes.conftest import Operator, Space
from tests.e2e.kubernetes.control_plane import wait_for
from tests.e2e.kubernetes.test_kube_operator import FOREVER, restarts, sh

pytestmark = pytest.mark.usefixtures("pods")

Json = dict[str, Any]
BOUND = "--timeout=40s"  # of kubectl; ranks take a second to stop


@contextlib.contextmanager
def drained(space: Space, node: str) -> Iterator[None]:
    """`kubectl drain`, as it is done before the machine is switched off."""
    # Only pods of this test: the node has no others that a drain would have to ask about.
    ours = ("--pod-selector", "atoll.dev/training=tiny")
    try:
        space.site.kubectl("drain", node, "--force", "--ignore-daemonsets", *ours, BOUND)
        yield
    finally:
        space.site.kubectl("uncordon", node)


def test_a_node_is_drained_while_no_operator_is_there(space: Space, operator: Operator) -> None:
    space.submit("tiny", command=sh(FOREVER), maxRestarts=2)
    status = space.until_ready("tiny", 2)
    node = status["ranks"][0]["node"]
    moved = {r["rank"] for r in status["ranks"] if r["node"] == node}
    operator.kill()
    with drained(space, node):
        operator.start()
        space.until("tiny", "told", lambda s: {r for r, n in restarts(s).items() if n} == moved)
        status = space.until_ready("tiny", 2)
    before = {r["rank"]: r.get("previousExit") for r in status["ranks"]}
    assert {rank for rank, exit in before.items() if exit} == moved
    assert {(before[r]["code"], before[r]["reason"]) for r in moved} == {(7, "Evicted")}
    assert {r["node"] for r in status["ranks"]}.isdisjoint({node})


def test_a_pod_is_deleted_while_no_operator_is_there(space: Space, operator: Operator) -> None:
    space.submit("tiny", command=sh(FOREVER), maxRestarts=2)
    space.until_ready("tiny", 2)
    operator.kill()
    space.kubectl("delete", "pod", space.pods(1)[0]["metadata"]["name"], BOUND)
    wait_for("its successor runs", lambda: len(space.pods()) == 2)
    operator.start()
    space.until("tiny", "told", lambda s: restarts(s) == {0: 0, 1: 1})
    status = space.until_ready("tiny", 2)
    before = status["ranks"][1]["previousExit"]
    assert (before["code"], before["reason"]) == (7, "Deleted")
    told = [e["message"] for e in status["events"] if e["reason"] == "RankRestarting"]
    assert told == ["rank 1: exit_code=7 reason=Deleted: it was deleted by somebody"]


def test_an_attempt_begins_and_ends_while_no_operator_is_there(
    space: Space, operator: Operator
) -> None:
    """No status names the pod of the second attempt."""
    space.submit("tiny", command=sh(FOREVER), maxRestarts=3)
    space.until_ready("tiny", 2)
    operator.kill()
    for _ in range(2):
        (pod,) = space.pods(1)
        space.kubectl("delete", "pod", pod["metadata"]["name"], BOUND)
        wait_for("its successor runs", lambda: is_running(space, 1))
    operator.start()
    space.until("tiny", "told", lambda s: restarts(s) == {0: 0, 1: 2})
    status = space.until_ready("tiny", 2)
    told = [e for e in status["events"] if e["reason"] == "RankRestarting"]
    ended = "rank 1: exit_code=7 reason=Deleted: it was deleted by somebody"
    assert {e["message"] for e in told} == {ended}
    assert sum(e.get("count", 1) for e in told) == 2


def is_running(space: Space, rank: int) -> bool:
    return ["running" in Pod(pod).state for pod in space.pods(rank)] == [True]


def test_a_namespace_is_emptied_while_no_operator_is_there(
    space: Space, operator: Operator
) -> None:
    """The Training itself waits for its operator; no pod does."""
    space.submit("tiny", command=sh(FOREVER))
    space.until_ready("tiny", 2)
    operator.kill()
    space.kubectl("delete", "job", "--all", BOUND)
    space.kubectl("wait", "pod", "--all", "--for=delete", BOUND)
    operator.start()
    status = space.until_phase("tiny", "failed")
    assert status["reason"] == "ExecutorLost"
    assert {e["exitCode"] for e in status["rankExits"]} == {7}


def test_pods_of_a_release_that_held_them_are_let_go(
    space: Space, start_operator: Callable[..., Operator]
) -> None:
    held = start_operator("one", "--options", json.dumps({"hasExitFinalizer": True}))
    space.submit("tiny", command=sh(FOREVER), maxRestarts=2)
    space.until_ready("tiny", 2)
    assert all("atoll.dev/exit" in p["metadata"]["finalizers"] for p in space.pods())
    held.kill()
    today = start_operator("two")
    wait_for(
        "no pod is held",
        lambda: not any("atoll.dev/exit" in p["metadata"]["finalizers"] for p in space.pods()),
    )
    today.kill()
    space.kubectl("delete", "pod", space.pods(1)[0]["metadata"]["name"], BOUND)
