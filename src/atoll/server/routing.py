"""From a path and a method to an endpoint, and from an error to an answer: the ASGI application.

Paths are looked up in a table. Slashes that are doubled or last do not count.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Endpoint = Callable[[Request], Awaitable[Response]]
OnError = Callable[[Request, Exception], Response]

NAME = "{name}"
REST = "*"


class Route(NamedTuple):
    method: str
    path: str  # `{name}` stands for one part of it, a last `*` for any number of them
    endpoint: Endpoint
    on_error: OnError


class Place(NamedTuple):
    """One path of the table."""

    methods: dict[str, Route]
    name_at: int | None  # which part of the path is the name

    @property
    def allowed(self) -> dict[str, str]:
        return {"Allow": ", ".join(sorted((*self.methods, "OPTIONS")))}


class Table:
    """Every route by the parts of its path."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._places: dict[tuple[str, ...], Place] = {}
        for route in routes:
            parts = _parts(route.path)
            name_at = parts.index(NAME) if NAME in parts else None
            place = self._places.setdefault(parts, Place({}, name_at))
            place.methods[route.method] = route
        self._depth = max(map(len, self._places), default=0)

    def find(self, path: str) -> tuple[Place, str]:
        """The place and the name in the path, empty if it has none. Raises HTTPException."""
        parts = _parts(path)
        for key in self._keys(parts):
            place = self._places.get(key)
            if place is not None:
                return place, "" if place.name_at is None else parts[place.name_at]
        raise HTTPException(404)

    def _keys(self, parts: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        """What the path may be in the table, the closest first."""
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


class Application:
    """HTTP requests to answers. `on_stray` answers those that lead to no route."""

    def __init__(self, routes: Sequence[Route], on_stray: OnError) -> None:
        self._table = Table(routes)
        self._on_stray = on_stray

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        try:
            response = await self._answer(request)
        except ClientDisconnect:  # before its body was read: there is nobody to answer
            return
        # What fails from here on has begun to be answered, and is cut off by the server.
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        on_error = self._on_stray
        try:
            place, name = self._table.find(request.scope["path"])
            route = place.methods.get(request.method)
            if route is None and request.method == "OPTIONS":
                return Response(status_code=204, headers=place.allowed)
            if route is None:
                raise HTTPException(405, headers=place.allowed)
            on_error = route.on_error
            request.scope["path_params"] = {"name": name}
            return await route.endpoint(request)
        except ClientDisconnect:
            raise
        except Exception as error:  # the door of the server: every error is an answer
            return on_error(request, error)
