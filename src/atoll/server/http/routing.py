"""Routing: the ASGI application that finds the endpoint of a request and answers its errors.

Paths are looked up in a table. Doubled and trailing slashes are ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]
OnError = Callable[[Request, Exception], Response]

LINGER_S = 10.0
NAME = "{name}"
REST = "*"


class Route(NamedTuple):
    method: str
    path: str  # `{name}` stands for one part of it, a last `*` for any number of them
    endpoint: Endpoint
    on_error: OnError


class PathRoutes(NamedTuple):
    """The routes of one path, by method."""

    methods: dict[str, Route]
    name_at: int | None  # which part of the path is the name

    @property
    def allowed(self) -> dict[str, str]:
        return {"Allow": ", ".join(sorted((*self.methods, "OPTIONS")))}


class Table:
    """Every route by the parts of its path."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._paths: dict[tuple[str, ...], PathRoutes] = {}
        for route in routes:
            parts = _parts(route.path)
            name_at = parts.index(NAME) if NAME in parts else None
            path_routes = self._paths.setdefault(parts, PathRoutes({}, name_at))
            path_routes.methods[route.method] = route
        self._depth = max(map(len, self._paths), default=0)

    def find(self, path: str) -> tuple[PathRoutes, str]:
        """The routes of a path and the name in it, empty if it has none. Raises a 404."""
        parts = _parts(path)
        for key in self._keys(parts):
            routes = self._paths.get(key)
            if routes is not None:
                return routes, "" if routes.name_at is None else parts[routes.name_at]
        raise HTTPException(404)

    def _keys(self, parts: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """The keys under which the path may be in the table, the closest first."""
        if len(parts) <= self._depth:
            yield from _with_name(parts)
        for end in range(min(len(parts), self._depth), 0, -1):
            for key in _with_name(parts[:end]):
                yield (*key, REST)


def _with_name(parts: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The parts as they are, then with each of them taken for the name."""
    yield parts
    for at in range(len(parts)):
        yield (*parts[:at], NAME, *parts[at + 1 :])


def _parts(path: str) -> tuple[str, ...]:
    return tuple(filter(None, path.split("/")))


async def _lingering(response: Response, request: Request, send: Send) -> None:
    """Answers, and reads on for a while before the connection is closed: a client that is still
    sending then would see it broken, and not the answer."""
    start = {"status": response.status_code, "headers": response.raw_headers}
    await send({"type": "http.response.start", **start})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while (await request.receive()).get("more_body"):
                pass
    await send({"type": "http.response.body", "body": b""})


class Application:
    """Answers HTTP requests. `check` raises for those that get no answer of a route, and `on_stray`
    answers these and those that match none."""

    def __init__(
        self, routes: Sequence[Route], on_stray: OnError, check: Callable[[Request], None]
    ) -> None:
        self._table = Table(routes)
        self._on_stray = on_stray
        self._check = check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        try:
            response = await self._answer(request)
        except ClientDisconnect:  # nobody is left to answer
            return
        # An error from here on cuts the connection: the answer has already begun.
        if response.status_code == 413:
            await _lingering(response, request, send)
        else:
            await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        on_error = self._on_stray
        try:
            self._check(request)
            path_routes, name = self._table.find(request.scope["path"])
            route = path_routes.methods.get(request.method)
            if route is None and request.method == "OPTIONS":
                return Response(status_code=204, headers=path_routes.allowed)
            if route is None:
                raise HTTPException(405, headers=path_routes.allowed)
            on_error = route.on_error
            request.scope["path_params"] = {"name": name}
            return await route.endpoint(request)
        except ClientDisconnect:
            raise
        except Exception as error:  # the edge of the server: every error becomes an answer
            return on_error(request, error)
