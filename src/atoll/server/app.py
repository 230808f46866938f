"""The server as an ASGI application: its routes, its OpenAPI document, its error answers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import cache, partial

from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from atoll.controller.clock import machine_clock
from atoll.controller.informer import INFORMER, Informer
from atoll.core.clock import Now
from atoll.core.model import encode
from atoll.core.ports import Executor, Store, Tokens
from atoll.metrics.store import MetricStore
from atoll.server import api
from atoll.server.background import BackgroundTasks, Work
from atoll.server.basilica import answers, deployments
from atoll.server.gauges import Gauges
from atoll.server.handlers.admission import Setup
from atoll.server.http import problems
from atoll.server.http.auth import authenticate, check_host
from atoll.server.http.operations import JSON, Operation, PathEndpoint, Plane, routes
from atoll.server.http.streams import Streams
from atoll.server.ui import routes as ui
from atoll.server.ui.rows import Rows
from atoll.server.ui.sessions import Sessions


def create_app(
    *,
    store: Store,
    tokens: Tokens,
    executors: Mapping[str, Executor],
    streams: Streams | None = None,
    setup: Setup | None = None,
    informer: Informer | None = None,
    gauges: Gauges | None = None,
    clock: Callable[[], Now] | None = None,
    metrics: MetricStore | None = None,
    sessions: Sessions | None = None,
    report_key: bytes = b"",
    background: BackgroundTasks | None = None,
    is_metrics_open: bool = True,
    lifespan: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext,
) -> Router:
    """The HTTP server of one control plane.

    Without the `informer` of its process it runs one of its own.
    `/metrics` has totals of all namespaces; without `is_metrics_open` it needs a token.
    `lifespan` is entered when the server starts. Call `streams.close()` when shutdown begins, so
    that open watches end.
    """
    streams = Streams() if streams is None else streams
    has_own_informer = informer is None
    informer = informer or Informer(store)
    gauges = gauges or Gauges(informer)
    setup = Setup() if setup is None else setup
    clock = machine_clock() if clock is None else clock
    plane = Plane(
        store,
        tokens,
        executors,
        streams,
        informer,
        gauges,
        Rows(store),
        setup,
        clock,
        metrics=metrics,
        report_key=report_key,
        sessions=sessions or Sessions(),
        background=background or BackgroundTasks(),
    )

    @contextlib.asynccontextmanager
    async def run_tasks(_: Router) -> AsyncIterator[None]:
        works: dict[str, Work] = {
            "gauges": gauges.follow,
            "rows": lambda: plane.rows.follow(informer),
        }
        if has_own_informer:
            works[INFORMER] = informer.run
        async with contextlib.AsyncExitStack() as running:
            for name, work in works.items():
                await running.enter_async_context(plane.background.running(name, work))
            await running.enter_async_context(lifespan())
            yield

    rows = api.native_operations(is_metrics_open=is_metrics_open)

    document = cache(partial(_document, rows))  # encoded once: reading it needs no token

    async def openapi(request: Request) -> Response:
        return Response(document(), media_type=JSON)

    table = [
        *routes(rows, plane, authenticate, problems.on_error),
        *deployments.routes_of(plane),
        *ui.routes_of(plane),
        Route("/openapi.json", PathEndpoint({"GET": openapi}, problems.on_error)),
    ]
    return Router(
        table,
        redirect_slashes=False,
        default=_not_found,
        lifespan=run_tasks,
        middleware=[Middleware(Gate, plane=plane)],
    )


class Gate:
    """Runs before routing: ignores doubled and trailing slashes, and refuses foreign host names."""

    def __init__(self, app: ASGIApp, plane: Plane) -> None:
        self._app = app
        self._plane = plane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            # basilica clients append their paths to a base URL that may end in a slash.
            scope["path"] = "/" + "/".join(filter(None, scope["path"].split("/")))
            request = Request(scope)
            try:
                check_host(self._plane, request)
            except HTTPException as error:
                app = _on_stray(request, error)
        await app(scope, receive, send)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    await _on_stray(Request(scope), HTTPException(404))(scope, receive, send)


def _document(rows: Sequence[Operation]) -> bytes:
    from atoll.server.http.openapi import document  # slow to import, and rarely needed

    return encode(document(rows, api.STREAMED))


def _on_stray(request: Request, error: Exception) -> Response:
    """Answers a request that no endpoint takes, in the dialect of the client."""
    is_foreign = request.url.path.startswith("/deployments")
    on_error = answers.on_error if is_foreign else problems.on_error
    return on_error(request, error)
