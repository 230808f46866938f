"""A control plane on this machine runs trainings on a cluster that its kubeconfig reaches."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Shell, is_alive, until
from tests.e2e.kubernetes.conftest import Operator, Space
from tests.e2e.kubernetes.control_plane import wait_for
from tests.e2e.kubernetes.nodes import IMAGE
from tests.proxy import Proxy

HELD = "atoll.dev/exit"


@pytest.fixture
def line(space: Space) -> Iterator[Proxy]:
    """How the laptop reaches the cluster."""
    config = json.loads(space.site.kubeconfig.read_text())
    made = Proxy(config["clusters"][0]["cluster"]["server"])
    yield made
    made.close()


@pytest.fixture
def laptop(space: Space, line: Proxy, tmp_path: Path) -> Iterator[Shell]:
    """Trainings go to the cluster as `eu`; nothing of them is left afterwards."""
    work = tmp_path / "work"
    work.mkdir()
    config = json.loads(space.site.kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = line.url
    shell = Shell(tmp_path / "state", work)
    shell.configure(
        f"""
        [executors.eu]
        kind = "kubernetes"
        kubeconfig = "kube.json"
        namespace = "{space.name}"
        image = "{IMAGE}"
        has_exit_finalizer = true

        [defaults]
        stop_grace_s = 2
        """
    )
    (shell.toml.parent / "kube.json").write_text(json.dumps(config))
    yield shell
    shell.stop()


def test_a_cluster_is_an_executor_among_others(laptop: Shell, pods: None) -> None:
    listed = laptop.json("executors")
    assert {e["name"]: e["isReachable"] for e in listed["items"]} == {"eu": True, "local": True}
    ran = laptop(
        *("run", "--executor", "eu", "-n", "2", "--name", "there", "--"),
        *("sh", "-c", "echo here is $RANK of $WORLD_SIZE"),
    )
    assert ran.returncode == 0, ran.stderr
    assert sorted(ran.stdout.splitlines()) == ["[0] here is 0 of 2", "[1] here is 1 of 2"]
    shown = laptop.json("status", "there")
    assert [e["exitCode"] for e in shown["rankExits"]] == [0, 0]
    assert laptop("run", "--", "true").returncode == 0  # and this machine is still the default


def test_a_command_runs_in_the_pod_of_a_rank(laptop: Shell, space: Space, pods: None) -> None:
    """In the cluster of the executor, whatever the caller's own configuration names."""
    assert space.site.kubectl_path
    laptop.env["PATH"] = f"{Path(space.site.kubectl_path).parent}:{laptop.env['PATH']}"
    laptop.env["KUBECONFIG"] = os.devnull
    started = laptop(
        *("run", "-d", "--executor", "eu", "-n", "2", "--max-restarts", "1", "--name", "mine"),
        *("--", "sh", "-c", "sleep 1000 & wait"),
    )
    assert started.returncode == 0, started.stderr
    assert laptop("wait", "mine", "--for", "target", "--timeout", "60").returncode == 0
    (pod,) = space.pods(1)

    ran = laptop("exec", "mine", "-r", "1", "--", "sh", "-c", "hostname; echo $RANK >&2; exit 7")
    assert ran.returncode == 7, ran.stderr
    assert ran.stdout.strip() == pod["spec"]["hostname"]
    assert ran.stderr.splitlines()[0] == "1"
    shell = laptop.in_terminal("exec", "mine", "-r", "1", "-it", "--", "sh")
    shell.press("echo rank=$RANK; exit 5\r")
    shell.read_until("rank=1\r\n")
    assert shell.code() == 5
    gone = laptop("exec", "mine", "-r", "5", "--", "true")
    assert (gone.returncode, "expected at most 1" in gone.stderr) == (2, True), gone.stderr
    bounded = laptop("exec", "mine", "--timeout", "2", "--", "sleep", "30")
    assert (bounded.returncode, "'timeout 2'" in bounded.stderr) == (2, True), bounded.stderr

    # The control plane itself has no right to enter pods.
    refused = laptop("exec", "mine", "--json", "--", "true")
    assert refused.returncode == 1
    assert "use 'atoll exec'" in refused.stderr
    for words in (("kill", "mine", "1"), ("stacks", "mine")):
        refused = laptop(*words)
        assert refused.returncode != 0
        assert "use 'atoll exec NAME -r RANK -- " in refused.stderr

    assert laptop("exec", "mine", "-r", "1", "--", "kill", "-9", "-1").returncode in (0, 137)
    until(lambda: laptop.json("status", "mine")["ranks"][1].get("restarts") == 1)


def test_an_operator_in_the_same_namespace_leaves_its_ranks_alone(
    laptop: Shell, space: Space, start_operator: Callable[..., Operator], pods: None
) -> None:
    started = laptop(
        "run", "-d", "--executor", "eu", "-n", "2", "--name", "mine", "--", "sleep", "1000"
    )
    assert started.returncode == 0, started.stderr
    assert laptop("wait", "mine", "--for", "target", "--timeout", "60").returncode == 0
    start_operator()
    space.submit("theirs", command=["true"])
    space.until_phase("theirs", "succeeded")
    held = [p["metadata"].get("finalizers", []) for p in space.pods() if _is_of(p, "mine")]
    assert [HELD in finalizers for finalizers in held] == [True, True], json.dumps(held)
    assert laptop("rm", "-f", "mine").returncode == 0
    wait_for("its pods are gone", lambda: not any(_is_of(p, "mine") for p in space.pods()))
    assert space.status("theirs")["phase"] == "succeeded"


def test_a_training_goes_on_once_its_cluster_is_configured_again(
    laptop: Shell, space: Space, pods: None
) -> None:
    uids = _start(laptop, space)
    settings = laptop.toml.read_text()
    laptop.configure("")
    _stop_server(laptop)
    until(lambda: _absence(laptop) == "ExecutorMissing")
    assert laptop("cancel", "mine").returncode == 0
    until(lambda: "the cancellation waits" in laptop.json("status", "mine")["message"])
    assert _alive(space) == uids
    laptop.configure(settings)
    _stop_server(laptop)
    assert laptop("wait", "mine", "--timeout", "60").returncode == 1
    assert laptop.json("status", "mine")["phase"] == "cancelled"
    assert _absence(laptop) == ""
    assert _alive(space) == set()


def test_a_cluster_that_goes_away_is_told_of_until_it_is_back(
    laptop: Shell, space: Space, line: Proxy, pods: None
) -> None:
    uids = _start(laptop, space)
    line.is_refusing = True
    line.cut()
    assert laptop("scale", "mine", "2").returncode == 0  # and now somebody has to look
    until(lambda: _absence(laptop) == "ExecutorUnreachable")
    shown = laptop.json("status", "mine")
    assert shown["phase"] == "ready"
    assert "the executor 'eu' cannot be reached: the Kubernetes API" in shown["message"]
    assert _alive(space) == uids
    line.is_refusing = False
    assert laptop("wait", "mine", "--for", "target", "--timeout", "60").returncode == 0
    assert _absence(laptop) == ""
    assert uids < _alive(space)
    reasons = [event["reason"] for event in laptop.json("events", "mine")]
    assert reasons.count("ExecutorUnreachable") == reasons.count("ExecutorReachable") == 1


def _start(laptop: Shell, space: Space) -> set[str]:
    """A training of one rank, with room for a second; the uids of its pods."""
    size = ("-n", "1", "--max", "2")
    started = laptop(
        "run", "-d", "--executor", "eu", *size, "--name", "mine", "--", "sleep", "1000"
    )
    assert started.returncode == 0, started.stderr
    assert laptop("wait", "mine", "--for", "target", "--timeout", "60").returncode == 0
    return _alive(space)


def _stop_server(laptop: Shell) -> None:
    pid = laptop.server_pid()
    os.kill(pid, signal.SIGTERM)
    until(lambda: not is_alive(pid))


def _absence(laptop: Shell) -> str:
    kinds = [c["type"] for c in laptop.json("status", "mine")["conditions"]]
    return next((kind for kind in kinds if kind.startswith("Executor")), "")


def _alive(space: Space) -> set[str]:
    pods = [pod for pod in space.pods() if _is_of(pod, "mine")]
    return {pod["metadata"]["uid"] for pod in pods if pod["status"].get("phase") == "Running"}


def _is_of(pod: dict[str, object], training: str) -> bool:
    metadata = pod["metadata"]
    assert isinstance(metadata, dict)
    return bool(metadata["labels"].get("atoll.dev/training") == training)
