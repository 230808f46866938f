"""A control plane on this machine runs trainings on a cluster that its kubeconfig reaches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import Shell
from tests.e2e.kubernetes.conftest import Operator, Space
from tests.e2e.kubernetes.control_plane import wait_for
from tests.e2e.kubernetes.nodes import IMAGE

HELD = "atoll.dev/exit"


@pytest.fixture
def laptop(space: Space, tmp_path: Path) -> Iterator[Shell]:
    """Trainings go to the cluster as `eu`; nothing of them is left afterwards."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "kube.json").write_text(space.site.kubeconfig.read_text())
    (work / "atoll.toml").write_text(
        f"""
        [executors.eu]
        kind = "kubernetes"
        kubeconfig = "kube.json"
        namespace = "{space.name}"
        image = "{IMAGE}"

        [defaults]
        stop_grace_s = 2
        """
    )
    shell = Shell(tmp_path / "state", work)
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


def test_an_operator_in_the_same_namespace_leaves_its_ranks_alone(
    laptop: Shell, space: Space, start_operator: Callable[..., Operator], pods: None
) -> None:
    started = laptop("up", "--executor", "eu", "-n", "2", "--name", "mine", "--", "sleep", "1000")
    assert started.returncode == 0, started.stderr
    assert laptop("wait", "mine", "--for", "target", "--timeout", "60").returncode == 0
    start_operator()
    space.submit("theirs", command=["true"])
    space.until_phase("theirs", "succeeded")
    held = [p["metadata"].get("finalizers", []) for p in space.pods() if _is_of(p, "mine")]
    assert [HELD in finalizers for finalizers in held] == [True, True], json.dumps(held)
    assert laptop("rm", "mine").returncode == 0
    wait_for("its pods are gone", lambda: not any(_is_of(p, "mine") for p in space.pods()))
    assert space.status("theirs")["phase"] == "succeeded"


def _is_of(pod: dict[str, object], training: str) -> bool:
    metadata = pod["metadata"]
    assert isinstance(metadata, dict)
    return bool(metadata["labels"].get("atoll.dev/training") == training)
