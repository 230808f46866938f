"""Operations: one row for each endpoint, from which its route and its OpenAPI entry are built.

Queries and bodies are msgspec structs, so the document says exactly what is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from atoll.controller.clock import machine_clock
from atoll.controller.informer import Informer
from atoll.core.checks import check_name
from atoll.core.clock import Now
from atoll.core.decoders import convert
from atoll.core.errors import ValidationError
from atoll.core.model import encode, named
from atoll.core.ports import Executor, Store, Tokens
from atoll.core.spec import MAX_SPEC_BYTES
from atoll.metrics.store import SeriesKeeper
from atoll.server.background import BackgroundTasks
from atoll.server.gauges import Gauges
from atoll.server.handlers.executors import Setup
from atoll.server.http.bodies import Bodies, decoded
from atoll.server.http.encoded import EncodedChanges
from atoll.server.http.routing import OnError, Route
from atoll.server.http.streams import Streams
from atoll.server.ui.cache import TTLCache
from atoll.server.ui.rows import Rows
from atoll.server.ui.sessions import Sessions

Q = TypeVar("Q", bound=msgspec.Struct)
Method = Literal["GET", "POST", "DELETE", "PUT", "PATCH"]

SEARCHES = 2  # of logs, that read files at the same moment
JSON = "application/json"
NDJSON = "application/x-ndjson"
SSE = "text/event-stream"


class Query(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The base of all queries. An unknown option is refused, not ignored."""


class NoQuery(Query, frozen=True):
    """For endpoints without options."""


@dataclass(frozen=True)
class Plane:
    """The parts of the control plane that handlers use."""

    store: Store
    tokens: Tokens
    executors: Mapping[str, Executor]
    streams: Streams
    informer: Informer
    gauges: Gauges
    rows: Rows
    setup: Setup = field(default_factory=Setup)
    clock: Callable[[], Now] = field(default_factory=machine_clock)
    encoded: EncodedChanges = field(default_factory=EncodedChanges)
    bodies: Bodies = field(default_factory=Bodies)
    series: SeriesKeeper | None = None  # None: figures of ranks are not kept here
    report_key: bytes = b""  # signs the tokens of ranks; empty: none report by HTTP
    searches: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SEARCHES))
    sessions: Sessions = field(default_factory=Sessions)
    metric_cache: TTLCache = field(default_factory=TTLCache)
    background: BackgroundTasks = field(default_factory=BackgroundTasks)


@dataclass(frozen=True)
class ApiCall:
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
Handler = Callable[[ApiCall], Awaitable[Answer]]
# The namespace of the caller. Raises Denied.
Guard = Callable[[Plane, Request], Awaitable[str]]


class AnswerDoc(NamedTuple):
    """One documented answer."""

    description: str
    body: Any = None  # its type
    media_type: str = JSON
    others: tuple[Any, ...] = ()  # further types, of single lines


class HeaderDoc(NamedTuple):
    """One header that an operation reads, and the rule that its value is checked by."""

    description: str
    pattern: str


@dataclass(frozen=True)
class Operation:
    """One row of the API."""

    method: Method
    path: str  # `{name}` stands for the name of a training
    handler: Handler
    summary: str
    answers: Mapping[int, AnswerDoc]
    query: type[Query] = NoQuery
    body: type | None = None
    max_body: int = MAX_SPEC_BYTES
    headers: Mapping[str, HeaderDoc] = field(default_factory=dict)
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
        async with contextlib.AsyncExitStack() as held:
            body: Any = None
            if operation.body is not None:
                data = await plane.bodies.read(request, namespace, operation.max_body, held)
                body = await decoded(data, operation.body)
            return await operation.handler(ApiCall(plane, request, namespace, name, query, body))

    return Route(operation.method, operation.path, run, on_error)


def read_query(request: Request, kind: type[Q]) -> Q:
    """The query as a `kind`. Only options that are lists may be repeated."""
    options: dict[str, Any] = {}
    fields = msgspec.structs.fields(kind)
    lists = {f.encode_name for f in fields if "list" in str(f.type)}
    switches = {f.encode_name for f in fields if f.type is bool}
    for name, value in request.query_params.multi_items():
        if name in lists:
            options.setdefault(name, []).append(value)
        elif name in options:
            raise ValidationError(name, value, "expected this option once")
        else:
            # `?watch` alone means yes, as in the Kubernetes API.
            options[name] = "true" if name in switches and value == "" else value
    try:
        query = convert(options, kind, is_strict=False)
    except msgspec.ValidationError as error:
        raise named(error, kind, options) from error
    for name, value in options.items():
        if value == "null" and name not in lists:  # msgspec reads it as None
            raise ValidationError(name, value, "expected a value, or leave the option out")
    return query


def json_answer(value: Any, status: int = 200, **headers: str) -> Answer:
    return Response(encode(value), status_code=status, media_type=JSON, headers=headers)


class StreamAnswer(StreamingResponse):
    """An answer in chunks. Its source is closed when the client disconnects."""

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], media_type: str, headers: Mapping[str, str]
    ) -> None:
        super().__init__(chunks, media_type=media_type, headers=headers)
        self._chunks = chunks

    async def stream_response(self, send: Send) -> None:
        async with aclosing(self._chunks):
            await super().stream_response(send)


def stream_answer(chunks: AsyncGenerator[bytes, None], media_type: str) -> Answer:
    # Proxies must not buffer a stream.
    return StreamAnswer(
        chunks, media_type, {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    )
