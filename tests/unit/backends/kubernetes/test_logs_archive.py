"""The log of a rank that is scaled away: read before its pod goes, kept if its stream breaks."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import msgspec
import pytest

from atoll.backends.kubernetes import logs
from atoll.backends.kubernetes.client import Cluster
from atoll.backends.kubernetes.executor import KubernetesBackend
from atoll.core.status import DesiredState
from tests.unit.backends.kubernetes.kube import Json, Options, job, pod, running, training

BREAKS = httpx2.ReadError("the container is gone")


class Broken(httpx2.AsyncByteStream):
    """A log that is cut off while it is followed."""

    async def __aiter__(self) -> Any:
        yield b"rank 2 of 3\nstopping\n"
        raise BREAKS


class Server:
    """A cluster with one gang of three; `asked` are the requests in order."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.kept: dict[str, str] = {}
        self.gang = job(3)
        self.gang["metadata"] |= {"name": "x", "resourceVersion": "5", "uid": "j"}
        self.logs = 0
        self.is_kept = asyncio.Event()

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        what = request.url.path.removeprefix("/api/v1/namespaces/team-a/")
        self.asked.append(f"{request.method} {what.split('/')[-1]}")
        if what.endswith("/log"):
            self.logs += 1
            if self.logs == 1:
                return httpx2.Response(200, stream=Broken())
            return httpx2.Response(404, json={"kind": "Status", "code": 404})
        if "/jobs/" in what:
            return httpx2.Response(200, json=self.gang)
        if what == "pods":
            return httpx2.Response(200, json={"metadata": {"resourceVersion": "5"}, "items": PODS})
        if request.method == "PATCH" and "log" in (data := body_of(request).get("data") or {}):
            self.kept[what] = data["log"]
            self.is_kept.set()
        return httpx2.Response(200, json={"metadata": {"resourceVersion": "5"}})


def body_of(request: httpx2.Request) -> Json:
    body: Json = msgspec.json.decode(request.content)
    return body


def with_uid(rank: int) -> Json:
    made = pod(rank, running())
    made["metadata"] |= {"uid": f"u-{rank}", "name": f"p-{rank}", "ownerReferences": []}
    made["metadata"]["resourceVersion"] = str(rank)
    return made


PODS = [with_uid(rank) for rank in range(3)]


@pytest.mark.parametrize("is_closed_at_once", [False, True])
def test_a_scale_down_reads_the_logs_first_and_keeps_what_was_read(
    is_closed_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "AGAIN_S", 0.01)
    monkeypatch.setattr(logs, "CLOSE_S", 30.0)
    server = Server()

    async def test() -> None:
        client = httpx2.AsyncClient(
            transport=httpx2.MockTransport(server), base_url="https://kubernetes"
        )
        backend = KubernetesBackend(Cluster(client), Options(namespace="team-a"))
        await backend.apply(training(), DesiredState(version=2, size=2))
        if not is_closed_at_once:
            async with asyncio.timeout(30):
                await server.is_kept.wait()
        await backend.close()

    asyncio.run(test())
    patched = next(at for at, what in enumerate(server.asked) if what.startswith("PATCH tiny"))
    assert "GET log" in server.asked[:patched]  # the log of rank 2 alone
    assert server.kept == {"configmaps/p-2": "rank 2 of 3\nstopping\n"}
