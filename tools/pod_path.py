"""How much code one pod event runs: functions and files of the operator, counted by a profiler.

    python -m tools.pod_path [--list]

An operator's controller runs against an API server in memory. The last of two ranks starts to run;
counted is what follows, from the line of the watch to the status that the controller writes.
Comprehensions and lambdas are part of the function that they stand in.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import itertools
import sys
from collections.abc import AsyncIterator, Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx2
import msgspec

import atoll
from atoll.backends.kubernetes.client import Cluster
from atoll.backends.kubernetes.executor import KubernetesBackend
from atoll.backends.kubernetes.names import GATE_OPENED, INDEX
from atoll.backends.kubernetes.options import ClusterOptions
from atoll.controller.informer import Informer
from atoll.controller.loop import Controller
from atoll.core.clock import Now
from atoll.core.status import Training
from atoll.operator.store import KubernetesStore

Json = dict[str, Any]
SOURCE = Path(atoll.__file__).parent
WITHIN_S = 60.0  # a machine that is busy takes some seconds
WATCH_S = 0.05  # what a write causes through a watch comes after its answer
CREATED = "2026-01-01T00:00:00Z"
TRAINING: Json = {
    "metadata": {"name": "one", "namespace": "default"},
    "spec": {"image": "i:1", "command": ["true"], "worldSize": {"min": 2, "target": 2, "max": 2}},
}


class Server:
    """The API server: objects by kind and name, and a watch of each kind."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Json]] = collections.defaultdict(dict)
        self.watches: dict[str, list[asyncio.Queue[bytes]]] = collections.defaultdict(list)
        self._versions = itertools.count(1)
        self.changed = asyncio.Condition()

    async def put(self, kind: str, item: Json) -> Json:
        name = item["metadata"].setdefault("name", f"unnamed-{len(self.objects[kind])}")
        type = "MODIFIED" if name in self.objects[kind] else "ADDED"
        version = str(next(self._versions))
        known = {"uid": f"{kind}-{name}", "namespace": "default", "creationTimestamp": CREATED}
        item["metadata"] = known | item["metadata"] | {"resourceVersion": version}
        self.objects[kind][name] = item
        line = msgspec.json.encode({"type": type, "object": item}) + b"\n"
        for queue in self.watches[kind]:
            asyncio.get_running_loop().call_later(WATCH_S, queue.put_nowait, line)
        async with self.changed:
            self.changed.notify_all()
        return item

    async def until(self, test: Callable[[], Any]) -> None:
        async with asyncio.timeout(WITHIN_S), self.changed:
            await self.changed.wait_for(test)

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        words = request.url.path.split("/")
        at = next(i for i, word in enumerate(words) if word in WATCHED or word in WRITTEN)
        kind, name = words[at], next(iter(words[at + 1 :]), "")
        if request.url.params.get("watch"):
            return httpx2.Response(200, content=self._watch(kind))
        if request.method == "GET" and not name:
            items = list(self.objects[kind].values())
            listed = {"metadata": {"resourceVersion": str(next(self._versions))}, "items": items}
            return httpx2.Response(200, json=listed)
        stored = self.objects[kind].get(name)
        if request.method == "GET":
            return httpx2.Response(200 if stored else 404, json=stored or {"code": 404})
        body = msgspec.json.decode(request.content)
        if isinstance(body, list):  # a JSON patch: the parts of a training are replaced whole
            changes = {change["path"].split("/")[1]: change["value"] for change in body}
            changes.pop("metadata", None)
            body = {**(stored or {}), **changes}
        return httpx2.Response(200, json=await self.put(kind, _merge(deepcopy(stored or {}), body)))

    async def _watch(self, kind: str) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self.watches[kind].append(queue)
        async with self.changed:
            self.changed.notify_all()
        while True:
            yield await queue.get()


WATCHED = ("jobs", "pods", "trainings")
WRITTEN = ("configmaps", "events", "services")


def _merge(stored: Json, patch: Json) -> Json:
    for field, value in patch.items():
        is_nested = isinstance(value, dict) and isinstance(stored.get(field), dict)
        stored[field] = _merge(stored[field], value) if is_nested else value
    return stored


def pod(job: Json, rank: int, *, is_running: bool) -> Json:
    """A pod of the Job, as the Job controller and a kubelet write it."""
    template = deepcopy(job["spec"]["template"])
    state = {"running": {"startedAt": CREATED}} if is_running else {"waiting": {}}
    gate = {"terminated": {"exitCode": 0}} if is_running else {"running": {"startedAt": CREATED}}
    metadata = {**template["metadata"], "name": f"one-{rank}"}
    metadata["annotations"] = {**metadata.get("annotations", {}), INDEX: str(rank)}
    return {
        "metadata": metadata,
        "spec": {**template["spec"], "nodeName": "node-1"},
        "status": {
            "phase": "Running",
            "containerStatuses": [{"name": "rank", "state": state}],
            "initContainerStatuses": [{"name": "start-gate", "state": gate}],
        },
    }


async def count() -> dict[str, set[str]]:
    """The functions that one pod event calls, by file."""
    functions: dict[str, set[str]] = collections.defaultdict(set)

    def profile(frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        is_named = not code.co_name.startswith("<")
        if event == "call" and is_named and code.co_filename.startswith(str(SOURCE)):
            functions[str(Path(code.co_filename).relative_to(SOURCE))].add(code.co_qualname)

    server = Server()
    transport = httpx2.MockTransport(server)
    cluster = Cluster(httpx2.AsyncClient(transport=transport, base_url="http://cluster"))
    is_written = asyncio.Event()

    class Store(KubernetesStore):
        async def update_status(self, *args: Any, **options: Any) -> Training:
            training = await super().update_status(*args, **options)
            if sys.getprofile() is not None:
                sys.setprofile(None)
                is_written.set()
            return training

    store = Store(cluster)
    executor = KubernetesBackend(cluster, ClusterOptions(), is_owner=True)
    informer = Informer(store)
    await server.put("trainings", deepcopy(TRAINING))

    def world() -> Json:
        status: Json = server.objects["trainings"]["one"].get("status", {})
        return status.get("world") or {}

    controller = Controller(
        store, {executor.name: executor}, informer=informer, clock=lambda: Now.at(cluster.time())
    )
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(informer.run()), tasks.create_task(controller.run())]
        await server.until(lambda: server.objects["jobs"] and all(map(server.watches.get, WATCHED)))
        job = next(iter(server.objects["jobs"].values()))
        for rank in range(2):
            await server.put("pods", pod(job, rank, is_running=False))
        await server.until(lambda: GATE_OPENED in str(server.objects["jobs"]))
        await server.put("pods", pod(job, 0, is_running=True))
        await server.until(lambda: world().get("ready") == 1)
        await asyncio.sleep(1)  # the controller has done everything and waits
        sys.setprofile(profile)
        await server.put("pods", pod(job, 1, is_running=True))
        async with asyncio.timeout(WITHIN_S):
            await is_written.wait()
        for task in running:
            task.cancel()
    return functions


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the files and their functions")
    options = parser.parse_args()
    functions = asyncio.run(count())
    if options.list:
        for file, names in sorted(functions.items()):
            sys.stdout.write(f"{file} ({len(names)}): {', '.join(sorted(names))}\n")
    sys.stdout.write(f"{sum(map(len, functions.values()))} functions in {len(functions)} files\n")


if __name__ == "__main__":
    main()
