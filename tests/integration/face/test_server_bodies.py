"""One request does not hurt the others: large bodies are refused early, and decoded aside."""

from __future__ import annotations

import base64
import json
import socket
import threading
from typing import Any

import pytest

import atoll
from atoll.core.spec import MAX_SPEC_BYTES
from atoll.server.http import operations

from .conftest import Served

WORLD = {"min": 1, "target": 1, "max": 1}


def spec(name: str = "a", **fields: Any) -> dict[str, Any]:
    return {"name": name, "worldSize": WORLD, "command": ["true"], **fields}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("args", ["x" * 2 * 2**20]),
        ("args", ["x"] * 300_000),
        ("env", {"A": "x" * 2 * 2**20}),
        ("command", ["true", "x" * 2 * 2**20]),
    ],
)
def test_a_spec_of_more_than_a_mebibyte_is_refused_by_its_largest_field(
    served: Served, field: str, value: Any
) -> None:
    answer = served.http.post("/v1/trainings", json=spec(**{field: value}))
    told = answer.json()
    assert (answer.status_code, told["field"]) == (413, field)
    assert str(MAX_SPEC_BYTES) in told["detail"]
    assert served.http.get("/v1/trainings").json()["items"] == []
    options: Any = {"command": ["true"], field: value}
    with served.sdk() as client, pytest.raises(atoll.ValidationError, match="1 MiB") as refused:
        client.deploy_distributed("a", **options)
    assert refused.value.field == field
    block = {"worldSize": WORLD, "command": "true"}
    foreign = {"instanceName": "a", "image": "x" * 2**21, "distributed": block}
    assert served.http.post("/deployments", json=foreign).status_code == 413


def test_code_may_be_larger_than_a_spec(served: Served) -> None:
    code = base64.b64encode(b"#" * 5 * 2**20).decode()
    body = spec("a", source={"kind": "script", "content": code}, args=["x" * 2**19])
    del body["command"]
    assert served.http.post("/v1/trainings", json=body).status_code == 201


def test_millions_of_arguments_are_refused_while_they_arrive(served: Served) -> None:
    host, _, port = served.url.removeprefix("http://").partition(":")
    head = (
        "POST /v1/trainings HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer token-one\r\n"
        "Content-Length: 60000000\r\n\r\n"
    )
    begun = json.dumps(spec(args=["x"] * 600_000)).encode()[:-2] + b","
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head.encode() + begun)  # a thirtieth of what was announced
        answer = b""
        while b'"field":"args"' not in answer and (more := connection.recv(2**16)):
            answer += more
    assert b" 413 " in answer.splitlines()[0]
    assert b'"field":"args"' in answer


def test_others_are_answered_while_a_large_body_is_decoded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, begun, go_on = operations.decode, threading.Event(), threading.Event()

    def slow(data: bytes, kind: Any) -> Any:
        if len(data) > operations.DIRECT_BYTES:
            begun.set()
            assert go_on.wait(30)
        return real(data, kind)

    monkeypatch.setattr(operations, "decode", slow)
    answers: list[int] = []

    def create() -> None:
        body = spec(args=["x" * 2 * operations.DIRECT_BYTES])
        answers.append(served.http.post("/v1/trainings", json=body).status_code)

    creating = threading.Thread(target=create)
    creating.start()
    assert begun.wait(30)
    with served.client("two") as other:
        assert other.get("/v1/trainings").status_code == 200
        assert other.post("/v1/trainings", json=spec()).status_code == 201
    go_on.set()
    creating.join(30)
    assert answers == [201]


def test_large_bodies_of_one_namespace_take_turns_and_leave_room_for_others(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, inside, go_on = operations.decode, threading.Semaphore(0), threading.Event()
    now, most = 0, 0
    lock = threading.Lock()

    def slow(data: bytes, kind: Any) -> Any:
        nonlocal now, most
        if len(data) > operations.LARGE_BYTES:
            with lock:
                now += 1
                most = max(most, now)
            inside.release()
            assert go_on.wait(30)
            with lock:
                now -= 1
        return real(data, kind)

    monkeypatch.setattr(operations, "decode", slow)
    code = base64.b64encode(b"#" * 2 * 2**20).decode()
    answers: list[int] = []

    def create(namespace: str, name: str) -> None:
        body = spec(name, source={"kind": "script", "content": code})
        del body["command"]
        with served.client(namespace) as http:
            answers.append(http.post("/v1/trainings", json=body).status_code)

    creates = [("one", "a"), ("one", "b"), ("one", "c"), ("two", "a"), ("two", "b")]
    creating = [threading.Thread(target=create, args=desired) for desired in creates]
    for thread in creating:
        thread.start()
    for _ in range(2):
        assert inside.acquire(timeout=30)
    assert served.http.get("/healthz").status_code == 200
    go_on.set()
    for thread in creating:
        thread.join(30)
    assert (answers, most) == ([201] * 5, 2)
