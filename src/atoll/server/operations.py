"""What an endpoint is: one row that makes both the route and its part of the OpenAPI document.

Queries and bodies are msgspec structs, so what is documented is what is checked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from litestar import Request, Response
from litestar.handlers import HTTPRouteHandler
from litestar.response import Stream

from atoll.core.checks import check_name
from atoll.core.errors import ValidationError
from atoll.core.model import decode, encode, named
from atoll.core.ports import Executor, Store, Tokens
from atoll.server.executors import Setup
from atoll.server.streams import Streams

Q = TypeVar("Q", bound=msgspec.Struct)
Method = Literal["GET", "POST", "DELETE", "PUT", "PATCH"]

JSON = "application/json"
NDJSON = "application/x-ndjson"
SSE = "text/event-stream"


class Query(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of all queries: an unknown option is refused, not ignored."""


class NoQuery(Query, frozen=True):
    """For endpoints without options."""


@dataclass(frozen=True)
class Plane:
    """All that handlers act on."""

    store: Store
    tokens: Tokens
    executors: Mapping[str, Executor]
    streams: Streams = field(default_factory=Streams)
    setup: Setup = field(default_factory=Setup)


@dataclass(frozen=True)
class Call:
    """One request, decoded and checked."""

    plane: Plane
    request: Request[Any, Any, Any]
    namespace: str
    name: str
    query: Any
    body: Any

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name


Answer = Response[Any]
Handler = Callable[[Call], Awaitable[Answer]]
# Who calls: the namespace, or Denied. `None` for an endpoint that is open to all.
Guard = Callable[[Plane, Request[Any, Any, Any]], Awaitable[str]]


class Said(NamedTuple):
    """One documented answer."""

    what: str
    body: Any = None  # a type
    media_type: str = JSON


@dataclass(frozen=True)
class Operation:
    """One row of the API."""

    method: Method
    path: str  # with {name} where a training is named
    handler: Handler
    summary: str
    answers: Mapping[int, Said]
    query: type[Query] = NoQuery
    body: type | None = None
    headers: Mapping[str, str] = field(default_factory=dict)  # those read: name, what for
    is_open: bool = False

    @property
    def is_named(self) -> bool:
        return "{name}" in self.path


def routes(operations: Sequence[Operation], plane: Plane, guard: Guard) -> list[HTTPRouteHandler]:
    return [_route(operation, plane, guard) for operation in operations]


def _route(operation: Operation, plane: Plane, guard: Guard) -> HTTPRouteHandler:
    async def run(request: Request[Any, Any, Any]) -> Response[Any]:
        namespace = "" if operation.is_open else await guard(plane, request)
        name = request.path_params.get("name", "")
        if operation.is_named:
            check_name("name", name)
        query = read_query(request, operation.query)
        body = None if operation.body is None else decode(await request.body(), operation.body)
        return await operation.handler(Call(plane, request, namespace, name, query, body))

    handler = HTTPRouteHandler(
        operation.path.replace("{name}", "{name:str}"),
        http_method=operation.method,
        status_code=min(operation.answers),
        name=f"{operation.method} {operation.path}",
    )
    return handler(run)


def read_query(request: Request[Any, Any, Any], kind: type[Q]) -> Q:
    """The query as a `kind`. Only fields that are lists may be given more than once."""
    given: dict[str, Any] = {}
    fields = msgspec.structs.fields(kind)
    lists = {f.encode_name for f in fields if "list" in str(f.type)}
    switches = {f.encode_name for f in fields if f.type is bool}
    for name, value in request.query_params.multi_items():
        if name in lists:
            given.setdefault(name, []).append(value)
        elif name in given:
            raise ValidationError(name, value, "expected this option once")
        else:
            # `?watch` alone means yes, as in the Kubernetes API.
            given[name] = "true" if name in switches and value == "" else value
    try:
        query = msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise named(error, kind, given) from error
    for name, value in given.items():
        if value == "null" and name not in lists:  # which msgspec takes for None
            raise ValidationError(name, value, "expected a value, or leave the option out")
    return query


def json_answer(value: Any, status: int = 200, **headers: str) -> Answer:
    return Response(encode(value), status_code=status, media_type=JSON, headers=headers)


def stream_answer(chunks: Any, media_type: str) -> Answer:
    # Proxies must not gather a stream before they pass it on.
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return Stream(chunks, media_type=media_type, headers=headers)
