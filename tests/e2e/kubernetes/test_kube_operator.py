"""`atoll operator` on a real cluster, used with kubectl as its users do.

The operator runs with the rights of its own service account, so a right that is missing fails
here.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.kubernetes.conftest import Operator, Space
from tests.e2e.kubernetes.control_plane import wait_for

pytestmark = pytest.mark.usefixtures("pods")

Json = dict[str, Any]
FOREVER = 'trap "echo stopping; exit 7" TERM; echo rank $RANK of $WORLD_SIZE; sleep 1000 & wait'


def sh(script: str) -> list[str]:
    return ["sh", "-c", script]


def reasons(status: Json) -> list[str]:
    return [event["reason"] for event in status.get("events", ())]


def left(space: Space) -> list[Json]:
    kinds = "pods,jobs,services,configmaps"
    items: list[Json] = space.json("get", kinds, "-l", "atoll.dev/uid")["items"]
    return items


def restarts(status: Json) -> dict[int, int]:
    return {rank["rank"]: rank.get("restarts", 0) for rank in status["ranks"]}


def messages(status: Json) -> set[str]:
    return {rank.get("message", "") for rank in status["ranks"]}


def test_kubectl_apply_get_and_delete(space: Space, operator: Operator) -> None:
    space.submit("tiny", command=sh("echo rank $RANK of $WORLD_SIZE on $NODE_NAME"))
    status = space.until_phase("tiny", "succeeded")
    assert [(e["rank"], e["exitCode"]) for e in status["rankExits"]] == [(0, 0), (1, 0)]
    shown = space.kubectl("get", "trainings").stdout.split("\n")
    assert shown[0].split() == ["NAME", "PHASE", "READY", "TARGET", "MIN", "AGE"]
    assert shown[1].split()[:5] == ["tiny", "succeeded", "2", "2", "1"]
    assert "Succeeded" in space.kubectl("describe", "training", "tiny").stdout
    space.until("tiny", "torn down", lambda s: s.get("isReleased"))
    logs = space.kubectl("logs", "-l", "atoll.dev/training=tiny").stdout
    assert "rank 1 of 2 on node-" in logs
    space.kubectl("delete", "training", "tiny", "--timeout=30s")
    wait_for("nothing is left", lambda: not left(space))


def test_kubectl_scale_up_and_down(space: Space, operator: Operator) -> None:
    space.submit("tiny", command=sh(FOREVER))
    space.until_ready("tiny", 2)
    space.kubectl("scale", "training", "tiny", "--replicas=5")
    status = space.until_ready("tiny", 5)
    assert status["observedGeneration"] == space.get("tiny")["metadata"]["generation"]
    assert set(restarts(status).values()) == {0}
    logs = space.kubectl("logs", space.pods(4)[0]["metadata"]["name"]).stdout
    assert logs == "rank 4 of 5\n"
    space.kubectl("scale", "training", "tiny", "--replicas=1")
    status = space.until("tiny", "ranks stopped", lambda s: len(s.get("removedRanks", ())) == 4)
    ended = {r["rank"]: r["exit"] for r in status["removedRanks"]}
    assert {e["code"] for e in ended.values()} == {7}
    assert all(e["isStopped"] for e in ended.values())
    assert ended[3]["logTail"][-1] == "stopping"
    wait_for("their pods leave", lambda: len(space.pods()) == 1)
    kept = space.json("get", "configmaps", "-l", "atoll.dev/log-of-rank=4")["items"]
    assert [c["data"]["log"] for c in kept] == ["rank 4 of 5\nstopping\n"]
    space.kubectl("patch", "training", "tiny", "--type=merge", "-p", '{"spec":{"cancel":true}}')
    status = space.until_phase("tiny", "cancelled")
    assert [e["rank"] for e in status["rankExits"]] == [0, 1, 2, 3, 4]


def test_ranks_have_names_that_stay(space: Space, operator: Operator) -> None:
    """What a cluster's DNS serves: the headless Service knows each rank by its own name."""
    space.submit("tiny", command=sh('echo "$MASTER_ADDR $BASILICA_RDZV_ENDPOINT"; ' + FOREVER))
    space.until_ready("tiny", 2)
    (service,) = space.json("get", "services", "-l", "atoll.dev/training=tiny")["items"]
    gang = service["metadata"]["name"]

    def names() -> set[str]:
        slices = space.json("get", "endpointslices", "-l", f"kubernetes.io/service-name={gang}")
        return {e.get("hostname", "") for s in slices["items"] for e in s["endpoints"] or ()}

    wait_for("both are named", lambda: names() == {f"{gang}-0", f"{gang}-1"})
    logs = space.kubectl("logs", space.pods(1)[0]["metadata"]["name"]).stdout
    assert logs.splitlines()[0] == f"{gang}-0.{gang} {gang}-0.{gang}:29500"


def test_a_scale_out_of_bounds_is_refused_by_the_api_server(
    space: Space, operator: Operator
) -> None:
    space.submit("tiny", command=sh(FOREVER))
    done = space.kubectl("scale", "training", "tiny", "--replicas=7", is_checked=False)
    assert done.returncode != 0
    assert "world_size.target: expected at most world_size.max" in done.stderr


def running_pods(space: Space) -> set[str]:
    return {p["metadata"]["name"] for p in space.pods() if p["status"]["phase"] == "Running"}


def test_scaled_away_and_back_at_once_costs_no_restart(space: Space, operator: Operator) -> None:
    space.submit("tiny", command=sh(FOREVER), worldSize={"min": 1, "target": 4, "max": 6})
    space.until_ready("tiny", 4)
    before = {p["metadata"]["name"] for p in space.pods()}
    space.kubectl("scale", "training", "tiny", "--replicas=2")
    space.until("tiny", "observed", lambda s: s["world"]["target"] == 2)
    space.kubectl("scale", "training", "tiny", "--replicas=4")
    wait_for("two new pods run", lambda: len(running_pods(space) - before) == 2)
    status = space.until_ready("tiny", 4)
    assert len(running_pods(space) & before) == 2
    assert set(restarts(status).values()) == {0}
    assert "RankLost" not in reasons(status)


def test_kubectl_delete_pod_costs_that_rank_one_restart(space: Space, operator: Operator) -> None:
    space.submit("tiny", command=sh(FOREVER), maxRestarts=2)
    space.until_ready("tiny", 2)
    space.kubectl("delete", "pod", space.pods(1)[0]["metadata"]["name"], "--wait=false")
    status = space.until("tiny", "restarted", lambda s: restarts(s).get(1) == 1)
    status = space.until_ready("tiny", 2)
    assert restarts(status) == {0: 0, 1: 1}
    told = [e["message"] for e in status["events"] if e["reason"] == "RankRestarting"]
    assert told == ["rank 1: exit_code=7 reason=Deleted: it was deleted by somebody"]


OUT_OF_MEMORY = "[ $RANK = 1 ] && { sleep 1; exec tail /dev/zero; }; sleep 1000 & wait"


def test_a_rank_out_of_memory_is_told_as_that(space: Space, operator: Operator) -> None:
    space.submit(
        "tiny",
        command=sh(OUT_OF_MEMORY),
        resources={"memory": "48Mi"},
        worldSize={"min": 2, "target": 2, "max": 2},
    )
    status = space.until_phase("tiny", "failed")
    root = status["rootCause"]
    assert (root["rank"], root["exitCode"], root["terminationReason"]) == (1, 137, "OOMKilled")
    exits = {e["rank"]: e for e in status["rankExits"]}
    assert exits[0]["collateral"]
    assert "OOMKilled" in status["message"]


# What a rank does, and what must be on record: exit code, reason, signal.
FAULTS: dict[str, tuple[list[str], int, str, str | None]] = {
    "exit 3": (sh("echo so long; exit 3"), 3, "Error", None),
    "SIGKILL": (sh("kill -9 $$; sleep 5"), 137, "Signal", "SIGKILL"),
    "SIGSEGV": (sh("kill -SEGV $$; sleep 5"), 139, "Signal", "SIGSEGV"),
    "command not found": (["no-such-program"], 127, "CommandNotFound", None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_on_record_as_they_were(space: Space, operator: Operator, fault: str) -> None:
    command, code, reason, signal = FAULTS[fault]
    if fault.startswith("SIG"):  # the first process of a container is deaf to its own signals
        command = sh(f"({command[2]}); exit $?")
        command = ["sh", "-c", f"sh -c '{FAULTS[fault][0][2]}'; exit $?"]
    space.submit("tiny", command=command, worldSize={"min": 1, "target": 1, "max": 1})
    status = space.until_phase("tiny", "failed")
    root = status["rootCause"]
    found = (root["exitCode"], root["terminationReason"], root.get("signal"))
    assert found == (code, reason, signal)
    if fault == "exit 3":
        assert root["logTail"] == ["so long"]


def test_a_rank_is_restarted_as_often_as_allowed_and_no_more(
    space: Space, operator: Operator
) -> None:
    space.submit(
        "tiny",
        command=sh("[ $RANK = 1 ] && exit 5; sleep 1000 & wait"),
        maxRestarts=1,
        worldSize={"min": 2, "target": 2, "max": 2},
    )
    status = space.until_phase("tiny", "failed", timeout=90)
    exits = {e["rank"]: e for e in status["rankExits"]}
    assert (exits[1]["exitCode"], exits[1]["restartCount"]) == (5, 1)
    assert exits[0].get("restartCount", 0) == 0


def test_a_lost_rank_above_min_leaves_the_others_alone(space: Space, operator: Operator) -> None:
    space.submit("tiny", command=sh("[ $RANK = 1 ] && exit 5; sleep 3"))
    status = space.until_phase("tiny", "succeeded")
    exits = {e["rank"]: e["exitCode"] for e in status["rankExits"]}
    assert exits == {0: 0, 1: 5}
    assert "RanksLost" in [c["type"] for c in status["conditions"]]


def test_no_room_is_told_in_the_schedulers_words(space: Space, operator: Operator) -> None:
    space.submit("tiny", command=sh(FOREVER), resources={"gpuCount": 1})
    status = space.until(
        "tiny", "told", lambda s: s.get("ranks") and "no capacity" in s["ranks"][0]["message"]
    )
    assert "Insufficient nvidia.com/gpu" in status["ranks"][0]["message"]
    assert status["phase"] == "pending"
    space.kubectl("delete", "training", "tiny", "--timeout=30s")


def test_a_quota_that_is_used_up_is_told(space: Space, operator: Operator) -> None:
    space.kubectl("create", "quota", "few", "--hard=pods=1")
    space.submit("tiny", command=sh(FOREVER), startGraceS=1)
    status = space.until(
        "tiny", "told", lambda s: any("quota" in r.get("message", "") for r in s.get("ranks", ()))
    )
    assert "exceeded quota: few" in status["ranks"][1]["message"]
    space.until_ready("tiny", 1)


def test_an_image_that_is_not_there_is_told(space: Space, operator: Operator) -> None:
    space.submit("tiny", command=sh(FOREVER), image="127.0.0.1:1/no/such:1")
    status = space.until(
        "tiny",
        "told",
        lambda s: s.get("ranks") and "cannot be pulled" in s["ranks"][0].get("message", ""),
    )
    assert "127.0.0.1:1/no/such:1" in status["ranks"][0]["message"]


def test_a_name_that_is_no_image_ends_the_training(space: Space, operator: Operator) -> None:
    space.submit("tiny", command=sh(FOREVER), image="No Image!")
    status = space.until_phase("tiny", "failed")
    assert "is not an image name" in status["message"]


def test_an_edit_after_the_end_is_an_event_and_changes_nothing(
    space: Space, operator: Operator
) -> None:
    space.submit("tiny", command=sh("true"))
    before = space.until("tiny", "torn down", lambda s: s.get("isReleased"))
    space.kubectl("scale", "training", "tiny", "--replicas=4")
    status = space.until("tiny", "told", lambda s: "UDTerminalState" in reasons(s))
    kept = ("phase", "rankExits", "world")
    assert {k: status[k] for k in kept} == {k: before[k] for k in kept}
    assert len(space.pods()) == 2
    described = space.kubectl("describe", "training", "tiny").stdout
    assert "Warning  UDTerminalState" in described


def test_a_spec_that_only_python_refuses_is_told(space: Space, operator: Operator) -> None:
    space.submit("odd", command=sh("true"), deadlineS=0.0005)
    space.submit("tiny", command=sh("true"))
    space.until_phase("tiny", "succeeded")
    status = space.until_phase("odd", "failed")
    assert (status["reason"], space.json("get", "jobs")["items"][1:]) == ("InvalidSpec", [])
    assert "deadline_s" in status["message"]
    space.kubectl("delete", "training", "odd", "--timeout=30s")


def test_a_deleted_training_leaves_no_pod_that_runs(space: Space, operator: Operator) -> None:
    space.submit("tiny", command=sh(FOREVER))
    space.until_ready("tiny", 2)
    space.kubectl("delete", "training", "tiny", "--timeout=60s")
    wait_for("nothing is left", lambda: not left(space))


def test_the_other_operator_takes_over(
    space: Space, start_operator: Callable[..., Operator]
) -> None:
    both = {name: start_operator(name) for name in ("one", "two")}
    space.submit("tiny", command=sh(FOREVER))
    space.until_ready("tiny", 2)
    lease = space.json("get", "lease", "atoll-operator")
    leader = lease["spec"]["holderIdentity"]
    both.pop(leader).kill()
    space.kubectl("scale", "training", "tiny", "--replicas=3")
    space.until_ready("tiny", 3)
    lease = space.json("get", "lease", "atoll-operator")
    assert lease["spec"]["holderIdentity"] in both
    assert lease["spec"]["leaseTransitions"] == 2


def test_killed_at_random_moments_it_converges_and_loses_nothing(
    space: Space, start_operator: Callable[..., Operator]
) -> None:
    """Scaled up and down without pause while the operator dies again and again."""
    rng = random.Random(7)
    operator = start_operator()
    space.submit("tiny", command=sh(FOREVER), worldSize={"min": 1, "target": 3, "max": 6})
    space.until_ready("tiny", 3)
    jobs = set()
    for _ in range(8):
        target = rng.choice([1, 2, 4, 5, 6])
        space.kubectl("scale", "training", "tiny", f"--replicas={target}")
        time.sleep(rng.random() * 0.6)
        operator.kill()
        jobs |= {j["metadata"]["uid"] for j in space.json("get", "jobs")["items"]}
        operator.start()
    space.kubectl("scale", "training", "tiny", "--replicas=2")
    status = space.until(
        "tiny",
        "converged",
        lambda s: s["world"]["ready"] == s["world"]["target"] == 2 and len(s["ranks"]) == 2,
    )
    assert len(jobs | {j["metadata"]["uid"] for j in space.json("get", "jobs")["items"]}) == 1
    assert set(restarts(status).values()) == {0}
    space.kubectl("patch", "training", "tiny", "--type=merge", "-p", '{"spec":{"cancel":true}}')
    status = space.until_phase("tiny", "cancelled")
    exits = {e["rank"]: e for e in status["rankExits"]}
    assert sorted(exits) == list(range(len(exits)))
    assert {e["exitCode"] for e in exits.values()} == {7}, exits
    told = [e["reason"] for e in status["events"]]
    assert "RankLost" not in told
    wait_for("only pods with logs are left", lambda: not _alive(space))


def _alive(space: Space) -> list[str]:
    return [
        p["metadata"]["name"]
        for p in space.pods()
        if p["status"]["phase"] in ("Running", "Pending")
    ]


def test_watching_with_kubectl(space: Space, operator: Operator) -> None:
    space.submit("tiny", command=sh("sleep 1"))
    watching = subprocess.Popen(
        [
            str(space.site.kubectl_path),
            *(f"--kubeconfig={space.site.kubeconfig}", "-n", space.name),
            *("get", "trainings", "-w", "-o", "json"),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        decoder, text, phases = json.JSONDecoder(), "", []
        assert watching.stdout is not None
        while "succeeded" not in phases:
            text += watching.stdout.readline()
            try:
                found, _ = decoder.raw_decode(text)
            except json.JSONDecodeError:
                continue
            phases.append(found.get("status", {}).get("phase", ""))
            text = ""
    finally:
        watching.kill()
        watching.communicate()
    assert "ready" in phases


@pytest.mark.parametrize("code", [0, 7])
def test_a_suspended_job_costs_no_rank_anything(
    space: Space, operator: Operator, code: int
) -> None:
    """What Kueue does to take quota back from a training and to give it again."""
    script = f'trap "exit {code}" TERM; sleep 1000 & wait'
    space.submit("tiny", command=sh(script), worldSize={"min": 2, "target": 2, "max": 2})
    space.until_ready("tiny", 2)
    (job,) = space.json("get", "jobs")["items"]
    name = job["metadata"]["name"]
    space.kubectl("patch", "job", name, "--type=merge", "-p", '{"spec":{"suspend":true}}')
    held = {"the Job is suspended"}
    status = space.until("tiny", "it is held", lambda s: messages(s) == held)
    assert (status["phase"], status["world"]["ready"]) == ("pending", 0)
    space.kubectl("patch", "job", name, "--type=merge", "-p", '{"spec":{"suspend":false}}')
    status = space.until_ready("tiny", 2)
    assert restarts(status) == {0: 0, 1: 0}
    assert "RankLost" not in reasons(status)
