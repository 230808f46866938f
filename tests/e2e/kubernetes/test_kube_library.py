"""`KubernetesExecutor` from a script, with no server and no operator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll import KubernetesExecutor, ValidationError
from tests.e2e.kubernetes.conftest import Site, Space
from tests.e2e.kubernetes.control_plane import wait_for
from tests.e2e.kubernetes.images import ATOLL
from tests.e2e.kubernetes.nodes import IMAGE

pytestmark = pytest.mark.usefixtures("pods")

SCRIPT = """echo rank $RANK of $WORLD_SIZE with $* and $ATOLL_ENTRYPOINT_ARGS
[ $RANK = 1 ] && { echo out of luck; exit 4; }
exit 0
"""


@pytest.fixture
def executor(site: Site, space: Space) -> Iterator[KubernetesExecutor]:
    # The test image has no Python: a shell runs the script in its place.
    with KubernetesExecutor(
        kubeconfig=str(site.kubeconfig), namespace=space.name, image=IMAGE, python="sh"
    ) as made:
        yield made


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "work.sh"
    path.write_text(SCRIPT)
    return path


def test_replicas_are_launched_collected_and_removed(
    executor: KubernetesExecutor, space: Space, script: Path
) -> None:
    handles = executor.launch_replicas(3, str(script), {"lr": 0.1}, timeout=600)
    assert [handle.rank for handle in handles] == [0, 1, 2]
    (job,) = space.json("get", "jobs")["items"]
    # It counts from when ranks were let go, and is moved once they are.
    assert 600 <= job["spec"]["activeDeadlineSeconds"] < 700
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (3, 3)
    reports = executor.collect(handles, timeout=90)
    assert [r["exit_code"] for r in reports] == [0, 4, 0]
    assert [r["status"] for r in reports] == ["succeeded", "failed", "succeeded"]
    assert "out of luck" in reports[1]["error"]
    assert executor.stream_logs(handles[0]) == 'rank 0 of 3 with --lr 0.1 and {"lr": 0.1}'
    executor.cancel(handles[0])
    executor.close()
    kinds = "pods,jobs,services,configmaps"
    wait_for(
        "nothing is left",
        lambda: not space.json("get", kinds, "-l", "atoll.dev/uid")["items"],
    )


def test_a_cancelled_gang_is_cancelled(
    executor: KubernetesExecutor, space: Space, tmp_path: Path
) -> None:
    script = tmp_path / "wait.sh"
    script.write_text("sleep 1000")
    handles = executor.launch_replicas(2, str(script), {})
    wait_for("both run", lambda: {executor.poll(h) for h in handles} == {"running"})
    executor.cancel(handles[1])
    executor.cancel(handles[0])
    reports = executor.collect(handles, timeout=60)
    assert [r["status"] for r in reports] == ["cancelled", "cancelled"]
    assert [r["exit_code"] for r in reports] == [143, 143]


def test_a_clash_is_refused_and_nothing_is_created(
    executor: KubernetesExecutor, space: Space, script: Path
) -> None:
    with pytest.raises(ValidationError, match="RTX"):
        executor.launch_replicas(2, str(script), {}, gpu="RTX")
    with pytest.raises(ValueError, match="n_replicas"):
        executor.launch_replicas(0, str(script), {})
    left = space.json("get", "jobs,services,configmaps,pods", "-l", "atoll.dev/uid")["items"]
    assert left == []


def test_a_function_runs_in_pods_and_gives_its_results_back(site: Site, space: Space) -> None:
    if not site.is_own:
        pytest.skip("the image with Python is only on the nodes that these tests start")

    def work(base: int) -> dict[str, int]:
        import os

        return {"rank": int(os.environ["RANK"]), "sum": base + int(os.environ["RANK"])}

    with KubernetesExecutor(
        kubeconfig=str(site.kubeconfig), namespace=space.name, image=ATOLL
    ) as executor:
        reports = executor.collect(executor.launch_replicas(2, work, {"base": 40}), timeout=90)
    assert [r["error"] for r in reports] == [None, None]
    assert [r["result"] for r in reports] == [{"rank": 0, "sum": 40}, {"rank": 1, "sum": 41}]
    assert [r["exit_code"] for r in reports] == [0, 0]
