"""Lists of many objects and watches, as an API server answers them: page by page, and lean."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from atoll.backends.kubernetes.client import PAGES, Cluster
from atoll.backends.kubernetes.pod import Pod, parsed
from atoll.core.errors import Gone, Temporary
from tests.unit.backends.kubernetes.kube import Json, pod, running

Answer = Callable[[httpx2.Request], httpx2.Response]
EXPIRED = {"kind": "Status", "metadata": {}, "status": "Failure", "code": 410, "message": "old"}


def cluster_of(answer: Answer) -> Cluster:
    transport = httpx2.MockTransport(answer)
    return Cluster(httpx2.AsyncClient(transport=transport, base_url="https://kubernetes"))


def whole(rank: int) -> Json:
    """A pod with what a server adds that nobody here reads."""
    made = pod(rank, running())
    made["metadata"] |= {"name": f"p-{rank}", "managedFields": [{"manager": "kubelet"}] * 50}
    made["metadata"]["resourceVersion"] = str(100 + rank)
    made["spec"]["containers"][0] |= {"name": "rank", "env": [{"name": "A", "value": "b"}] * 50}
    return made


class Server:
    """An API server with so many pods, which forgets its lists so many times."""

    def __init__(self, pods: int, expiring: int = 0) -> None:
        self.pods = [whole(rank) for rank in range(pods)]
        self.expiring = expiring
        self.asked: list[dict[str, str]] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        params = dict(request.url.params)
        self.asked.append(params)
        first, limit = int(params.get("continue", 0)), int(params["limit"])
        if first and self.expiring:
            self.expiring -= 1
            return httpx2.Response(410, json=EXPIRED)
        metadata = {"resourceVersion": "7"}
        if first + limit < len(self.pods):
            metadata["continue"] = str(first + limit)
        body = {"metadata": metadata, "items": self.pods[first : first + limit]}
        return httpx2.Response(200, json=body)


def names(items: list[Json]) -> list[str]:
    return [item["metadata"]["name"] for item in items]


def test_a_list_is_read_in_pages_that_are_bounded() -> None:
    server = Server(pods=1_201)
    listed = asyncio.run(cluster_of(server).list("pods", "team-a", labels="a=b", version="7"))
    assert names(listed.items) == names(server.pods)
    assert listed.version == "7"
    assert {params["limit"] for params in server.asked} == {str(PAGES["pods"])}
    assert len(server.asked) == 3
    # The version is in the continue token; a server refuses both together.
    assert ["resourceVersion" in params for params in server.asked] == [True, False, False]
    assert all(params["labelSelector"] == "a=b" for params in server.asked)


def test_a_list_that_expires_half_way_begins_anew() -> None:
    server = Server(pods=1_201, expiring=2)
    assert len(asyncio.run(cluster_of(server).list("pods")).items) == 1_201
    with pytest.raises(Temporary, match="did not end"):
        asyncio.run(cluster_of(Server(pods=1_201, expiring=99)).list("pods"))
    with pytest.raises(Gone):  # of an earlier version, nothing more can be had
        asyncio.run(cluster_of(Server(pods=1_201, expiring=1)).list("pods", version="7"))


def test_of_pods_only_what_is_read_is_held_and_what_they_have_alike_once() -> None:
    items = asyncio.run(cluster_of(Server(pods=3)).list("pods")).items
    assert all("managedFields" not in item["metadata"] for item in items)
    first, _, third = pods = list(map(Pod.shared, items))
    assert "env" not in first.spec["containers"][0]
    assert first.spec["containers"] is third.spec["containers"]
    assert [(p.rank, p.node, p.started_at is not None) for p in pods] == [
        (rank, "node-1", True) for rank in range(3)
    ]


def test_of_a_list_only_the_pods_that_have_changed_are_parsed_again() -> None:
    server = Server(pods=3)
    cluster = cluster_of(server)

    def pods(known: list[Pod]) -> list[Pod]:
        return parsed(asyncio.run(cluster.list("pods")).items, known)

    before = pods([])
    server.pods[1] = whole(1) | {"status": {"phase": "Failed"}}
    server.pods[1]["metadata"]["resourceVersion"] = "200"
    after = pods(before)
    assert [pod is old for pod, old in zip(after, before, strict=True)] == [True, False, True]
    assert [pod.is_over for pod in after] == [False, True, False]
    assert pods(after[1:])[0] is not before[0]


def events(*bodies: Any) -> Answer:
    text = "\n".join(json.dumps(body) for body in bodies) + "\n"
    return lambda request: httpx2.Response(200, text=text)


def test_a_watch_takes_bookmarks_as_servers_write_them() -> None:
    bookmark = {
        "type": "BOOKMARK",
        "object": {
            "kind": "Pod",
            "metadata": {"resourceVersion": "12", "creationTimestamp": None},
            "spec": {"containers": None},
            "status": {},
        },
    }

    async def watch() -> list[tuple[str, str]]:
        cluster = cluster_of(events({"type": "ADDED", "object": whole(0)}, bookmark))
        found = [event async for event in cluster.watch("pods", after="1")]
        return [(e.type, e.object["metadata"].get("resourceVersion", "")) for e in found]

    assert asyncio.run(watch()) == [("ADDED", "100"), ("BOOKMARK", "12")]


@pytest.mark.parametrize(
    ("line", "error"),
    [({"type": "ERROR", "object": EXPIRED}, Gone), ({"type": "ADDED", "object": 7}, Temporary)],
)
def test_a_watch_that_fails_says_how(line: Json, error: type[Exception]) -> None:
    async def watch() -> None:
        async for _ in cluster_of(events(line)).watch("pods", after="1"):
            pass

    with pytest.raises(error):
        asyncio.run(watch())
