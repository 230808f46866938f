"""A real API server for these tests, never a mock of one.

`KUBEBUILDER_ASSETS` holds the binaries to start one (and nodes, if it has those too), or
`KUBECONFIG` points at a cluster. Without either, everything here is skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.backends.kubernetes.client import Cluster
from atoll.core.model import encode
from atoll.operator.manifests import render_manifests
from atoll.operator.resource import to_training
from tests.e2e.kubernetes.control_plane import ControlPlane, assets, wait_for
from tests.e2e.kubernetes.nodes import IMAGE, Node

Json = dict[str, Any]
SKIPPED = "no cluster: set KUBEBUILDER_ASSETS (kube-apiserver, …) or KUBECONFIG"
REPOSITORY = Path(__file__).parents[3]


RANK_LISTS = ("ranks", "removedRanks", "rankExits")  # stored folded


class Site:
    """A cluster and how to talk to it as a user does."""

    plane: ControlPlane | None = None  # its daemons, where they were started here

    def __init__(self, kubeconfig: Path, nodes: list[Node], *, is_own: bool) -> None:
        self.kubeconfig = kubeconfig
        self.nodes = nodes
        self.is_own = is_own
        own = assets()
        found = own / "kubectl" if own and (own / "kubectl").exists() else shutil.which("kubectl")
        self.kubectl_path = str(found) if found else None

    @property
    def has_pods(self) -> bool:
        return bool(self.nodes) or not self.is_own

    def kubectl(
        self, *words: str, stdin: Any = None, is_checked: bool = True
    ) -> subprocess.CompletedProcess[str]:
        if self.kubectl_path is None:
            pytest.skip("kubectl is in neither KUBEBUILDER_ASSETS nor PATH")
        done = subprocess.run(
            [self.kubectl_path, f"--kubeconfig={self.kubeconfig}", *words],
            input=None if stdin is None else json.dumps(stdin),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if is_checked:
            assert done.returncode == 0, done.stderr
        return done

    def json(self, *words: str) -> Json:
        found: Json = json.loads(self.kubectl(*words, "-o", "json").stdout)
        return found

    def apply(self, *manifests: Json) -> None:
        body = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=body)

    def connect(self) -> Cluster:
        return Cluster.connect(kubeconfig=str(self.kubeconfig))


class Space:
    """A namespace of a site, with an operator's rights in it."""

    def __init__(self, site: Site, name: str) -> None:
        self.site = site
        self.name = name

    def kubectl(self, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
        return self.site.kubectl("-n", self.name, *words, **more)

    def json(self, *words: str) -> Json:
        return self.site.json("-n", self.name, *words)

    def get(self, name: str) -> Json:
        return self.json("get", "training", name)

    def status(self, name: str) -> Json:
        """The status, with one entry for each rank."""
        raw = self.get(name)
        stored: Json = raw.get("status") or {}
        whole = json.loads(encode(to_training(raw).status)) if "ranks" in stored else {}
        return stored | {key: whole.get(key, []) for key in RANK_LISTS if key in stored}

    def pods(self, rank: int | None = None) -> list[Json]:
        items = self.json("get", "pods")["items"]
        index = "batch.kubernetes.io/job-completion-index"
        return [
            p
            for p in sorted(items, key=lambda p: p["metadata"]["creationTimestamp"])
            if rank in (None, int(p["metadata"].get("annotations", {}).get(index, -1)))
        ]

    def submit(self, name: str, **spec: Any) -> None:
        body = {
            "apiVersion": "atoll.dev/v1",
            "kind": "Training",
            "metadata": {"name": name},
            "spec": {
                "image": IMAGE,
                "worldSize": {"min": 1, "target": 2, "max": 6},
                "stopGraceS": 2,
                **spec,
            },
        }
        self.kubectl("apply", "-f", "-", stdin=body)

    def until(self, name: str, what: str, test: Callable[[Json], Any], timeout: float = 60) -> Json:
        """The status once `test` holds of it."""
        last: Json = {}

        def look() -> bool:
            nonlocal last
            last = self.status(name)
            return bool(test(last))

        try:
            wait_for(what, look, timeout)
        except TimeoutError as error:
            raise AssertionError(f"{error}; last seen: {json.dumps(last, indent=1)}") from None
        return last

    def until_phase(self, name: str, phase: str, timeout: float = 60) -> Json:
        return self.until(name, phase, lambda s: s.get("phase") == phase, timeout)

    def until_ready(self, name: str, ready: int, timeout: float = 60) -> Json:
        return self.until(
            name, f"{ready} ready", lambda s: s.get("world", {}).get("ready") == ready, timeout
        )


class Operator:
    """`atoll operator` as a process, with the rights of its service account and no others."""

    def __init__(self, space: Space, folder: Path, identity: str, options: list[str]) -> None:
        self.identity = identity
        self.log = folder / f"{identity}.log"
        config = folder / "operator.kubeconfig"
        if not config.exists():
            config.write_text(json.dumps(_as_service_account(space)))
        self._command = [
            *(sys.executable, "-m", "atoll.operator", "run"),
            *("--namespace", space.name, "--home", space.name, "--identity", identity),
            *("--lease-duration", "3", *options),
        ]
        self.environment = {
            **os.environ,
            "KUBECONFIG": str(config),
            "PYTHONPATH": str(REPOSITORY / "src"),
        }
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command,
                env=self.environment,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def _as_service_account(space: Space) -> Json:
    config: Json = json.loads(space.site.kubeconfig.read_text())
    token = space.kubectl("create", "token", "atoll-operator", "--duration=1h").stdout.strip()
    config["users"] = [{"name": "admin", "user": {"token": token}}]
    return config


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    binaries = assets()
    if binaries is None:
        config = os.environ.get("KUBECONFIG")
        if not config:
            pytest.skip(SKIPPED)
        made = Site(Path(config), [], is_own=False)
        made.apply(render_manifests(image="unused")[0])
        yield made
        return
    plane = ControlPlane(tmp_path_factory.mktemp("kubernetes"), binaries)
    nodes: list[Node] = []
    try:
        plane.start()
        if plane.has_nodes:
            for number in range(2):
                nodes.append(Node(plane, number))
                nodes[-1].start()
        made = Site(plane.kubeconfig, nodes, is_own=True)
        made.plane = plane
        made.apply(render_manifests(image="unused")[0])
        wait_for("the CRD is served", lambda: _is_served(made))
        if nodes:
            wait_for("nodes are ready", lambda: _ready_nodes(made) == len(nodes))
        yield made
    finally:
        for node in nodes:
            node.stop()
        plane.stop()


def _is_served(site: Site) -> bool:
    return site.kubectl("get", "trainings", is_checked=False).returncode == 0


def _ready_nodes(site: Site) -> int:
    return sum(
        condition["type"] == "Ready" and condition["status"] == "True"
        for node in site.json("get", "nodes")["items"]
        for condition in node["status"].get("conditions", ())
    )


@pytest.fixture
def space(site: Site) -> Iterator[Space]:
    with make_space(site) as made:
        yield made


@contextlib.contextmanager
def make_space(site: Site) -> Iterator[Space]:
    name = f"atoll-{uuid.uuid4().hex[:8]}"
    site.kubectl("create", "namespace", name)
    made = Space(site, name)
    rights = [
        m
        for m in render_manifests(image="unused", home=name, namespace=name)
        if m["kind"] not in ("Deployment", "Namespace", "CustomResourceDefinition")
    ]
    site.apply(*rights)
    try:
        yield made
    finally:
        for kind in ("trainings", "pods"):
            _unhold(made, kind)
        site.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def spare_node(site: Site) -> Iterator[Callable[[], Node]]:
    """Starts further nodes, for tests that kill them."""
    started: list[Node] = []

    def start() -> Node:
        node = Node(site.nodes[0].plane, len(site.nodes) + len(started))
        started.append(node)
        node.start()
        wait_for("the spare node is ready", lambda: is_ready(site, node.name))
        return node

    yield start
    for node in started:
        node.stop()
        site.kubectl("delete", "node", node.name, "--wait=false", is_checked=False)


def is_ready(site: Site, name: str) -> bool:
    ready = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
    return site.kubectl("get", "node", name, "-o", ready, is_checked=False).stdout == "True"


def _unhold(space: Space, kind: str) -> None:
    """A test that ended early leaves objects that wait for an operator that is gone."""
    for item in space.json("get", kind)["items"]:
        patch = json.dumps({"metadata": {"finalizers": None}})
        name = item["metadata"]["name"]
        space.kubectl("patch", kind, name, "--type=merge", "-p", patch, is_checked=False)
        space.kubectl("delete", kind, name, "--wait=false", "--force", is_checked=False)


@pytest.fixture
def pods(site: Site) -> None:
    """For tests in which ranks must really run."""
    if not site.has_pods:
        pytest.skip(
            "no nodes: KUBEBUILDER_ASSETS lacks kube-scheduler or kubelet, or this machine "
            "lacks containerd, runc, CNI plugins or root"
        )


@pytest.fixture
def start_operator(space: Space, tmp_path: Path) -> Iterator[Callable[..., Operator]]:
    started: list[Operator] = []

    def start(identity: str = "one", *options: str) -> Operator:
        started.append(Operator(space, tmp_path, identity, list(options)))
        return started[-1]

    yield start
    for operator in started:
        if operator.process.poll() is None:
            operator.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                operator.process.wait(10)
            operator.kill()


@pytest.fixture
def operator(start_operator: Callable[..., Operator]) -> Operator:
    return start_operator()


@pytest.fixture
def run() -> Callable[..., Any]:
    def inside(coroutine: Any) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(100):
                return await coroutine

        return asyncio.run(bounded())

    return inside
