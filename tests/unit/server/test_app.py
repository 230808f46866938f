"""Which endpoint answers a path and a method, and what answers where there is none."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from atoll.server.app import create_app
from atoll.server.http.operations import PathEndpoint
from atoll.store.database import SQLiteTokens
from atoll.store.sqlite import SQLiteStore


def call(
    app: Any, method: str, path: str, *, has_left: bool = False
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body that the application sends; status 0 if it sends nothing."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.disconnect"} if has_left else {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(b"host", b"plane")],
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "server": ("plane", 80),
    }
    asyncio.run(app(scope, receive, send))
    if not sent:
        return 0, {}, b""
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(part["body"] for part in sent[1:])


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("app") / "db"
    return create_app(store=SQLiteStore(path), tokens=SQLiteTokens(path), executors={})


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/healthz", 200),
        ("GET", "//healthz/", 200),
        ("GET", "/v1/trainings", 401),
        ("GET", "/v1/trainings/a", 401),
        ("GET", "/v1/trainings/a/logs", 401),
        ("GET", "//v1//trainings/a/", 401),
        ("GET", "/", 200),
        ("GET", "/t/a", 200),
        ("GET", "/t/a/r/5", 200),
        ("GET", "/deployments", 401),
        ("GET", "/rentals", 501),
        ("POST", "/rentals/a/b/c/d/e", 501),
        ("GET", "/deployments/a/share-token", 501),
        ("GET", "/v1", 404),
        ("GET", "/v1/trainings/a/b", 404),
        ("GET", "/v1/trainings/a/logs/b", 404),
        ("GET", "/rentalsx", 404),
        ("GET", "/assets/nothing", 404),
        ("GET", "/a" * 100_000, 404),
    ],
)
def test_a_path_leads_to_its_endpoint(app: Any, method: str, path: str, status: int) -> None:
    assert call(app, method, path)[0] == status


def test_an_unknown_path_is_answered_in_the_dialect_of_the_client(app: Any) -> None:
    assert json.loads(call(app, "GET", "/v1/none")[2])["title"] == "NotFound"
    body = json.loads(call(app, "GET", "/deployments/a/none")[2])
    assert body["error"]["code"] == "BASILICA_API_NOT_FOUND"


def test_an_unknown_method_is_refused_with_those_that_exist(app: Any) -> None:
    status, headers, _ = call(app, "PUT", "/v1/trainings/a")
    assert (status, headers["allow"]) == (405, "DELETE, GET, OPTIONS")
    assert call(app, "HEAD", "/v1/trainings")[0] == 405
    status, headers, body = call(app, "OPTIONS", "/v1/trainings/a")
    assert (status, headers["allow"], body) == (204, "DELETE, GET, OPTIONS", b"")


def test_any_error_is_an_answer_and_a_client_that_left_gets_none() -> None:
    async def read(request: Request) -> Response:
        await request.body()
        return Response("read")

    async def broken(request: Request) -> Response:
        raise ValueError("a mistake")

    def on_error(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        return Response(type(error).__name__, status)

    endpoint = PathEndpoint({"GET": broken, "POST": read}, on_error)
    assert call(endpoint, "GET", "/")[2] == b"ValueError"
    assert call(endpoint, "POST", "/")[2] == b"read"
    assert call(endpoint, "POST", "/", has_left=True) == (0, {}, b"")
