"""The start gate, with pods that really wait at it.

Ranks are held back by other pods, which hold the room that they need.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.backends.kubernetes.executor import KubernetesBackend
from atoll.backends.kubernetes.options import KubernetesOptions
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import DesiredState, Training
from tests.e2e.kubernetes.conformance_backend import ArmedOperator
from tests.e2e.kubernetes.conftest import Operator, Space
from tests.e2e.kubernetes.control_plane import wait_for
from tests.e2e.kubernetes.images import ETCD
from tests.e2e.kubernetes.nodes import IMAGE
from tests.e2e.kubernetes.room import SLOTS, give_back, slot, take_room

pytestmark = pytest.mark.usefixtures("pods")

Json = dict[str, Any]
FOREVER = ["sh", "-c", 'trap "exit 7" TERM; echo rank $RANK of $WORLD_SIZE; sleep 1000 & wait']
NO_SHELL = ETCD


@pytest.fixture
def room(space: Space) -> Callable[[int], None]:
    """So many ranks fit, of four; each that is given back makes room for one more."""
    if not space.site.nodes:
        pytest.skip("taking the room of a cluster that others use is no test")

    def leave(ranks: int) -> None:
        take_room(space, "squatter", node=1, slots=SLOTS)
        for number in range(ranks, SLOTS):
            take_room(space, f"squatter-{number}", node=0, slots=1)

    return leave


def submit(space: Space, *, min: int, target: int, **spec: Any) -> None:
    world = {"min": min, "target": target, "max": 6}
    given = {"command": FOREVER, "resources": {"cpu": slot(space.site)}, **spec}
    space.submit("tiny", worldSize=world, **given)


def ranks_of(space: Space) -> list[Json]:
    return [p for p in space.pods() if "squatter" not in p["metadata"]["name"]]


def at_gate(status: Json) -> list[str]:
    messages = [r.get("message", "") for r in status.get("ranks", ())]
    return [m for m in messages if m.startswith("start gate")]


def until_at_gate(space: Space, count: int) -> Json:
    return space.until("tiny", f"{count} at the gate", lambda s: len(at_gate(s)) == count)


def states(pod: Json) -> tuple[Json, Json]:
    """Of the start gate and of the rank; {} until its kubelet has told."""
    status, untold = pod["status"], [{"state": {}}]
    gates, ranks = (status.get(f, untold) for f in ("initContainerStatuses", "containerStatuses"))
    return gates[0]["state"], ranks[0]["state"]


def restarts(status: Json) -> set[int]:
    return {rank.get("restarts", 0) for rank in status["ranks"]}


def test_ranks_start_together_when_the_last_one_can(
    space: Space, operator: Operator, room: Callable[[int], None]
) -> None:
    room(3)
    submit(space, min=4, target=4)
    status = until_at_gate(space, 3)
    status = space.until(
        "tiny",
        "one has no capacity",
        lambda s: any("no capacity" in r["message"] for r in s["ranks"]),
    )
    assert at_gate(status) == ["start gate: 3 of 4 ranks are ready to start"] * 3
    assert (status["phase"], status["world"]["ready"]) == ("pending", 0)
    give_back(space, "squatter-3")
    status = space.until_ready("tiny", 4)
    assert restarts(status) == {0}
    found = [states(pod) for pod in ranks_of(space)]
    reached = max(gate["terminated"]["startedAt"] for gate, _ in found)
    assert min(rank["running"]["startedAt"] for _, rank in found) >= reached


def admitted(status: Json) -> str:
    found = (c["status"] for c in status.get("conditions", ()) if c["type"] == "Admitted")
    return next(found, "")


def is_past(at: float) -> Callable[[Json], bool]:
    return lambda status: time.time() > at


def test_ranks_without_room_use_up_no_deadline(
    space: Space, operator: Operator, room: Callable[[int], None]
) -> None:
    room(0)
    submit(space, min=2, target=2, deadlineS=5, stopGraceS=1)
    status = space.until(
        "tiny",
        "no capacity",
        lambda s: "no capacity" in str([r["message"] for r in s.get("ranks", ())]),
    )
    (job,) = space.json("get", "jobs")["items"]
    assert "activeDeadlineSeconds" not in job["spec"]
    status = space.until("tiny", "the deadline, if it counted", is_past(time.time() + 7))
    assert (status["phase"], admitted(status)) == ("pending", "False")
    for number in (0, 1):
        give_back(space, f"squatter-{number}")
    status = space.until("tiny", "admitted", lambda s: admitted(s) == "True")
    (job,) = space.json("get", "jobs")["items"]
    assert float(job["metadata"]["annotations"]["atoll.dev/gate-opened"]) == status["gateOpenedAt"]
    status = space.until_phase("tiny", "failed")
    assert status["reason"] == "DeadlineExceeded"
    assert status["message"] == "still running 5 s after the start"
    assert status["endedAt"] >= status["gateOpenedAt"] + 5


def test_min_ranks_start_after_the_grace_and_a_late_one_joins(
    space: Space, operator: Operator, room: Callable[[int], None]
) -> None:
    room(2)
    command = [*FOREVER[:2], FOREVER[2].replace("WORLD_SIZE;", "WORLD_SIZE, $TOGETHER;")]
    command[2] = command[2].replace("$TOGETHER", "${ATOLL_STARTED_TOGETHER:-?} together")
    submit(space, min=2, target=3, startGraceS=3, command=command)
    status = space.until_phase("tiny", "ready")
    assert status["world"]["ready"] == 2
    before = {
        p["metadata"]["name"]: states(p)[1] for p in ranks_of(space) if p["spec"].get("nodeName")
    }
    assert len(before) == 2
    give_back(space, "squatter-2")
    status = space.until_ready("tiny", 3)
    assert restarts(status) == {0}
    after = {p["metadata"]["name"]: states(p)[1] for p in ranks_of(space)}
    assert before.items() <= after.items()
    for rank in range(3):  # all that are wanted, whoever is there yet
        (pod,) = space.pods(rank)
        name = pod["metadata"]["name"]
        words = space.kubectl("logs", name).stdout
        # The gate let two go. A late one may be told so, or nothing.
        expected = {f"rank {rank} of 3, 2 together\n"}
        expected |= set() if name in before else {f"rank {rank} of 3, ? together\n"}
        assert words in expected


# (the step, whether the decision is taken then); no pod has been told of it in either.
KILLED = [("before perform 1", False), ("after perform 1", True), ("before patch_pods 1", True)]


@pytest.mark.parametrize(("step", "is_decided"), KILLED)
def test_an_operator_killed_while_it_opens_the_gate(
    space: Space, tmp_path: Path, step: str, is_decided: bool
) -> None:
    operator = ArmedOperator(space, tmp_path, {})
    try:
        operator.arm(step)
        space.submit("tiny", command=FOREVER, worldSize={"min": 3, "target": 3, "max": 3})
        operator.process.wait(60)
        (job,) = space.json("get", "jobs")["items"]
        assert ("atoll.dev/gate-opened" in job["metadata"]["annotations"]) is is_decided
        assert space.status("tiny")["phase"] == "pending"
        assert all("running" in states(pod)[0] for pod in space.pods())
        operator.revive()
        status = space.until_ready("tiny", 3)
        assert restarts(status) == {0}
    finally:
        operator.kill()


def test_a_restarted_rank_passes_with_nobody_to_let_it_through(
    space: Space, operator: Operator
) -> None:
    space.submit("tiny", command=FOREVER, maxRestarts=1)
    space.until_ready("tiny", 2)
    operator.kill()
    (old,) = space.pods(1)
    space.kubectl("delete", "pod", old["metadata"]["name"], "--wait=false")
    wait_for("its successor runs", lambda: is_replaced(space, 1, old))
    operator.start()
    status = space.until("tiny", "told", lambda s: restarts(s) == {0, 1})
    assert space.until_ready("tiny", 2)["phase"] == "ready"
    assert status["ranks"][1]["restarts"] == 1


def is_replaced(space: Space, rank: int, old: Json) -> bool:
    pods = [p for p in space.pods(rank) if p["metadata"]["uid"] != old["metadata"]["uid"]]
    return len(pods) == 1 and "running" in states(pods[0])[1]


def test_a_pod_deleted_at_the_gate_costs_no_restart(
    space: Space, operator: Operator, room: Callable[[int], None]
) -> None:
    room(1)
    submit(space, min=2, target=2, maxRestarts=0)
    until_at_gate(space, 1)
    (waiting,) = [p for p in ranks_of(space) if p["spec"].get("nodeName")]
    space.kubectl("delete", "pod", waiting["metadata"]["name"])
    give_back(space, "squatter-1")
    status = space.until_ready("tiny", 2)
    assert restarts(status) == {0}
    told = [event["reason"] for event in status["events"]]
    assert not {"RankLost", "RankRestarting", "RankStopped"} & set(told)


def test_an_image_without_a_shell_is_told_with_what_to_do(space: Space, operator: Operator) -> None:
    space.submit("tiny", image=NO_SHELL, command=["etcd", "--version"])
    status = space.until_phase("tiny", "failed")
    assert status["rootCause"]["terminationReason"] == "StartGateFailed"
    assert "the start gate needs sh" in status["message"]
    assert "is_start_gated=False" in status["message"]


def test_without_the_gate_such_an_image_runs(
    space: Space, start_operator: Callable[..., Operator]
) -> None:
    start_operator("one", "--options", '{"isStartGated": false}')
    space.submit("tiny", image=NO_SHELL, command=["etcd", "--version"])
    space.until_phase("tiny", "succeeded")


def test_a_look_at_ranks_that_wait_costs_one_request(space: Space, run: Callable[..., Any]) -> None:
    async def cost_of(looks: int) -> int:
        executor = KubernetesBackend(
            space.site.connect(),
            KubernetesOptions(namespace=space.name, image=IMAGE, is_start_gated=True),
        )
        world = WorldSize(min=3, target=3, max=3)
        spec = TrainingSpec(name="tiny", command=FOREVER, world_size=world, executor="kubernetes")
        training = Training(
            namespace=space.name, uid=str(uuid.uuid4()), spec=spec, created_at=time.time()
        )
        await executor.apply(training, DesiredState(version=1, size=2))
        asked = executor.cluster.requests
        while True:
            messages = [r.message for r in (await executor.observe(training)).ranks]
            if messages == ["start gate: 2 of 3 ranks are ready to start"] * 2:
                break
            await asyncio.sleep(0.2)
        before = asked.total()
        for _ in range(looks):
            await executor.observe(training)
        cost = asked.total() - before
        await executor.purge(training)
        await executor.close()
        return cost

    assert run(cost_of(5)) == 5
