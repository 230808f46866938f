"""Operations: one row for each endpoint, from which its route and its OpenAPI entry are built.

Queries and bodies are msgspec structs, so the OpenAPI document states exactly what is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from atoll.controller.informer import Informer
from atoll.controller.loop import machine_clock
from atoll.core import errors
from atoll.core.clock import Now
from atoll.core.errors import NotFound, TooLarge, ValidationError
from atoll.core.model import convert, decode, decode_error, encode
from atoll.core.phase import ConditionType
from atoll.core.ports import Change, Executor, Store, Tokens
from atoll.core.problem import Problem, problem_of
from atoll.core.settings import name_label
from atoll.core.spec import MAX_SPEC_BYTES, TrainingSpec, check_spec_size
from atoll.core.status import Training, set_condition
from atoll.metrics.store import MetricStore
from atoll.server.background import BackgroundTasks
from atoll.server.gauges import Gauges
from atoll.server.handlers.admission import Setup
from atoll.server.http.streams import Streams
from atoll.server.ui.rows import Rows, TTLCache
from atoll.server.ui.sessions import Sessions

# Errors as HTTP answers: one table maps the type of an error to its status.

MEDIA_TYPE = "application/problem+json"

# First match wins, so the more exact type comes first.
STATUS: dict[type[errors.AtollError], int] = {
    errors.TooLarge: 413,
    errors.ValidationError: 400,
    errors.WorldSizeOutOfBounds: 400,
    errors.Denied: 401,
    errors.NotFound: 404,
    errors.Conflict: 409,
    errors.UDTerminalState: 409,
    errors.Gone: 410,
    errors.Temporary: 503,
    errors.AtollError: 500,
}

log = logging.getLogger(__name__)


def status_of(error: errors.AtollError) -> int:
    return next(status for kind, status in STATUS.items() if isinstance(error, kind))


def on_error(request: Request, error: Exception) -> Response:
    """Any error of a request as a problem document."""
    if isinstance(error, errors.AtollError):
        return _answer(problem_of(error, status_of(error)), _headers(error))
    if isinstance(error, HTTPException):
        return _answer(_refusal(request, error), _headers(error))
    log.error("%s %s", request.method, request.url.path, exc_info=error)
    detail = "internal error in atoll; the log of the server has the details"
    return _answer(Problem(title="InternalError", status=500, detail=detail), {})


def _answer(problem: Problem, headers: Mapping[str, str]) -> Response:
    return Response(encode(problem), problem.status, headers=headers, media_type=MEDIA_TYPE)


def _headers(error: errors.AtollError | HTTPException) -> Mapping[str, str]:
    if isinstance(error, errors.Denied):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, errors.Temporary):
        return {"Retry-After": str(max(1, round(error.retry_after_s)))}
    if isinstance(error, HTTPException):
        return error.headers or {}
    return {"Connection": "close"} if isinstance(error, errors.TooLarge) else {}


def _refusal(request: Request, error: HTTPException) -> Problem:
    """Errors raised before a handler runs: no such path, no such method."""
    detail = f"{request.method} {request.url.path}: {error.detail}"
    title = HTTPStatus(error.status_code).phrase.replace(" ", "")
    return Problem(title=title, status=error.status_code, detail=detail)


# Trainings and their changes as bytes. Each change is encoded once for all watchers.

CACHE_BYTES = 8 * 2**20  # thousands of changes: slower watchers encode again
MASK = "***"  # instead of the values of environment variables, which may be secrets


class EncodedChanges:
    """A cache of the newest changes as server-sent events, by version."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._by_version: OrderedDict[int, bytes] = OrderedDict()

    def of(self, change: Change) -> bytes:
        event = self._by_version.get(change.version)
        if event is None:
            event = self._by_version[change.version] = event_bytes(change)
            self._bytes += len(event)
            while self._bytes > self._max_bytes and len(self._by_version) > 1:
                self._bytes -= len(self._by_version.popitem(last=False)[1])
        return event


def event_bytes(change: Change) -> bytes:
    """One change as a server-sent event; its id is the version to resume from."""
    kind = b"removed" if change.is_removed else b"changed"
    data = encode(redact(change.training))
    return b"event: %b\nid: %d\ndata: %b\n\n" % (kind, change.version, data)


def with_staleness(training: Training, stale: tuple[float, str] | None) -> Training:
    """Adds the condition that the status may be stale, if statuses cannot be written."""
    if stale is None or training.status.phase.is_terminal:
        return training
    since, why = stale
    when = datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    message = f"this status may be out of date since {when}: {why}"
    conditions = set_condition(
        training.status.conditions, ConditionType.STATUS_STALE, "CannotWrite", message, since
    )
    status = replace(training.status, conditions=conditions)
    return replace(training, status=status)


def redact(training: Training) -> Training:
    """The training for readers: its code as a digest, without values of variables."""
    spec = training.spec.by_digest()
    env, nccl_env = dict.fromkeys(spec.env, MASK), dict.fromkeys(spec.nccl_env, MASK)
    return replace(training, spec=replace(spec, env=env, nccl_env=nccl_env))


# Bodies of requests: bounded in size and number, and decoded outside of the event loop.
#
# Only code that is sent with a training may be large. It is one string, so a body with more
# punctuation than any spec has is refused while it arrives, before it costs memory or time.

T = TypeVar("T")

MAX_BODY_BYTES = 64 * 2**20  # code of 48 MiB in base64
LARGE_BYTES = MAX_SPEC_BYTES
DIRECT_BYTES = 2**16  # decoding them takes less time than starting a thread
MAX_LARGE = 4  # in memory at once, and one of each namespace: 256 MiB

_MARKS = (b'"', b",", b":", b"[", b"{")
_TOKEN = re.compile(rb'"([^"\\]*(?:\\.[^"\\]*)*)"\s*(:?)|[\[\]{}]')


class Bodies:
    """Limits the large bodies that are in memory at once."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(MAX_LARGE)
        self._locks: dict[str, asyncio.Lock] = {}
        self._waiting: Counter[str] = Counter()

    async def read(
        self, request: Request, namespace: str, limit: int, turn: AsyncExitStack
    ) -> bytes:
        """Reads the body. Raises TooLarge as soon as it is, before all of it has arrived.

        A large one waits until it may be in memory; that ends with the stack `turn`.
        """
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise TooLarge("body", f"{declared} bytes", _expected(limit))
        chunks: list[bytes] = []
        size = marks = 0
        async with aclosing(request.stream()) as stream:
            async for chunk in stream:
                if size <= LARGE_BYTES < size + len(chunk):
                    await turn.enter_async_context(self._turn(namespace))
                size += len(chunk)
                chunks.append(chunk)
                if size > limit:
                    raise TooLarge("body", f"more than {limit} bytes", _expected(limit))
                marks += sum(map(chunk.count, _MARKS))
                if marks > MAX_SPEC_BYTES:
                    field = await asyncio.to_thread(_last_field, b"".join(chunks))
                    raise TooLarge(
                        field or "body",
                        f"more than {MAX_SPEC_BYTES} bytes",
                        f"expected a spec of at most {MAX_SPEC_BYTES} bytes (1 MiB) without its "
                        f"source, got {declared or 'more'}",
                    )
        return b"".join(chunks)

    @contextlib.asynccontextmanager
    async def _turn(self, namespace: str) -> AsyncIterator[None]:
        lock = self._locks.setdefault(namespace, asyncio.Lock())
        self._waiting[namespace] += 1
        try:
            async with lock, self._slots:
                yield
        finally:
            self._waiting[namespace] -= 1
            if not self._waiting[namespace]:
                del self._locks[namespace], self._waiting[namespace]


async def decode_body(data: bytes, kind: type[T]) -> T:
    """Decodes the body, a large one in a thread. Raises ValidationError and TooLarge."""
    if len(data) <= DIRECT_BYTES:
        return decode(data, kind)
    return await asyncio.to_thread(_decode_large, data, kind)


def _decode_large(data: bytes, kind: type[T]) -> T:
    value = decode(data, kind)
    if isinstance(value, TrainingSpec):
        check_spec_size(value)
    return value


def _expected(limit: int) -> str:
    return f"expected a body of at most {limit} bytes ({limit / 2**20:g} MiB)"


def _last_field(prefix: bytes) -> str:
    """The top-level field at the end of this prefix of a body."""
    depth, field = 0, b""
    for token in _TOKEN.finditer(prefix):
        if token[0] in (b"[", b"{"):
            depth += 1
        elif token[0] in (b"]", b"}"):
            depth -= 1
        elif depth == 1 and token[2]:
            field = token[1]
    return field[:63].decode(errors="replace")


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

    async def training(self) -> Training:
        """The training that the request names. Raises NotFound if its `uid` is of another one."""
        training = await self.plane.store.get(self.key)
        if self.query.uid not in (None, training.uid):
            raise NotFound("training", self.name)
        return training


Answer = Response
Handler = Callable[[ApiCall], Awaitable[Answer]]
# Returns the namespace of a request. Raises Denied.
Authenticate = Callable[[Plane, Request], Awaitable[str]]


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
    operations: Sequence[Operation],
    plane: Plane,
    authenticate: Authenticate,
    on_error: OnError,
    *,
    read_name: Callable[[str, str], str] = name_label,
) -> list[Route]:
    """One Starlette route a path. `read_name` makes a DNS label of the name in a path, or raises
    ValidationError for the field that it is given first."""
    by_path: dict[str, dict[str, RequestHandler]] = {}
    for operation in operations:
        handler = _request_handler(operation, plane, authenticate, read_name)
        by_path.setdefault(operation.path, {})[operation.method] = handler
    return [Route(path, PathEndpoint(methods, on_error)) for path, methods in by_path.items()]


def _request_handler(
    operation: Operation,
    plane: Plane,
    authenticate: Authenticate,
    read_name: Callable[[str, str], str],
) -> RequestHandler:
    async def run(request: Request) -> Response:
        namespace = "" if operation.is_open else await authenticate(plane, request)
        name = request.path_params.get("name", "")
        if operation.has_name:
            name = read_name("name", name)
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
        raise decode_error(error, kind, options) from error
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
