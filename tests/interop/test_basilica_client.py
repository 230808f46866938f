"""Unmodified clients from PyPI against a running server with real ranks."""

from __future__ import annotations

import http.client
import urllib.parse
import uuid
from pathlib import Path

from tests.interop.conftest import Client, Server, installed

SLEEP = ["sleep", "600"]


def fresh(tag: str) -> str:
    return f"{tag}-{uuid.uuid4().hex[:6]}"


def waiting_for(flag: Path, then: str = "") -> str:
    return f"while [ ! -e {flag} ]; do sleep 0.05; done; {then}"


def test_a_training_from_deploy_to_delete(client: Client, tmp_path: Path) -> None:
    name, flag = fresh("life"), tmp_path / "go"
    words = "$GREETING $NCCL_DEBUG $BASILICA_RANK $RANK $WORLD_SIZE $*"
    say = f'echo "{words}"; : > {flag}-$RANK; {waiting_for(flag)}'
    found = client.play("lifecycle", name=name, flag=str(flag), argv=["sh", "-c", say])

    assert found["name"] == found["by name"] == name
    assert name in found["listed"]
    assert found["deployed"] == size(2, 2)
    assert found["scaled"]["target"] == 4
    assert found["up"] == size(4, 4)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2, 3]
    assert {rank["phase"] for rank in found["ranks"]} == {"Running"}
    assert found["ranks"][1]["pod_name"] == f"{name}-1"
    assert found["down"] == size(2, 2)
    assert found["left"] == [0, 1]
    assert found["out of bounds"][0] == "WorldSizeOutOfBounds"
    assert found["metrics"]["world_ready"] == 2
    assert found["raw scale"] == ["RuntimeError", found["raw scale"][1]]
    assert "succeeded" in found["raw scale"][1]
    assert found["logs"].count("[rank 0] hello there WARN 0 0 2 from args\n") == 1
    assert "[rank 3] hello there WARN 3 3 4 from args\n" in found["logs"]
    assert len(found["tail"].splitlines()) == 4
    reasons = [event["reason"] for event in found["events"]]
    assert reasons.index("Succeeded") < reasons.index("Scaled") < reasons.index("Accepted")
    assert [event["reason"] for event in found["few events"]["events"]] == reasons[:2]
    assert found["gone"] == "DeploymentNotFound"
    assert found["deleted twice"][0] in ("", "KeyError")
    if client.is_new:
        assert found["phase"] == "succeeded"
        assert found["complete"] == found["world"] == size(2, 2)
        exits = {each["rank"]: each for each in found["exits"]}
        assert [exits[rank]["exit_code"] for rank in range(4)] == [0, 0, 143, 143]
        assert exits[0]["termination_reason"] == "Completed"
        assert found["again"][0] == "UDTerminalState"
        assert found["too late"][0] == "UDTerminalState"

    block = found["distributed"]
    assert [point["target"] for point in block["worldSizeHistory"]][-1] == 2
    assert max(point["ready"] for point in block["worldSizeHistory"]) == 4
    assert (block["lastResize"]["fromTarget"], block["lastResize"]["toTarget"]) == (4, 2)
    assert {c["type"]: c["status"] for c in block["conditions"]}["BelowMinimum"] == "False"
    assert [each["name"] for each in block["milestones"]][-1] == "Ended"
    assert block["bench"]["mode"] == "off"


def size(ready: int, target: int) -> dict[str, object]:
    return {"ready": ready, "target": target, "min": 2, "max": 4, "below_minimum": False}


def test_a_training_over_before_the_first_look_is_deployed(client: Client) -> None:
    found = client.play("fast", name=fresh("fast"), command=["echo", "done"])
    assert found["phase"] == "succeeded"
    assert found["world"]["ready"] == 2
    assert sorted(found["logs"].splitlines()) == ["[rank 0] done", "[rank 1] done"]


def test_a_training_that_fails_at_once_is_not_waited_for(client: Client) -> None:
    found = client.play("fast", name=fresh("bad"), command=["sh", "-c", "exit 3"])
    assert (found["phase"], found["state"]) == ("failed", "Failed")
    if client.is_new:
        assert 3 in [each["exit_code"] for each in found["exits"]]


def test_the_rank_that_failed_is_named_with_its_exit_code(client: Client, tmp_path: Path) -> None:
    flag = tmp_path / "go"
    script = waiting_for(flag, "[ $RANK = 0 ] || kill -9 $$; exec sleep 600")
    found = client.play("failure", name=fresh("fail"), command=["sh", "-c", script], flag=str(flag))
    assert (found["phase"], found["state"]) == ("failed", "Failed")
    if client.is_new:
        kind, text = found["complete"]
        assert kind == "BelowMinimumWorld"
        assert "rank 1: exit_code=137 reason=Signal" in text
        assert [each["exit_code"] for each in found["exits"]] == [143, 137]
        assert found["target"][0] == "BelowMinimumWorld"


def test_every_refusal_is_the_exception_that_the_client_has_for_it(client: Client) -> None:
    found = client.play("errors", name=fresh("err"), sleep=SLEEP)
    kinds = {what: kind for what, (kind, _) in found.items() if what not in ("health", "restarted")}
    assert kinds == {
        "bad name": "ValueError",
        "taken": "RuntimeError",
        "reserved": "ValueError",
        "bounds": "ValueError",
        "min above target": "ValueError",
        "get nobody": "DeploymentNotFound",
        "low-level get": "KeyError",
        "delete nobody": "KeyError",
        "scale nobody": "KeyError",
        "events nobody": "KeyError",
        "logs nobody": "",
        "path": "KeyError",
        "odd name": "ValueError",
        "too large": "RuntimeError",
        "denied": "PermissionError",
        "denied health": "PermissionError",
        "inference": "RuntimeError",
        "rentals": "RuntimeError",
        "nodes": "RuntimeError",
        "ssh keys": "RuntimeError",
        "balance": "RuntimeError",
        "reused": "",
    }
    said = {what: text for what, (_, text) in found.items() if what in kinds}
    assert "Not_A_Name" in said["bad name"]
    assert said["taken"].startswith("Conflict: ")
    assert "RANK" in said["reserved"]
    assert "[1, 2]" in said["bounds"]
    assert "distributed.worldSize.min" in said["min above target"]
    assert "BASILICA_API_NOT_FOUND" in said["logs nobody"]
    assert "token" in said["denied"]
    assert "does not support inference deployments" in said["inference"]
    assert "does not support rentals" in said["rentals"]
    assert "does not support SSH keys" in said["ssh keys"]
    assert found["health"][0] == "healthy"
    assert found["restarted"][1] is True


def test_torchrun_by_command_gets_its_flags_and_the_script_its_own(
    client: Client, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "print(os.environ['RANK'], os.environ['WORLD_SIZE'], sys.argv[1:], flush=True)\n"
    )
    backend = "etcd-v2" if client.is_new else "c10d"
    command = [
        *("torchrun", f"--rdzv-backend={backend}", "--rdzv-endpoint=$BASILICA_RDZV_ENDPOINT"),
        *("--rdzv-id=$BASILICA_RDZV_ID", "--nnodes=$BASILICA_WORLD_TARGET"),
        *("--nproc-per-node=$BASILICA_GPUS_PER_POD", str(script), "--lr", "0.1 x"),
    ]
    options = {"rendezvous_backend": backend, "env": {"OMP_NUM_THREADS": "1"}, "timeout": 59}
    found = client.play("torchrun", name=fresh("run"), command=command, options=options)
    assert found["phase"] == "succeeded", found["logs"]
    assert found["rendezvous"]["backend"] == backend
    for rank in range(2):
        assert f"{rank} 2 ['--lr', '0.1 x']" in found["logs"]


def test_a_decorated_function_trains_under_torchrun(client: Client) -> None:
    backend = "c10d" if client.is_new else "etcd-v2"
    found = client.play("function", name=fresh("fn"), backend=backend)
    assert found["phase"] == "succeeded", found["logs"]
    assert found["logs"].count("total 3 of 2") == 2


def test_a_command_may_be_longer_than_one_argument(client: Client) -> None:
    found = client.play("long_command", name=fresh("long"), size=300_000)
    assert (found["phase"], found["logs"]) == ("succeeded", "still here\n")


def test_arguments_reach_a_program_and_never_break_a_script(client: Client) -> None:
    show = "import sys; print(sys.argv[1:])"
    commands = [
        ["python", "-c", show],
        ["python", "-c", show, "--launcher=torchrun"],
        ["bash", "-c", "for i in 1 2; do echo $i; done"],
        ["bash", "-c", "which torchrun > /dev/null && echo there"],
    ]
    found = client.play("outputs", name=fresh("args"), commands=commands)
    assert found == [
        ["succeeded", "['--more', 'x y']\n"],
        ["succeeded", "['--launcher=torchrun', '--more', 'x y']\n"],
        ["succeeded", "1\n2\n"],
        ["succeeded", "there --more x y\n"],
    ]


def test_a_link_that_is_measured_is_read_as_numbers(client: Client) -> None:
    mode = True if client.is_new else "on-start"
    found = client.play("bench", name=fresh("bench"), command=SLEEP, mode=mode)
    assert found["busbw_gbps_p10"] <= found["busbw_gbps_p50"] <= found["busbw_gbps_p90"]
    assert found["latency_us_at_1mib"] > 0
    assert 2**20 in found["size_bytes_swept"]
    if client.is_new:
        assert found["diagnostics"]["phase"] == "Succeeded"
        assert found["diagnostics"]["last_attempt_outcome"] == "success"


def test_a_followed_log_ends_with_the_training(client: Client, tmp_path: Path) -> None:
    flag = tmp_path / "go"
    command = ["sh", "-c", f"echo first; {waiting_for(flag, 'echo last')}"]
    found = client.play("follow", name=fresh("log"), command=command, flag=str(flag))
    assert (found["logs"], found["phase"]) == ("first\nlast\n", "succeeded")


def test_a_run_that_its_time_to_live_ended_can_be_read(new_client: Client) -> None:
    command = ["sh", "-c", "echo up; exec sleep 600"]
    found = new_client.play("outlived", name=fresh("ttl"), command=command)
    assert found["phase"] == "failed"
    assert found["message"].startswith("DeadlineExceeded: ")
    assert found["logs"] == "up\n"


def test_leaving_the_block_deletes_the_training(new_client: Client) -> None:
    found = new_client.play("scope", name=fresh("with"), sleep=SLEEP)
    assert found == {"error": "inside", "gone": "DeploymentNotFound"}


def test_a_training_outlives_the_server(own_server: Server, tmp_path: Path) -> None:
    flag = tmp_path / "go"
    client = Client("0.36.8", installed("0.36.8"), own_server)
    name = fresh("live")
    client.play("start_only", name=name, command=["sh", "-c", waiting_for(flag)])
    own_server.kill()
    own_server.start()
    found = client.play("finish", name=name, flag=str(flag))
    assert found == {"before": "ready", "phase": "succeeded", "ready": 2}


def test_every_answer_closes_its_connection(server: Server) -> None:
    place = urllib.parse.urlsplit(server.url)
    for path in ("/health", "/deployments", "/deployments/nobody", "/rentals"):
        link = http.client.HTTPConnection(place.hostname or "", place.port or 0, timeout=30)
        link.request("GET", path, headers={"Authorization": f"Bearer {server.token}"})
        answer = link.getresponse()
        answer.read()
        assert answer.headers["Connection"] == "close", path
        link.close()
