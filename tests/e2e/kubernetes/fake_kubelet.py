"""A kubelet that runs nothing: it reports of pods what a test wants to have happened.

It binds pods to nodes that do not exist, says that they wait at the start gate, run and end, and
lets them go when they are deleted. The API server, etcd and the Job controller are real.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from atoll.backends.kubernetes.client import Cluster
from atoll.backends.kubernetes.names import CONTAINER, GATE
from atoll.backends.kubernetes.pod import Pod
from atoll.core.errors import AtollError, Conflict, Gone, NotFound, Temporary

Json = dict[str, Any]
START = "atoll.dev/start"
AT_ONCE = 30


def node_of(rank: int) -> str:
    return f"ip-10-{rank // 65_536}-{rank // 256 % 256}-{rank % 256}.eu-west-1.compute.internal"


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class FakeKubelet:
    """All pods of a namespace are on it. `exit_code` gives the code of a rank that is to end."""

    def __init__(
        self, cluster: Cluster, namespace: str, exit_code: Callable[[int], int | None]
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._exit_code = exit_code
        self.pods: dict[str, Json] = {}
        self._busy: set[str] = set()
        self._again: set[str] = set()
        self._due: asyncio.Queue[str] = asyncio.Queue()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            for _ in range(AT_ONCE):
                tasks.create_task(self._work())

    def look_again(self) -> None:
        """`exit_code` answers otherwise now."""
        for name in self.pods:
            self._due.put_nowait(name)

    async def _follow(self) -> None:
        while True:
            pods = await self._cluster.list("pods", self._namespace)
            self.pods = {pod["metadata"]["name"]: pod for pod in pods.items}
            self.look_again()
            version = pods.version
            with contextlib.suppress(Gone, Temporary):
                while True:
                    async for event in self._cluster.watch("pods", self._namespace, after=version):
                        metadata = event.object["metadata"]
                        version = metadata["resourceVersion"]
                        if event.type == "DELETED":
                            self.pods.pop(metadata["name"], None)
                        elif event.type != "BOOKMARK":
                            self.pods[metadata["name"]] = event.object
                            self._due.put_nowait(metadata["name"])

    async def _work(self) -> None:
        while True:
            name = await self._due.get()
            if name in self._busy:
                self._again.add(name)  # it has changed meanwhile
                continue
            if name not in self.pods:
                continue
            self._busy.add(name)
            try:
                await self._step(name, Pod(self.pods[name]))
            except (NotFound, Conflict):
                pass
            except AtollError:
                self._due.put_nowait(name)
            finally:
                self._busy.discard(name)
                if name in self._again:
                    self._again.discard(name)
                    self._due.put_nowait(name)

    async def _step(self, name: str, pod: Pod) -> None:
        if pod.rank < 0:
            return
        if pod.is_leaving:
            if not pod.is_over and pod.node is not None:
                await self._report(name, _ended(143, pod))
            await self._cluster.delete_now("pods", self._namespace, name)
        elif pod.node is None:
            body = {"target": {"kind": "Node", "name": node_of(pod.rank)}}
            await self._cluster.bind(self._namespace, name, body)
        elif pod.is_over:
            return
        elif "running" in pod.state:
            if (code := self._exit_code(pod.rank)) is not None:
                await self._report(name, _ended(code, pod))
        elif not _is_gated(pod) or START in pod.annotations:
            await self._report(name, _running(pod))
        elif not pod.is_gate_up:
            await self._report(name, _at_gate())

    async def _report(self, name: str, status: Json) -> None:
        pod = await self._cluster.patch(
            "pods", self._namespace, name, {"status": status}, type="strategic", part="status"
        )
        self.pods[name] = pod
        self._due.put_nowait(name)


class KubeletCluster(Cluster):
    """A client that may also bind pods and delete them at once."""

    async def bind(self, namespace: str, name: str, body: Json) -> None:
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/binding"
        await self._send("create", "bindings", path, body={"metadata": {"name": name}, **body})

    async def delete_now(self, kind: str, namespace: str, name: str) -> None:
        path = f"/api/v1/namespaces/{namespace}/{kind}/{name}"
        await self._send("delete", kind, path, body={"gracePeriodSeconds": 0})


def _is_gated(pod: Pod) -> bool:
    return any(c["name"] == GATE for c in pod.spec.get("initContainers") or ())


def _container(name: str, state: Json) -> Json:
    return {"name": name, "image": "x", "imageID": "", "ready": False, "restartCount": 0,
            "state": state}  # fmt: skip


def _at_gate() -> Json:
    gate = _container(GATE, {"running": {"startedAt": now()}})
    return {"phase": "Pending", "initContainerStatuses": [gate]}


def _running(pod: Pod) -> Json:
    rank = _container(CONTAINER, {"running": {"startedAt": now()}})
    status: Json = {"phase": "Running", "containerStatuses": [rank]}
    if _is_gated(pod):
        end = {"exitCode": 0, "startedAt": now(), "finishedAt": now()}
        status["initContainerStatuses"] = [_container(GATE, {"terminated": end})]
    return status


def _ended(code: int, pod: Pod) -> Json:
    began = (pod.state.get("running") or {}).get("startedAt") or now()
    end = {
        "exitCode": code,
        "reason": "Error" if code else "Completed",
        "startedAt": began,
        "finishedAt": now(),
        "message": "sh: 1: pyhton: not found" if code == 127 else "",
    }
    rank = _container(CONTAINER, {"terminated": end})
    return {"phase": "Failed" if code else "Succeeded", "containerStatuses": [rank]}
