"""The server as an ASGI application: rows in, routes, document and error answers out."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import cache
from typing import Any

from litestar import Litestar, Request, Response, get
from litestar.exceptions import HTTPException
from litestar.handlers import BaseRouteHandler

from atoll.core.errors import AtollError
from atoll.core.model import encode
from atoll.core.ports import Executor, Store, Tokens
from atoll.server import api, health
from atoll.server.auth import caller
from atoll.server.background import beside
from atoll.server.basilica import answers as deployments_answers
from atoll.server.basilica import deployments
from atoll.server.executors import Setup
from atoll.server.gauges import Gauges
from atoll.server.openapi import document
from atoll.server.operations import Operation, Plane, routes
from atoll.server.problems import on_any_error, on_atoll_error, on_http_error
from atoll.server.streams import Streams

MAX_BODY_BYTES = 64 * 2**20  # a shipped function travels in the body

Lifespan = Callable[[Litestar], AbstractAsyncContextManager[None]]


def create_app(
    *,
    store: Store,
    tokens: Tokens,
    executors: Mapping[str, Executor],
    streams: Streams | None = None,
    setup: Setup | None = None,
    gauges: Gauges | None = None,
    more: Sequence[Operation] = (),
    handlers: Sequence[BaseRouteHandler] = (),
    lifespan: Sequence[Lifespan] = (),
    max_body_bytes: int = MAX_BODY_BYTES,
) -> Litestar:
    """The whole HTTP face of one control plane.

    `more` are further rows, documented like the native ones; `handlers` further routes, such as
    files. Call `streams.close()` when shutdown begins, so that open watches end.
    """
    gauges = Gauges() if gauges is None else gauges
    plane = Plane(
        store,
        tokens,
        executors,
        Streams() if streams is None else streams,
        Setup() if setup is None else setup,
    )
    rows = (*api.NATIVE, *health.operations(gauges), *more)

    @cache
    def text() -> bytes:
        return encode(document(rows, api.STREAMED))

    @get("/openapi.json")
    async def openapi() -> Response[bytes]:
        return Response(text(), media_type="application/json")

    @contextlib.asynccontextmanager
    async def counted(_: Litestar) -> AsyncIterator[None]:
        async with beside(gauges.follow(store)):
            yield

    known: dict[int | type[Exception], Any] = {
        AtollError: on_atoll_error,
        HTTPException: _on_http_error,
        Exception: on_any_error,
    }
    return Litestar(
        [*routes(rows, plane, caller), deployments.router(plane), openapi, *handlers],
        exception_handlers=known,
        lifespan=[counted, *lifespan],
        openapi_config=None,
        logging_config=None,
        request_max_body_size=max_body_bytes,
    )


def _on_http_error(request: Request[Any, Any, Any], error: HTTPException) -> Response[Any]:
    """A path or method that there is not belongs to no route, so to no router's handlers."""
    is_foreign = request.url.path.startswith("/deployments")
    answer = deployments_answers.on_http_error if is_foreign else on_http_error
    return answer(request, error)
