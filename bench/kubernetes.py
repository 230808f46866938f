"""What watching a gang costs the API server, by its size: requests and time a look.

    KUBEBUILDER_ASSETS=… python bench/kubernetes.py [N …]

Against a real API server and Job controller. No node runs the pods: their statuses are written
through the API as a kubelet would write them. Beside each look, in the same run, what asking for
each rank by itself costs.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "src")]

from tests.e2e.kubernetes.control_plane import ControlPlane, assets  # noqa: E402

from atoll.backends.kubernetes.client import Cluster, gather  # noqa: E402
from atoll.backends.kubernetes.executor import KubernetesBackend  # noqa: E402
from atoll.backends.kubernetes.options import KubernetesOptions  # noqa: E402
from atoll.core.errors import Temporary  # noqa: E402
from atoll.core.spec import TrainingSpec, WorldSize  # noqa: E402
from atoll.core.status import DesiredState, Training  # noqa: E402

LOOKS = 20
IDLE_S = 10.0


async def measure(cluster: Cluster, size: int) -> dict[str, Any]:
    executor = KubernetesBackend(cluster, KubernetesOptions(image="none:1"))
    world = WorldSize(min=1, target=size, max=size)
    spec = TrainingSpec(
        name=f"bench-{size}", command=["true"], world_size=world, executor="kubernetes"
    )
    training = Training(
        namespace="default", uid=str(uuid.uuid4()), spec=spec, created_at=time.time()
    )
    asked = cluster.requests.total()
    started = time.perf_counter()
    await executor.apply(training, DesiredState(version=1, size=size))
    asked = cluster.requests.total() - asked
    await _until(lambda: _are_made(cluster, training))
    made_s = time.perf_counter() - started
    await _hand_played_kubelet(cluster, training)
    row: dict[str, Any] = {"ranks": size, "startRequests": asked, "podsMadeS": round(made_s, 2)}
    await executor.observe(training)
    row |= await _looks(executor, cluster, training, "list")
    row |= await _one_by_one(cluster, training)
    row |= await _watched(executor, cluster, training)
    await executor.release(training)
    await _purge(executor, training)
    return row


async def _pods(cluster: Cluster, training: Training) -> list[dict[str, Any]]:
    labels = f"atoll.dev/uid={training.uid}"
    return (await cluster.list("pods", "default", labels=labels)).items


async def _until(test: Callable[[], Awaitable[bool]]) -> None:
    while True:
        if await test():
            return
        await asyncio.sleep(0.2)


async def _are_made(cluster: Cluster, training: Training) -> bool:
    return len(await _pods(cluster, training)) >= training.spec.world_size.target


async def _are_live(executor: KubernetesBackend) -> bool:
    return executor._jobs.is_live and executor._pods.is_live


async def _hand_played_kubelet(cluster: Cluster, training: Training) -> None:
    """Every pod Running, with a container status as a kubelet reports it."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    container = {
        "name": "rank",
        "image": "none:1",
        "imageID": "",
        "restartCount": 0,
        "ready": True,
        "started": True,
        "state": {"running": {"startedAt": now}},
    }
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": now}
    status = {
        "phase": "Running",
        "conditions": [ready, {"type": "PodScheduled", "status": "True"}],
        "containerStatuses": [container],
    }
    names = [p["metadata"]["name"] for p in await _pods(cluster, training)]
    body = {"status": status}
    await gather(
        20,
        [
            cluster.patch("pods", "default", name, body, type="strategic", part="status")
            for name in names
        ],
    )


async def _purge(executor: KubernetesBackend, training: Training) -> None:
    """As the controller does it: an API server that is slow to answer is asked again."""
    for _ in range(20):
        try:
            return await executor.purge(training)
        except Temporary as error:
            print(error)


async def _looks(
    executor: KubernetesBackend, cluster: Cluster, training: Training, how: str
) -> dict[str, Any]:
    before, times = cluster.requests.total(), []
    used = time.process_time()
    for _ in range(LOOKS):
        started = time.perf_counter()
        observation = await executor.observe(training)
        times.append(time.perf_counter() - started)
    running = sum(rank.state == "running" for rank in observation.ranks)
    assert running == training.spec.world_size.target, running
    return {
        f"{how}RequestsALook": (cluster.requests.total() - before) / LOOKS,
        f"{how}MedianMs": round(statistics.median(times) * 1000, 2),
        f"{how}CpuMs": round((time.process_time() - used) / LOOKS * 1000, 2),
    }


async def _one_by_one(cluster: Cluster, training: Training) -> dict[str, Any]:
    """The naive way: one read for each rank."""
    pods = await _pods(cluster, training)
    before, started = cluster.requests.total(), time.perf_counter()
    for pod in pods:
        await cluster.get("pods", "default", pod["metadata"]["name"])
    return {
        "naiveRequestsALook": cluster.requests.total() - before,
        "naiveMs": round((time.perf_counter() - started) * 1000, 2),
    }


async def _watched(
    executor: KubernetesBackend, cluster: Cluster, training: Training
) -> dict[str, Any]:
    follower = asyncio.create_task(_drain(executor.changes()))
    await _until(lambda: _are_live(executor))
    await asyncio.sleep(1.0)  # until both watches are open
    row = await _looks(executor, cluster, training, "watch")
    before = cluster.requests.total()
    await asyncio.sleep(IDLE_S)
    row["requestsIdle10s"] = cluster.requests.total() - before
    follower.cancel()
    await asyncio.gather(follower, return_exceptions=True)
    return row


async def _drain(changes: Any) -> None:
    async for _ in changes:
        pass


async def run(kubeconfig: str, sizes: list[int]) -> list[dict[str, Any]]:
    cluster = Cluster.connect(kubeconfig=kubeconfig)
    try:
        return [await measure(cluster, size) for size in sizes]
    finally:
        await cluster.close()


def main() -> None:
    sizes = [int(word) for word in sys.argv[1:]] or [1, 100, 1000]
    binaries = assets()
    if binaries is None:
        sys.exit("KUBEBUILDER_ASSETS is not set")
    with tempfile.TemporaryDirectory() as folder:
        plane = ControlPlane(Path(folder), binaries)
        try:
            plane.start()
            rows = asyncio.run(run(str(plane.kubeconfig), sizes))
        finally:
            plane.stop()
    for row in rows:
        print(" ".join(f"{name}={value}" for name, value in row.items()))
    result = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "loadAverage": os.getloadavg(),
        "rows": rows,
    }
    path = REPOSITORY / "bench" / "results" / "kubernetes.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
