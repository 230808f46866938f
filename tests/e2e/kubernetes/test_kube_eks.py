"""`EKSExecutor` with all its arguments, through the official client's way to a real cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll import AtollError, EKSExecutor, ReplicaHandle, ValidationError
from kubernetes import client, config
from tests.e2e.kubernetes.conftest import REPOSITORY, Site, Space
from tests.e2e.kubernetes.control_plane import wait_for
from tests.e2e.kubernetes.images import ATOLL
from tests.e2e.kubernetes.nodes import IMAGE

WORDS = (
    "echo rank $REPLICA_RANK $MY_RANK of $WORLD_SIZE runs $ENTRYPOINT with $LR at $RENDEZVOUS_URI; "
    '[ "$REPLICA_RANK" = 1 ] && exit 3; exit 0'
)
ARGS = {"rendezvous_uri": "s3://bucket/run42", "lr": 0.1, "rank_env": "MY_RANK"}


@pytest.fixture
def runtime(site: Site, space: Space) -> Iterator[str]:
    """A runtime class that is the nodes' own runtime, and a service account."""
    site.apply(
        {
            "apiVersion": "node.k8s.io/v1",
            "kind": "RuntimeClass",
            "metadata": {"name": space.name},
            "handler": "runc",
        }
    )
    space.kubectl("create", "serviceaccount", "trainer")
    yield space.name
    site.kubectl("delete", "runtimeclass", space.name, "--wait=false")


def all_fifteen(site: Site, space: Space, runtime: str) -> dict[str, Any]:
    api = config.new_client_from_config(str(site.kubeconfig))
    return {
        "image": IMAGE,
        "namespace": space.name,
        "service_account_name": "trainer",
        "node_selector": {"kubernetes.io/os": "linux"},
        "tolerations": [
            client.V1Toleration(key="spot", operator="Exists", effect="NoSchedule"),
            {"key": "gpu", "operator": "Exists", "toleration_seconds": 60, "effect": "NoExecute"},
        ],
        "runtime_class_name": runtime,
        "command": ["sh", "-c", WORDS],
        "cpu_request": "10m",
        "memory_request": "16Mi",
        "ttl_seconds_after_finished": 600,
        "backoff_limit": 0,
        "gpu_resource_key": "nvidia.com/gpu",
        "run_id": "Run_42",
        "batch_api": client.BatchV1Api(api),
        "core_api": client.CoreV1Api(api),
    }


def test_a_server_takes_what_all_fifteen_arguments_render(
    site: Site, space: Space, runtime: str
) -> None:
    executor = EKSExecutor(**all_fifteen(site, space, runtime) | {"runtime_class_name": None})
    sandboxed = EKSExecutor(**all_fifteen(site, space, runtime))
    for objects in (
        executor.render_replicas(4, "train.py", ARGS, gpu="A100:8", timeout=3600),
        sandboxed.render_replicas(4, "train.py", ARGS),
        EKSExecutor("train:1", namespace=space.name).render_replicas(2, "os:getpid", gpu="H100"),
    ):
        for item in objects:
            space.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=item)
    assert space.json("get", "jobs")["items"] == []


@pytest.mark.usefixtures("pods")
def test_they_run_through_the_official_client_and_the_pods_word_counts(
    site: Site, space: Space, runtime: str
) -> None:
    with EKSExecutor(**all_fifteen(site, space, runtime)) as executor:
        handles = executor.launch_replicas(2, "train.py", ARGS, timeout=300)
        (job,) = space.json("get", "jobs")["items"]
        assert "run-42" in job["metadata"]["name"]
        reports = executor.collect(handles, timeout=90)
        logs = [executor.stream_logs(handle) for handle in handles]
    assert [report["exit_code"] for report in reports] == [0, 3]
    assert [report["status"] for report in reports] == ["succeeded", "failed"]
    assert logs == [
        f"rank {rank} {rank} of 2 runs train.py with 0.1 at s3://bucket/run42" for rank in (0, 1)
    ]


LAUNCHER = """
import sys, time
from pathlib import Path
from atoll import EKSExecutor
from kubernetes import client, config
image, namespace, runtime, kubeconfig = sys.argv[1:]
api = config.new_client_from_config(kubeconfig)
executor = EKSExecutor(
    image, namespace=namespace, service_account_name="trainer",
    node_selector={"kubernetes.io/os": "linux"},
    tolerations=[client.V1Toleration(key="spot", operator="Exists")],
    runtime_class_name=runtime, command=["sh", "-c", "echo I am $REPLICA_RANK; sleep 600"],
    cpu_request="10m", memory_request="16Mi", ttl_seconds_after_finished=600, backoff_limit=1,
    gpu_resource_key="nvidia.com/gpu", run_id="run42",
    batch_api=client.BatchV1Api(api), core_api=client.CoreV1Api(api),
)
for handle in executor.launch_replicas(2, "train.py", {"lr": 0.1}, timeout=900):
    print(handle.to_json(), flush=True)
time.sleep(600)
"""


@pytest.mark.usefixtures("pods")
def test_another_process_goes_on_when_the_launcher_was_killed(
    site: Site, space: Space, runtime: str
) -> None:
    words = [IMAGE, space.name, runtime, str(site.kubeconfig)]
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *words],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        lines = [launcher.stdout.readline() for _ in range(2)]
        launcher.kill()
    handles = [ReplicaHandle.from_json(line) for line in lines]
    executor = EKSExecutor(**all_fifteen(site, space, runtime))
    wait_for("both run", lambda: {executor.poll(h) for h in handles} == {"running"})
    wait_for("both speak", lambda: "I am 1" in executor.stream_logs(handles[1]))
    (job,) = space.json("get", "jobs")["items"]
    assert "run42" in job["metadata"]["name"]
    again = executor.attach(job["metadata"]["name"])
    assert [handle.rank for handle in again] == [0, 1]
    executor.cancel(handles[0])
    reports = executor.collect(handles, timeout=90)
    assert [report["status"] for report in reports] == ["cancelled", "cancelled"]
    assert {report["job_name"] for report in reports} == {job["metadata"]["name"]}
    executor.close()


def test_a_missing_right_is_told_and_nothing_is_created(site: Site, space: Space) -> None:
    space.kubectl("create", "serviceaccount", "nobody")
    way = config.new_client_from_config(str(site.kubeconfig)).configuration
    token = space.kubectl("create", "token", "nobody", "--duration=1h").stdout.strip()
    way.api_key = {"authorization": f"Bearer {token}"}
    way.refresh_api_key_hook = None
    api = client.BatchV1Api(client.ApiClient(way))
    executor = EKSExecutor(IMAGE, namespace=space.name, batch_api=api, command=["true"])
    with pytest.raises(AtollError, match=r"cannot \w+ resource") as refused:
        executor.launch_replicas(2, "train.py", {})
    assert space.name in str(refused.value)
    left = space.json("get", "jobs,services,configmaps,pods", "-l", "atoll.dev/uid")["items"]
    assert left == []


@pytest.mark.usefixtures("pods")
def test_the_entrypoint_of_an_image_runs_a_function_of_it(site: Site, space: Space) -> None:
    if not site.is_own:
        pytest.skip("the image with Python is only on the nodes that these tests start")
    with EKSExecutor(
        ATOLL,
        namespace=space.name,
        kubeconfig=str(site.kubeconfig),
        command=["python", "-m", "atoll.replica_entrypoint"],
        cpu_request="10m",
        memory_request="16Mi",
    ) as executor:
        handles = executor.launch_replicas(2, "json:dumps", {"obj": [1, "a"]}, timeout=300)
        reports = executor.collect(handles, timeout=90)
    assert [report["exit_code"] for report in reports] == [0, 0], reports
    assert [report["result"] for report in reports] == ['[1, "a"]'] * 2


def test_the_example_is_accepted_by_a_server(site: Site, space: Space) -> None:
    """It prints what it would create, and nothing else is asked for."""
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / "eks_irsa_s3.py"), "--dry-run"],
        env={**os.environ, "NAMESPACE": space.name, "PYTHONPATH": str(REPOSITORY / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    path = Path(site.kubeconfig).parent / "eks.yaml"
    path.write_text(done.stdout)
    space.kubectl("create", "--dry-run=server", "--validate=strict", "-f", str(path))


def test_a_cluster_that_cannot_be_taken_over_is_refused(site: Site, space: Space) -> None:
    unconfigured = client.BatchV1Api(client.ApiClient(client.Configuration()))
    with pytest.raises(ValidationError, match="batch_api"):
        EKSExecutor(IMAGE, namespace=space.name, batch_api=unconfigured)
