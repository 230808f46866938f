"""A status that the API server does not take: what is stored then, and who is told."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from atoll.backends.kubernetes.client import _error
from atoll.core.errors import Denied, ObjectTooLarge, StatusRefused
from atoll.core.phase import Phase
from atoll.core.ranks import final_exits
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Exit, RankStatus, Status, Training
from atoll.operator.resource import (
    FINALIZER,
    smaller_bodies,
    status_body,
    to_resource,
    to_training,
)
from atoll.operator.store import KubernetesStore

Json = dict[str, Any]


class OneObject:
    """An API server with one Training, which takes statuses up to a length."""

    def __init__(self, most_bytes: int, refusal: Exception | None = None) -> None:
        spec = TrainingSpec(name="a", command=["x"], world_size=WorldSize(min=1, target=2, max=3))
        self.raw = to_resource(Training(namespace="n", uid="u", spec=spec))
        self.raw["metadata"] |= {
            "namespace": "n",
            "uid": "u",
            "resourceVersion": "1",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "finalizers": [FINALIZER],
        }
        self.most_bytes = most_bytes
        self.refusal = refusal
        self.events: list[Json] = []

    async def get(self, kind: str, namespace: str, name: str) -> Json:
        return self.raw

    async def patch(self, kind: str, namespace: str, name: str, body: Any, **_: Any) -> Json:
        status = body[1]["value"]
        if len(msgspec.json.encode(status)) > self.most_bytes:
            raise self.refusal or ObjectTooLarge("etcdserver: request is too large")
        version = str(int(self.raw["metadata"]["resourceVersion"]) + 1)
        metadata = {**self.raw["metadata"], "resourceVersion": version}
        self.raw = {**self.raw, "metadata": metadata, "status": status}
        return self.raw

    async def create(self, kind: str, namespace: str, body: Json) -> Json:
        self.events.append(body)
        return body


def big(phase: Phase, ranks: int = 1000) -> Status:
    rows = [
        RankStatus(
            rank=n,
            phase="Failed",
            attempt=0,
            pod_name=f"pod-{n * 7919 % 99_991}",
            started_at=n * 7919 % 99_991 / 1000,
            exit=Exit(code=n % 7, at=100 + n * 31 % 9973 / 1000, reason="Error"),
        )
        for n in range(ranks)
    ]
    status = Status(phase=phase, reason="RankFailed", ranks=rows, ended_at=200.0)
    if not phase.is_terminal:
        return status
    exits = final_exits(status, rows[0])
    return msgspec.structs.replace(status, rank_exits=exits, root_cause=exits[0])


def write(server: OneObject, *statuses: Status) -> Status:
    async def inside() -> None:
        cluster: Any = server
        store = KubernetesStore(cluster)
        try:
            for status in statuses:
                await store.update_status(await store.get(("n", "a")), status)
        finally:
            await store.close()

    asyncio.run(inside())
    return to_training(server.raw).status


def conditions(status: Status) -> dict[str, str]:
    return {c.type: c.message for c in status.conditions if c.status == "True"}


def test_a_status_that_fits_is_stored_whole() -> None:
    server = OneObject(10**6)
    assert write(server, big(Phase.FAILED)) == big(Phase.FAILED)
    assert server.events == []


def room_for(step: int, status: Status) -> int:
    """Bytes that the status needs with that much left out, and no more."""
    server = OneObject(0)
    body = status_body(to_training(server.raw), status, [])
    _, smaller = list(smaller_bodies(to_training(server.raw), status, body))[step]
    return len(msgspec.json.encode(smaller)) + 300  # and a condition


@pytest.mark.parametrize(
    ("step", "left_out", "has_codes", "has_times"),
    [
        (0, "the pods and nodes", True, True),
        (1, "all about ranks but their exit codes", True, False),
        (2, "all about the ranks", False, False),
    ],
)
def test_the_verdict_fits_whatever_room_there_is(
    step: int, left_out: str, has_codes: bool, has_times: bool
) -> None:
    whole = big(Phase.FAILED)
    server = OneObject(room_for(step, whole))
    status = write(server, whole)
    assert (status.phase, status.reason, status.root_cause) == (
        "failed",
        "RankFailed",
        whole.root_cause,
    )
    codes = [(e.rank, e.exit_code) for e in whole.rank_exits]
    assert [(e.rank, e.exit_code) for e in status.rank_exits] == (codes if has_codes else [])
    times = [e.ended_at for e in whole.rank_exits]
    assert ([e.ended_at for e in status.rank_exits] == times) == has_times
    assert left_out in conditions(status)["StatusIncomplete"]
    assert "request is too large" in conditions(status)["StatusIncomplete"]
    assert [event["reason"] for event in server.events] == ["StatusIncomplete"]


def test_what_goes_on_loses_nothing_that_it_needs() -> None:
    whole = big(Phase.READY)
    room = room_for(0, whole)
    status = write(OneObject(room), whole)
    assert [(r.attempt, r.started_at, r.exit) for r in status.ranks] == [
        (r.attempt, r.started_at, r.exit) for r in whole.ranks
    ]
    server = OneObject(room // 2)
    with pytest.raises(StatusRefused, match="too large"):
        write(server, whole)
    assert "StatusIncomplete" in conditions(to_training(server.raw).status)


def test_what_fits_again_is_whole_again() -> None:
    server = OneObject(room_for(1, big(Phase.FAILED)))
    status = write(server, big(Phase.FAILED), big(Phase.FAILED, ranks=10))
    assert status == big(Phase.FAILED, ranks=10)


@pytest.mark.parametrize("refusal", [Denied("not here"), ObjectTooLarge("too large")])
def test_a_refusal_is_told_once_however_often_it_is_tried(refusal: Exception) -> None:
    server = OneObject(0, refusal)
    for _ in range(2):
        with pytest.raises(StatusRefused):
            write(server, big(Phase.READY))
    assert len(server.events) == 2  # by two controllers, one after the other

    async def twice() -> None:
        cluster: Any = server
        store = KubernetesStore(cluster)
        for _ in range(3):
            with pytest.raises(StatusRefused):
                await store.update_status(await store.get(("n", "a")), big(Phase.READY))
        await store.close()

    asyncio.run(twice())
    assert len(server.events) == 3


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (500, "etcdserver: request is too large"),
        (500, "rpc error: trying to send message larger than max (3 vs. 2)"),
        (413, "Request entity too large: limit is 3145728"),
    ],
)
def test_the_api_servers_words_for_too_large_are_known(code: int, message: str) -> None:
    assert isinstance(_error({"message": message}, code, "trainings"), ObjectTooLarge)


def test_a_change_by_somebody_else_is_read_though_versions_are_parsed_once() -> None:
    server: Any = OneObject(10**6)

    async def inside() -> None:
        store = KubernetesStore(server)
        first = await store.get(("n", "a"))
        assert await store.get(("n", "a")) is first
        written = await store.update_status(first, big(Phase.READY, 2))
        assert await store.get(("n", "a")) is written
        assert written == to_training(server.raw), "as whoever reads it anew"
        spec = {**server.raw["spec"], "worldSize": {"min": 1, "target": 3, "max": 3}}
        metadata = {**server.raw["metadata"], "resourceVersion": "9", "generation": 2}
        server.raw = {**server.raw, "spec": spec, "metadata": metadata}
        scaled = await store.get(("n", "a"))
        assert (scaled.generation, scaled.spec.world_size.target) == (2, 3)
        assert scaled.status == written.status
        await store.close()

    asyncio.run(inside())
