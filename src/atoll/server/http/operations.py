"""Operations: one row for each endpoint, from which its route and its OpenAPI entry are built.

Queries and bodies are msgspec structs, so the OpenAPI document states exactly what is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from atoll.controller.clock import machine_clock
from atoll.controller.informer import Informer
from atoll.core.checks import check_name
from atoll.core.clock import Now
from atoll.core.errors import ValidationError
from atoll.core.model import convert, encode, named
from atoll.core.ports import Executor, Store, Tokens
from atoll.core.spec import MAX_SPEC_BYTES
from atoll.metrics.store import MetricStore
from atoll.server.background import BackgroundTasks
from atoll.server.gauges import Gauges
from atoll.server.handlers.admission import Setup
from atoll.server.http.bodies import Bodies, decode_body
from atoll.server.http.encoded import EncodedChanges
from atoll.server.http.streams import Streams
from atoll.server.ui.cache import TTLCache
from atoll.server.ui.rows import Rows
from atoll.server.ui.sessions import Sessions

Q = TypeVar("Q", bound=msgspec.Struct)
Method = Literal["GET", "POST", "DELETE", "PUT", "PATCH"]

SEARCHES = 2  # log searches that read files at the same time: more would starve the event loop
DRAIN_S = 10.0  # most clients stop sending within a round trip
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
    metrics: MetricStore | None = None  # None: this control plane stores no metrics
    report_key: bytes = b""  # signs the tokens of ranks; empty: ranks do not report by HTTP
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
# Returns the namespace of a request. Raises Denied.
Guard = Callable[[Plane, Request], Awaitable[str]]


class AnswerDoc(NamedTuple):
    """One documented answer."""

    description: str
    body: Any = None  # its type
    media_type: str = JSON
    others: tuple[Any, ...] = ()  # further types of lines in a stream


class HeaderDoc(NamedTuple):
    """One header that an operation reads, and the pattern of its value."""

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
    def has_name(self) -> bool:
        return "{name}" in self.path


RequestHandler = Callable[[Request], Awaitable[Response]]
OnError = Callable[[Request, Exception], Response]


class PathEndpoint:
    """The handlers of one path by method, as an ASGI application; it answers their errors too."""

    def __init__(self, methods: Mapping[str, RequestHandler], on_error: OnError) -> None:
        self._methods = methods
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive, send)
        try:
            response = await self._answer(request)
        except ClientDisconnect:  # nobody is left to answer
            return
        except Exception as error:  # the edge of the server: every error becomes an answer
            response = self._on_error(request, error)
        # An error from here on closes the connection: the answer has already begun.
        if response.status_code == 413:
            await _answer_and_drain(response, request, send)
        else:
            await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        handler = self._methods.get(request.method)
        if handler is not None:
            return await handler(request)
        allowed = {"Allow": ", ".join(sorted((*self._methods, "OPTIONS")))}
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=allowed)
        raise HTTPException(405, headers=allowed)


async def _answer_and_drain(response: Response, request: Request, send: Send) -> None:
    """Answers, and reads on for a while before the connection is closed: a client that is still
    sending would otherwise see a broken connection instead of the answer."""
    start = {"status": response.status_code, "headers": response.raw_headers}
    await send({"type": "http.response.start", **start})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            while (await request.receive()).get("more_body"):
                pass
    await send({"type": "http.response.body", "body": b""})


def routes(
    operations: Sequence[Operation], plane: Plane, guard: Guard, on_error: OnError
) -> list[Route]:
    """One Starlette route a path."""
    by_path: dict[str, dict[str, RequestHandler]] = {}
    for operation in operations:
        handler = _request_handler(operation, plane, guard)
        by_path.setdefault(operation.path, {})[operation.method] = handler
    return [Route(path, PathEndpoint(methods, on_error)) for path, methods in by_path.items()]


def _request_handler(operation: Operation, plane: Plane, guard: Guard) -> RequestHandler:
    async def run(request: Request) -> Response:
        namespace = "" if operation.is_open else await guard(plane, request)
        name = request.path_params.get("name", "")
        if operation.has_name:
            check_name("name", name)
        query = read_query(request, operation.query)
        async with contextlib.AsyncExitStack() as turn:
            body: Any = None
            if operation.body is not None:
                data = await plane.bodies.read(request, namespace, operation.max_body, turn)
                body = await decode_body(data, operation.body)
            return await operation.handler(ApiCall(plane, request, namespace, name, query, body))

    return run


def read_query(request: Request, kind: type[Q]) -> Q:
    """Decodes the query. Only options that are lists may be repeated."""
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
