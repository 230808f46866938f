"""What an operator answers by HTTP: its API while it leads, and otherwise that it does not.

Only a leader is ready, so the Service sends every request to the leader. Series, rounds and
sessions are there and nowhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from atoll.core.errors import Temporary
from atoll.server.http.operations import on_error
from atoll.server.http.streams import Streams

RETRY_AFTER_S = 2  # until the Service knows the next leader: the period of the readiness probe


class LeaderFront:
    """The ASGI application of an operator."""

    def __init__(self) -> None:
        self._idle = Router(default=_answer_idle)
        self._app: Router | None = None

    @contextlib.asynccontextmanager
    async def serving(self, app: Router, streams: Streams) -> AsyncIterator[None]:
        """Answers with `app` as long as the block lasts. Then its open streams end, so that clients
        turn to the next leader."""
        async with app.lifespan_context(app):
            self._app = app
            try:
                yield
            finally:
                # New requests go to the next leader; the open ones end after that.
                self._app = None
                streams.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The server's lifespan is that of the process; the API has one for each time it leads.
        app = self._app if scope["type"] == "http" else None
        await (app or self._idle)(scope, receive, send)


async def _answer_idle(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] == "/healthz":
        await JSONResponse({"status": "ok"})(scope, receive, send)
        return
    error = Temporary("this operator does not lead: ask the Service", retry_after_s=RETRY_AFTER_S)
    await on_error(Request(scope), error)(scope, receive, send)
