"""`deploy/base` as it is, in pods with their own rights, used by a user from outside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from tests.e2e.kubernetes.conftest import REPOSITORY, Site, Space
from tests.e2e.kubernetes.control_plane import wait_for
from tests.e2e.kubernetes.images import ATOLL

pytestmark = pytest.mark.usefixtures("pods")

HOME = "atoll-system"
MEET = """
import os, socket, time
rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
if rank == 0:
    with socket.create_server(("", port)) as server:
        for _ in range(int(os.environ["WORLD_SIZE"]) - 1):
            peer = server.accept()[0]
            print("met", peer.recv(100).decode(), flush=True)
else:
    while True:
        try:
            peer = socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=5)
            break
        except OSError:
            time.sleep(0.2)
    peer.sendall(os.environ["RANK"].encode())
"""


@pytest.fixture(scope="module")
def deployed(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if not site.is_own:
        pytest.skip("the image is only on the nodes that these tests start")
    overlay = tmp_path_factory.mktemp("overlay")
    base = os.path.relpath(REPOSITORY / "deploy" / "base", overlay)
    name, _, tag = ATOLL.partition(":")
    images = [{"name": "ghcr.io/your-org/atoll", "newName": name, "newTag": tag}]
    kustomization = {"resources": [base], "images": images}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    site.kubectl("apply", "--server-side", "--force-conflicts", "-k", str(overlay))
    site.kubectl("-n", HOME, "rollout", "status", "deploy/atoll-operator", "--timeout=50s")
    yield site
    site.kubectl("delete", "namespace", HOME, "--wait=false")
    for kind in ("clusterrole", "clusterrolebinding"):
        site.kubectl("delete", kind, "atoll-operator")


@contextlib.contextmanager
def forwarded(site: Site, log: Path) -> Iterator[str]:
    """The URL of the API, as `kubectl port-forward` gives it."""
    command = [str(site.kubectl_path), f"--kubeconfig={site.kubeconfig}", "-n", HOME]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "port-forward", "svc/atoll-operator", ":80"], stdout=out, stderr=out
        )
    try:
        found = wait_for(
            "the port is forwarded",
            lambda: re.search(r"127\.0\.0\.1:(\d+) ->", log.read_text()),
        )
        yield f"http://127.0.0.1:{found[1]}"
    finally:
        process.kill()
        process.wait()


def atoll(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "atoll.cli", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_a_user_runs_a_training_through_the_deployed_operator(
    deployed: Site, space: Space, tmp_path: Path
) -> None:
    made = deployed.kubectl(
        *("-n", HOME, "exec", "deploy/atoll-operator", "--"),
        *("python", "-m", "atoll.operator", "token", "--namespace", space.name),
    )
    with forwarded(deployed, tmp_path / "forward.log") as url:
        environment = {
            **os.environ,
            "ATOLL_URL": url,
            "ATOLL_TOKEN": made.stdout.strip(),
            "PYTHONPATH": str(REPOSITORY / "src"),
        }
        ran = atoll(
            environment,
            *("run", "--executor", "kubernetes", "--image", ATOLL, "-n", "3", "--name", "meet"),
            *("--", "python", "-c", MEET),
        )
        assert ran.returncode == 0, ran.stderr
        assert sorted(re.findall(r"\[0\] met (\d)", ran.stdout)) == ["1", "2"]
        status = atoll(environment, "status", "meet", "--json")
        assert status.returncode == 0, status.stderr
        assert {e["exitCode"] for e in json.loads(status.stdout)["rankExits"]} == {0}
        assert atoll(environment, "rm", "-f", "meet").returncode == 0
    assert space.json("get", "trainings,jobs")["items"] == []


def test_an_operator_takes_over_when_the_leader_is_deleted(deployed: Site, space: Space) -> None:
    def leader() -> str:
        lease = deployed.json("-n", HOME, "get", "lease", "atoll-operator")
        return str(lease["spec"].get("holderIdentity") or "").rpartition("_")[0]

    space.submit("tiny", command=["sh", "-c", "sleep 1000"])
    space.until_ready("tiny", 2)
    before = leader()
    deployed.kubectl("-n", HOME, "delete", "pod", before, "--grace-period=0", "--force")
    space.kubectl("scale", "training", "tiny", "--replicas=4")
    status = space.until_ready("tiny", 4)
    assert leader() != before
    assert {rank.get("restarts", 0) for rank in status["ranks"]} == {0}
    space.kubectl("delete", "training", "tiny", "--timeout=60s")
    wait_for("its pods are gone", lambda: space.pods() == [])


def test_what_runs_beside_ranks_has_the_operators_own_image(deployed: Site, space: Space) -> None:
    space.submit("tiny", command=["sh", "-c", "sleep 1000"], bench={"mode": "on-start"})
    status = space.until(
        "tiny", "measured", lambda s: s.get("bench", {}).get("phase") == "Succeeded", timeout=90
    )
    assert status["bench"]["result"]["busbwGbpsP50"] > 0
    space.kubectl("delete", "training", "tiny", "--timeout=60s")
