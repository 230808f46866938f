"""The server as an ASGI application: its routes, its OpenAPI document, its error answers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Router

from atoll.controller.clock import machine_clock
from atoll.core.clock import Time
from atoll.core.model import encode
from atoll.core.ports import Executor, Store, Tokens
from atoll.series.keep import SeriesKeeper
from atoll.server import api, problems
from atoll.server.auth import caller
from atoll.server.background import beside
from atoll.server.basilica import answers, deployments
from atoll.server.deliver import Deliverer
from atoll.server.executors import Setup
from atoll.server.gauges import Gauges
from atoll.server.operations import JSON, Operation, Plane, kept_already, routes
from atoll.server.routing import Application, Route
from atoll.server.streams import Streams
from atoll.server.ui import routes as ui
from atoll.server.ui.sessions import Sessions
from atoll.store.outbox import Outbox


def create_app(
    *,
    store: Store,
    tokens: Tokens,
    executors: Mapping[str, Executor],
    streams: Streams | None = None,
    setup: Setup | None = None,
    gauges: Gauges | None = None,
    clock: Callable[[], Time] | None = None,
    series: SeriesKeeper | None = None,
    outbox: Outbox | None = None,
    deliverer: Deliverer | None = None,
    keep_webhooks: Callable[[], Awaitable[None]] = kept_already,
    sessions: Sessions | None = None,
    report_key: bytes = b"",
    is_metrics_open: bool = True,
    lifespan: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext,
) -> Router:
    """The HTTP server of one control plane.

    `/metrics` has totals of all namespaces; without `is_metrics_open` it needs a token.
    `keep_webhooks` is awaited after webhooks were added or removed, before that is answered.
    `lifespan` is entered when the server starts. Call `streams.close()` when shutdown begins, so
    that open watches end.
    """
    streams = Streams() if streams is None else streams
    gauges = Gauges() if gauges is None else gauges
    setup = Setup() if setup is None else setup
    clock = machine_clock() if clock is None else clock
    plane = Plane(
        store,
        tokens,
        executors,
        streams,
        gauges,
        setup,
        clock,
        series=series,
        outbox=outbox,
        deliverer=deliverer,
        report_key=report_key,
        sessions=sessions or Sessions(),
        keep_webhooks=keep_webhooks,
    )

    @contextlib.asynccontextmanager
    async def counted(_: Router) -> AsyncIterator[None]:
        async with beside(gauges.follow(store)), beside(plane.rows.follow(store)), lifespan():
            yield

    rows = api.native(is_metrics_open=is_metrics_open)

    async def openapi(request: Request) -> Response:
        return Response(_document(rows), media_type=JSON)

    table = [
        *routes(rows, plane, caller, problems.on_error),
        *deployments.routes_of(plane),
        *ui.routes_of(plane),
        Route("GET", "/openapi.json", openapi, problems.on_error),
    ]
    return Router(lifespan=counted, default=Application(table, _on_stray))


def _document(rows: Sequence[Operation]) -> bytes:
    from atoll.server.openapi import document  # slow to import, and rarely asked for

    return encode(document(rows, api.STREAMED))


def _on_stray(request: Request, error: Exception) -> Response:
    """Answers an unknown path or method, in the dialect of the client that asks."""
    is_foreign = request.url.path.startswith("/deployments")
    on_error = answers.on_error if is_foreign else problems.on_error
    return on_error(request, error)
