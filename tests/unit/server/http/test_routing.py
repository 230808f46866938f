"""Paths and methods to routes, and what is said where there is none."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from atoll.server.http.routing import Application, Route, Table


async def endpoint(request: Request) -> Response:
    return Response(request.path_params["name"])


def on_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    return Response(type(error).__name__, status, headers)


PATHS = ("/v1/all", "/v1/all/{name}", "/v1/all/{name}/logs", "/old/*", "/v1/all/{name}/old/*")
ROUTES = [
    *(Route("GET", path, endpoint, on_error) for path in PATHS),
    Route("DELETE", "/v1/all/{name}", endpoint, on_error),
]


@pytest.mark.parametrize(
    ("path", "route", "name"),
    [
        ("/v1/all", "/v1/all", ""),
        ("//v1//all/", "/v1/all", ""),
        ("/v1/all/a", "/v1/all/{name}", "a"),
        ("/v1/all/{name}", "/v1/all/{name}", "{name}"),
        ("/v1/all/all/logs", "/v1/all/{name}/logs", "all"),
        ("/old", "/old/*", ""),
        ("/old/a/b/c/d/e/f/g/h", "/old/*", ""),
        ("/v1/all/a/old", "/v1/all/{name}/old/*", "a"),
        ("/v1/all/a/old/b", "/v1/all/{name}/old/*", "a"),
    ],
)
def test_a_path_leads_to_its_route(path: str, route: str, name: str) -> None:
    place, found = Table(ROUTES).find(path)
    assert (place.methods["GET"].path, found) == (route, name)


@pytest.mark.parametrize(
    "path", ["", "/", "/v1", "/v1/all/a/b", "/v1/all/a/logs/b", "/older", "/a" * 100_000]
)
def test_any_other_path_is_not_found(path: str) -> None:
    with pytest.raises(HTTPException) as refusal:
        Table(ROUTES).find(path)
    assert refusal.value.status_code == 404


def asked(method: str, path: str, *, is_gone: bool = False) -> list[Any]:
    """What the application sends."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.disconnect"} if is_gone else {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def read(request: Request) -> Response:
        await request.body()
        return Response("read")

    async def broken(request: Request) -> Response:
        raise ValueError("a mistake")

    routes = [
        *ROUTES,
        Route("POST", "/read", read, on_error),
        Route("GET", "/broken", broken, on_error),
    ]
    scope = {"type": "http", "method": method, "path": path, "headers": [], "query_string": b""}
    asyncio.run(Application(routes, on_error, lambda _: None)(scope, receive, send))
    return sent


def test_a_method_that_there_is_not_is_refused_with_those_there_are() -> None:
    start, _ = asked("PUT", "/v1/all/a")
    assert start["status"] == 405
    assert (b"allow", b"DELETE, GET, OPTIONS") in start["headers"]
    assert asked("HEAD", "/v1/all")[0]["status"] == 405


def test_options_are_told() -> None:
    start, body = asked("OPTIONS", "/v1/all/a")
    assert (start["status"], body["body"]) == (204, b"")
    assert (b"allow", b"DELETE, GET, OPTIONS") in start["headers"]


def test_any_error_is_an_answer_and_a_client_that_left_gets_none() -> None:
    assert asked("GET", "/broken")[1]["body"] == b"ValueError"
    assert asked("POST", "/read")[1]["body"] == b"read"
    assert asked("POST", "/read", is_gone=True) == []
