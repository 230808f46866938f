"""The rank's own exit record on a real cluster, in images with Python and without."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.kubernetes.conftest import Operator, Space
from tests.e2e.kubernetes.control_plane import wait_for
from tests.e2e.kubernetes.images import ATOLL, BUSYBOX

pytestmark = pytest.mark.usefixtures("pods")

Json = dict[str, Any]

# Rank 1 fails; rank 0 notices by their connection and falls in the same second.
FALL = """
import os, socket, sys, time
where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if os.environ["RANK"] == "0":
    with socket.create_server(("", where[1])) as server:
        peer, _ = server.accept()
        peer.sendall(b"x")
        if not peer.recv(1):
            raise ConnectionError("rank 1 is gone")
while True:
    try:
        peer = socket.create_connection(where, timeout=1)
        peer.recv(1)
        break
    except OSError:
        time.sleep(0.1)
print("about to fail", flush=True)
os._exit(3)
"""


def condition(status: Json, kind: str) -> Json:
    return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})


def test_the_first_of_two_that_fail_in_one_second_is_to_blame(
    space: Space, operator: Operator
) -> None:
    space.submit(
        "tiny",
        image=ATOLL,
        command=["python3", "-c", FALL],
        worldSize={"min": 2, "target": 2, "max": 2},
    )
    status = space.until_phase("tiny", "failed", timeout=120)
    assert [(e["rank"], e["exitCode"]) for e in status["rankExits"]] == [(0, 1), (1, 3)]
    assert status["rootCause"]["rank"] == 1
    assert status["rootCause"]["logTail"][-1] == "about to fail"
    ends = [e["endedAt"] for e in status["rankExits"]]
    assert 0 < ends[0] - ends[1] < 5
    assert any(end != int(end) for end in ends)  # a pod's times are whole seconds
    assert not condition(status, "ExitsFromBackend")


@pytest.mark.parametrize("image", [ATOLL, BUSYBOX])
def test_a_command_that_is_not_there_is_told_as_such(
    space: Space, operator: Operator, image: str
) -> None:
    space.submit("tiny", image=image, command=["trian", "--lr=1"])
    status = space.until_phase("tiny", "failed")
    assert {e["exitCode"] for e in status["rankExits"]} == {127}
    assert {e["terminationReason"] for e in status["rankExits"]} == {"CommandNotFound"}
    assert "trian" in status["message"]


def test_an_image_without_python_runs_the_command_as_given(
    space: Space, operator: Operator
) -> None:
    space.submit("tiny", image=BUSYBOX, command=["sh", "-c", "echo last words; exit 3"])
    status = space.until_phase("tiny", "failed")
    assert {e["exitCode"] for e in status["rankExits"]} <= {3, 143}
    assert status["rootCause"]["logTail"] == ["last words"]
    assert condition(status, "ExitsFromBackend")["status"] == "True"


def test_a_rank_that_is_stopped_ends_in_its_own_way(space: Space, operator: Operator) -> None:
    script = 'trap "echo stopping; exit 7" TERM; printf "rank $RANK\\n"; sleep 1000 & wait'
    space.submit("tiny", image=ATOLL, command=["sh", "-c", script])
    space.until_ready("tiny", 2)
    space.kubectl("patch", "training", "tiny", "--type=merge", "-p", '{"spec":{"cancel":true}}')
    status = space.until_phase("tiny", "cancelled")
    assert {e["exitCode"] for e in status["rankExits"]} == {7}
    words = ("get", "configmaps", "-l", "atoll.dev/log-of-rank=1")
    logs = wait_for("the log is kept", lambda: space.json(*words)["items"])
    assert [kept["data"]["log"] for kept in logs] == ["rank 1\nstopping\n"]
