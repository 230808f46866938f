"""Whole lives of trainings on a real cluster: what befalls their ranks on the way to a good end."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.kubernetes.conftest import Operator, Space
from tests.e2e.kubernetes.images import ATOLL, BUSYBOX
from tests.e2e.kubernetes.test_kube_operator import reasons, restarts, sh

pytestmark = pytest.mark.usefixtures("pods")

UNTIL_DONE = "until [ -e /scratch/done ]; do sleep 0.2; done"
ONCE_OUT_OF_MEMORY = f"[ $RANK$ATOLL_ATTEMPT = 10 ] && exec tail /dev/zero; {UNTIL_DONE}"


def test_a_rank_out_of_memory_comes_back_and_nobody_else_is_disturbed(
    space: Space, start_operator: Callable[..., Operator], tmp_path: Path
) -> None:
    volume = {"name": "scratch", "hostPath": {"path": str(tmp_path)}}
    mount = {"name": "scratch", "mountPath": "/scratch"}
    start_operator("one", "--options", json.dumps({"volumes": [volume], "volumeMounts": [mount]}))
    space.submit(
        "tiny",
        command=sh(ONCE_OUT_OF_MEMORY),
        resources={"memory": "48Mi"},
        maxRestarts=1,
        worldSize={"min": 2, "target": 3, "max": 3},
    )
    space.until("tiny", "restarted", lambda s: restarts(s).get(1) == 1 if "ranks" in s else False)
    status = space.until_ready("tiny", 3)
    assert restarts(status) == {0: 0, 1: 1, 2: 0}
    before = status["ranks"][1]["previousExit"]
    assert (before["code"], before["reason"]) == (137, "OOMKilled")
    assert [len(space.pods(rank)) for rank in (0, 2)] == [1, 1]
    (tmp_path / "done").touch()
    status = space.until_phase("tiny", "succeeded")
    found = {e["rank"]: (e["exitCode"], e.get("restartCount", 0)) for e in status["rankExits"]}
    assert found == {0: (0, 0), 1: (0, 1), 2: (0, 0)}
    told = [e["message"] for e in status["events"] if e["reason"] == "RankRestarting"]
    assert len(told) == 1
    assert "rank 1" in told[0]
    assert "OOMKilled" in told[0]


def test_a_scale_up_that_comes_after_the_last_exit_does_not_fail_the_training(
    space: Space, operator: Operator
) -> None:
    space.submit("tiny", command=sh("sleep 3"))
    space.until_ready("tiny", 2)
    operator.kill()
    space.kubectl("wait", "--for=condition=Complete", "job", "--all", "--timeout=60s")
    space.kubectl("scale", "training", "tiny", "--replicas=4")
    operator.start()
    status = space.until_phase("tiny", "succeeded")
    assert (status["world"]["ready"], status["world"]["target"]) == (2, 2)
    assert [e["exitCode"] for e in status["rankExits"]] == [0, 0]
    assert "UDTerminalState" in reasons(status)
    assert len(space.pods()) == 2


SOURCES = {
    "shell": (BUSYBOX, 'echo "rank $RANK of $WORLD_SIZE says $1"'),
    "script": (
        ATOLL,
        "import os, sys; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], "
        "'says', sys.argv[1])",
    ),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_code_shipped_with_a_training_runs(space: Space, operator: Operator, kind: str) -> None:
    image, text = SOURCES[kind]
    content = base64.b64encode(text.encode()).decode()
    source = {"kind": kind, "content": content, "filename": "code"}
    space.submit("tiny", image=image, source=source, args=["$(RANK) hi"])
    space.until_phase("tiny", "succeeded")
    logs = space.kubectl("logs", space.pods(1)[0]["metadata"]["name"]).stdout
    assert logs == "rank 1 of 2 says $(RANK) hi\n"


def test_a_pod_deleted_before_it_found_room_is_told_and_nothing_hangs(
    space: Space, operator: Operator
) -> None:
    """Kubernetes counts it as a failure of its rank."""
    space.submit(
        "tiny",
        command=sh("sleep 1000"),
        resources={"gpuCount": 1},
        worldSize={"min": 2, "target": 2, "max": 2},
    )
    space.until(
        "tiny", "no capacity", lambda s: "ranks" in s and "no capacity" in s["ranks"][1]["message"]
    )
    space.kubectl("delete", "pod", space.pods(1)[0]["metadata"]["name"], "--wait=false")
    status = space.until_phase("tiny", "failed")
    root = status["rootCause"]
    assert (root["rank"], root["exitCode"], root["terminationReason"]) == (1, None, "Deleted")
