"""What an endpoint is: one row that makes both the route and its part of the OpenAPI document.

Queries and bodies are msgspec structs, so what is documented is what is checked.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from atoll.core.checks import check_name
from atoll.core.errors import ValidationError
from atoll.core.model import decode, encode, named
from atoll.core.ports import Executor, Store, Tokens
from atoll.server.executors import Setup
from atoll.server.gauges import Gauges
from atoll.server.routing import OnError, Route
from atoll.server.streams import Streams

Q = TypeVar("Q", bound=msgspec.Struct)
Method = Literal["GET", "POST", "DELETE", "PUT", "PATCH"]

JSON = "application/json"
NDJSON = "application/x-ndjson"
SSE = "text/event-stream"
MAX_BODY_BYTES = 64 * 2**20  # a shipped function travels in the body


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
    streams: Streams
    gauges: Gauges
    setup: Setup = field(default_factory=Setup)


@dataclass(frozen=True)
class Call:
    """One request, decoded and checked."""

    plane: Plane
    request: Request
    namespace: str
    name: str
    query: Any
    body: Any

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.name


Answer = Response
Handler = Callable[[Call], Awaitable[Answer]]
# Who calls: the namespace, or Denied. `None` for an endpoint that is open to all.
Guard = Callable[[Plane, Request], Awaitable[str]]


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


def routes(
    operations: Sequence[Operation], plane: Plane, guard: Guard, on_error: OnError
) -> list[Route]:
    return [_route(operation, plane, guard, on_error) for operation in operations]


def _route(operation: Operation, plane: Plane, guard: Guard, on_error: OnError) -> Route:
    async def run(request: Request) -> Response:
        namespace = "" if operation.is_open else await guard(plane, request)
        name = request.path_params["name"]
        if operation.is_named:
            check_name("name", name)
        query = read_query(request, operation.query)
        body = None if operation.body is None else decode(await read_body(request), operation.body)
        return await operation.handler(Call(plane, request, namespace, name, query, body))

    return Route(operation.method, operation.path, run, on_error)


async def read_body(request: Request) -> bytes:
    """The body; refused as soon as it is known to be too large, while the rest is on its way."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
        raise HTTPException(413)
    chunks, size = [], 0
    async with aclosing(request.stream()) as stream:
        async for chunk in stream:
            size += len(chunk)
            if size > MAX_BODY_BYTES:
                raise HTTPException(413)
            chunks.append(chunk)
    return b"".join(chunks)


def read_query(request: Request, kind: type[Q]) -> Q:
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


class Stream(StreamingResponse):
    """An answer in chunks, whose source is closed when the client goes away."""

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], media_type: str, headers: Mapping[str, str]
    ) -> None:
        super().__init__(chunks, media_type=media_type, headers=headers)
        self._chunks = chunks

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._chunks):
            await super().stream_response(send)


def stream_answer(chunks: AsyncGenerator[bytes, None], media_type: str) -> Answer:
    # Proxies must not gather a stream before they pass it on.
    return Stream(chunks, media_type, {"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
