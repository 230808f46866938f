"""Thousands of ranks on a real API server and etcd: they run, fail, are told of and are deleted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import msgspec
import pytest

from atoll.backends.kubernetes.executor import KubernetesBackend
from atoll.backends.kubernetes.options import KubernetesOptions
from atoll.controller.loop import Controller
from atoll.core.errors import ObjectTooLarge, Temporary
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Training
from atoll.operator.manifests import render_manifests
from atoll.operator.store import KubernetesStore
from tests.e2e.kubernetes.conftest import SKIPPED, Site
from tests.e2e.kubernetes.control_plane import ControlPlane, assets, wait_for
from tests.e2e.kubernetes.fake_kubelet import FakeKubelet, KubeletCluster
from tests.support.crowd import NAME, live_and_die

Json = dict[str, Any]
NEEDED = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")
SPACE = "big"
SOAK = pytest.mark.soak
pytestmark = pytest.mark.timeout(3600)
# It would delete pods on nodes that do not exist.
NO_COLLECTOR = "--controllers=*,-pod-garbage-collector-controller"


@pytest.fixture(scope="module")
def big_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A control plane without nodes and scheduler, whose Job controller is in a hurry."""
    binaries = assets()
    if binaries is None:
        pytest.skip(SKIPPED)
    own = tmp_path_factory.mktemp("binaries")
    for name in NEEDED:
        if (binaries / name).exists():
            (own / name).symlink_to(binaries / name)
    folder = tmp_path_factory.mktemp("kubernetes")
    options = ("--kube-api-qps=1000", "--kube-api-burst=2000", NO_COLLECTOR)
    plane = ControlPlane(folder, own, manager_options=options)
    try:
        plane.start()
        site = Site(plane.kubeconfig, [], is_own=True)
        site.apply(render_manifests(image="unused")[0])
        site.kubectl("create", "namespace", SPACE)
        wait_for(
            "the CRD is served",
            lambda: site.kubectl("get", "trainings", is_checked=False).returncode == 0,
        )
        yield site
    finally:
        plane.stop()


class Scene:
    """A controller and a kubelet in this process, on one API server."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.cluster = site.connect()
        self.store = KubernetesStore(self.cluster, SPACE)
        self.executor = KubernetesBackend(
            self.cluster,
            KubernetesOptions(namespace=SPACE, is_start_gated=True, has_exit_finalizer=True),
            is_owner=True,
        )
        self.codes: dict[int, int] = {}
        self._hands = KubeletCluster.connect(kubeconfig=str(site.kubeconfig))
        self.kubelet = FakeKubelet(self._hands, SPACE, self.codes.get)

    @contextlib.asynccontextmanager
    async def playing(self) -> AsyncIterator[None]:
        controller = Controller(self.store, {"kubernetes": self.executor})
        tasks = [asyncio.create_task(t) for t in (controller.run(), self.kubelet.run())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.store.close()
            await self.executor.close()
            await self._hands.close()

    async def submit(self, name: str, ranks: int) -> Training:
        world = WorldSize(min=ranks, target=ranks, max=ranks)
        spec = TrainingSpec(
            name=name, command=["pyhton"], image="x", world_size=world, executor="kubernetes",
            start_grace_s=3600, stop_grace_s=600,  # this kubelet may be slow
        )  # fmt: skip
        return await self.store.create(Training(namespace=SPACE, uid="", spec=spec))

    async def until(self, name: str, what: str, test: Callable[[Training], bool]) -> Training:
        """Looks once a second: reading 10,000 ranks with every write would be the load."""
        last = None
        try:
            async with asyncio.timeout(3000):
                while True:
                    with contextlib.suppress(Temporary):  # this machine is busy
                        last = await self.store.get((SPACE, name))
                        if test(last):
                            return last
                    await asyncio.sleep(1.0)
        except TimeoutError:
            status = last.status if last else None
            raise AssertionError(f"not {what}: {status and status.message}") from None

    def end(self, codes: dict[int, int]) -> None:
        self.codes.update(codes)
        self.kubelet.look_again()

    async def kubectl(self, *words: str) -> None:
        """Beside the controller, which runs in this process."""
        await asyncio.to_thread(self._kubectl, *words)

    def _kubectl(self, *words: str) -> None:
        assert self.site.kubectl_path is not None
        options = (f"--kubeconfig={self.site.kubeconfig}", "-n", SPACE)
        done = subprocess.run(
            [self.site.kubectl_path, *options, *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    async def until_pods_gone(self) -> None:
        async with asyncio.timeout(1200):
            while True:
                if not (await self.cluster.page("pods", SPACE, limit=1)).items:
                    return
                await asyncio.sleep(0.5)

    async def until_event(self, reason: str) -> None:
        fields = f"reason={reason}"
        async with asyncio.timeout(30):
            while True:
                if (await self.cluster.list("events", SPACE, fields=fields)).items:
                    return
                await asyncio.sleep(0.2)

    def stored_bytes(self, name: str) -> int:
        raw = self.site.json("-n", SPACE, "get", "training", name)
        return len(msgspec.json.encode(raw["status"]))


def play(site: Site, test: Callable[[Scene], Awaitable[None]]) -> None:
    async def inside() -> None:
        scene = Scene(site)
        async with scene.playing():
            await test(scene)

    asyncio.run(inside())


SIZES = [200, pytest.param(2_000, marks=SOAK), pytest.param(10_000, marks=SOAK)]


@pytest.mark.parametrize("ranks", SIZES)
def test_they_run_fail_are_told_and_deleted(
    big_site: Site, ranks: int, record_property: Callable[[str, object], None]
) -> None:
    name = f"typo-{ranks}"

    async def test(scene: Scene) -> None:
        await scene.submit(name, ranks)
        await scene.until(name, "running", lambda t: t.world.ready == ranks)
        running_bytes = scene.stored_bytes(name)
        wait = ("wait", f"training/{name}", "--timeout=120s")
        await scene.kubectl(*wait, "--for=condition=Ready")

        before = Counter(scene.cluster.requests)
        scene.end(dict.fromkeys(range(ranks), 127))
        training = await scene.until(name, "over", lambda t: t.status.phase == "failed")
        requests = Counter(scene.cluster.requests) - before
        await scene.kubectl(*wait, "--for=condition=Failed")
        exits = training.status.rank_exits
        assert [e.rank for e in exits] == list(range(ranks))
        # Those that are left when the first have failed are stopped.
        assert {e.exit_code for e in exits} <= {127, 143}
        assert all(e.host and e.started_at and e.ended_at for e in exits)
        cause = training.status.root_cause
        assert cause is not None
        assert cause.exit_code == 127
        assert cause.log_tail == ["sh: 1: pyhton: not found"]
        conditions = {c.type: c for c in training.status.conditions}
        assert re.match(r"lost for good: \d+-\d+", conditions["RanksLost"].message)
        assert "StatusIncomplete" not in conditions
        ended_bytes = scene.stored_bytes(name)
        assert max(running_bytes, ended_bytes) < ranks * 60 + 30_000
        assert requests["create", "events"] < 30 + ranks / 100
        record_property("running_bytes", running_bytes)
        record_property("ended_bytes", ended_bytes)
        record_property("requests", dict(requests))

        await scene.kubectl("delete", f"training/{name}", "--timeout=1200s")
        await scene.until_pods_gone()

    play(big_site, test)


@pytest.mark.soak
def test_ten_thousand_that_each_end_otherwise(
    big_site: Site, record_property: Callable[[str, object], None]
) -> None:
    ranks, name = 10_000, "otherwise"

    async def test(scene: Scene) -> None:
        await scene.submit(name, ranks)
        await scene.until(name, "running", lambda t: t.world.ready == ranks)
        codes = {rank: 1 + rank * 7 % 120 for rank in range(ranks)}
        scene.end(codes)
        training = await scene.until(name, "over", lambda t: t.status.phase == "failed")
        exits = {e.rank: e.exit_code for e in training.status.rank_exits}
        assert len(exits) == ranks
        assert all(code in (codes[rank], 143) for rank, code in exits.items())
        record_property("ended_bytes", scene.stored_bytes(name))
        await scene.kubectl("delete", f"training/{name}", "--timeout=1200s")
        await scene.until_pods_gone()

    play(big_site, test)


def refusing(expression: str) -> list[Json]:
    """The API server refuses statuses of which this is not true."""
    api = "admissionregistration.k8s.io/v1"
    rule = {
        "apiGroups": ["atoll.dev"],
        "apiVersions": ["v1"],
        "operations": ["UPDATE"],
        "resources": ["trainings/status"],
    }
    return [
        {
            "apiVersion": api,
            "kind": "ValidatingAdmissionPolicy",
            "metadata": {"name": "refusing"},
            "spec": {
                "failurePolicy": "Fail",
                "matchConstraints": {"resourceRules": [rule]},
                "validations": [{"expression": expression, "message": "not here"}],
            },
        },
        {
            "apiVersion": api,
            "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": {"name": "refusing"},
            "spec": {"policyName": "refusing", "validationActions": ["Deny"]},
        },
    ]


@pytest.fixture
def refuse(big_site: Site) -> Iterator[Callable[[str], None]]:
    patch = json.dumps({"status": {"phase": "failed", "message": "probe"}})

    def try_probe() -> str:
        """What the API server says against the status of the probe."""
        words = ("patch", "training/probe", "--subresource=status", "--type=merge", "-p", patch)
        return big_site.kubectl(*words, is_checked=False).stderr

    def begin(expression: str) -> None:
        big_site.apply(*refusing(expression))
        probe = {"apiVersion": "atoll.dev/v1", "kind": "Training", "metadata": {"name": "probe"}}
        world = {"min": 1, "target": 1, "max": 1}
        spec = {"command": ["x"], "worldSize": world, "executor": "elsewhere"}
        big_site.kubectl("apply", "-f", "-", stdin={**probe, "spec": spec})
        wait_for("the policy is in force", lambda: "not here" in try_probe())

    yield begin
    for kind in ("validatingadmissionpolicybinding", "validatingadmissionpolicy"):
        big_site.kubectl("delete", kind, "refusing", "--ignore-not-found")
    # The API server keeps to a deleted policy for a moment, and the next test would meet it.
    wait_for("the policy is no longer in force", lambda: "not here" not in try_probe())
    big_site.kubectl("delete", "training/probe", "--ignore-not-found")


def test_a_status_that_is_refused_is_told_and_the_training_can_be_deleted(
    big_site: Site, refuse: Callable[[str], None]
) -> None:
    refuse("object.status.phase != 'failed' && object.status.phase != 'cancelled'")

    async def test(scene: Scene) -> None:
        await scene.submit("refused", 3)
        await scene.until("refused", "running", lambda t: t.world.ready == 3)
        scene.end({0: 1, 1: 1, 2: 1})
        told = await scene.until("refused", "told", lambda t: "StatusIncomplete" in _true(t))
        assert told.status.phase != "failed"
        (condition,) = [c for c in told.status.conditions if c.type == "StatusIncomplete"]
        assert "not here" in condition.message
        await scene.until_event("StatusIncomplete")
        await scene.kubectl("delete", "training/refused", "--timeout=60s")
        await scene.until_pods_gone()

    play(big_site, test)


def _true(training: Training) -> set[str]:
    return {c.type for c in training.status.conditions if c.status == "True"}


def test_what_etcd_and_the_api_server_do_not_take_is_known_as_too_large(big_site: Site) -> None:
    async def test(scene: Scene) -> None:
        await scene.submit("large", 1)
        for length in (1_800_000, 4_000_000):
            patch = {"status": {"message": "x" * length}}
            with pytest.raises(ObjectTooLarge):
                await scene.cluster.patch("trainings", SPACE, "large", patch, part="status")
        await scene.kubectl("delete", "training/large", "--timeout=60s")

    play(big_site, test)


@pytest.mark.parametrize("is_each_different", [False, True])
def test_a_status_of_ten_thousand_ranks_fits_into_etcd(
    big_site: Site, is_each_different: bool, record_property: Callable[[str, object], None]
) -> None:
    """The whole life of a training, in custom resources; the ranks are made up."""

    async def inside() -> list[int]:
        cluster = big_site.connect()
        store = KubernetesStore(cluster, SPACE)

        async def stored_bytes() -> int:
            raw = await cluster.get("trainings", SPACE, NAME)
            return len(msgspec.json.encode(raw["status"]))

        try:
            return await live_and_die(
                store,
                SPACE,
                stored_bytes,
                executor="elsewhere",
                is_each_different=is_each_different,
            )
        finally:
            await store.close()
            await cluster.close()

    running, ended = asyncio.run(inside())
    record_property("running_bytes", running)
    record_property("ended_bytes", ended)
    assert max(running, ended) < 1_300_000  # etcd takes 1.5 MiB, with spec and events
