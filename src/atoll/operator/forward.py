"""One operator leads and answers; the others hand requests on to it.

Only the leader has series, rounds, webhooks and the sessions of browsers. While it cannot be
reached, the others answer what the cluster itself knows, and for the rest that it is to be tried
again.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Callable

import httpx2
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from atoll.core.errors import Temporary
from atoll.sdk.release import HEADER
from atoll.server.problems import on_error

log = logging.getLogger(__name__)

HANDED_ON = b"x-atoll-handed-on"  # by another operator: it goes no further
OWN = ("/healthz", "/readyz")  # of this process
LEADERS = re.compile(r"/+v1/+(figures|webhooks(/.*)?|trainings/+[^/]+/+(series|rounds|reports))/*")
CONNECT_S = 2.0
AWAY_S = 2.0  # until a leader that did not answer is tried again
# They are of one connection, not of the request; the last ones each server writes itself.
HOPS = frozenset(
    (
        *(b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"date", HEADER.lower().encode()),
    )
)


class LeaderAnswers:
    """The application of an operator: its own, or the leader's.

    `leader` is where another one that leads answers, empty if that is unknown. `is_ready` says
    whether this one leads and has read what there is.
    """

    def __init__(
        self, app: ASGIApp, leader: Callable[[], str], is_ready: Callable[[], bool]
    ) -> None:
        self._app = app
        self._leader = leader
        self._is_ready = is_ready
        self._away = ("", 0.0)  # a leader that did not answer, and until when it is left alone
        self._http = httpx2.AsyncClient(
            trust_env=False,  # no proxy is between two pods
            timeout=httpx2.Timeout(None, connect=CONNECT_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=50),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OWN or self._is_ready():
            await self._app(scope, receive, send)
            return
        leader = self._leader_for(scope)
        if leader:
            if await self._hand_on(leader, scope, receive, send):
                return
            if not _has_body(scope):
                receive = _empty_first(receive)  # that was read already
        if LEADERS.fullmatch(scope["path"]):
            error = Temporary("no operator leads at the moment: try again", retry_after_s=2)
            await on_error(Request(scope), error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _leader_for(self, scope: Scope) -> str:
        leader = self._leader()
        is_away = self._away[0] == leader and time.monotonic() < self._away[1]
        is_handed_on = any(name == HANDED_ON for name, _ in scope["headers"])
        return "" if is_away or is_handed_on else leader

    async def _hand_on(self, leader: str, scope: Scope, receive: Receive, send: Send) -> bool:
        """Whether the leader was reached; nothing of a body was read otherwise."""
        arrived = asyncio.Event()  # the whole request
        headers = [(name, value) for name, value in scope["headers"] if name not in HOPS]
        has_body = _has_body(scope)
        if not has_body:
            arrived.set()
        query = scope["query_string"]
        request = httpx2.Request(
            scope["method"],
            httpx2.URL(f"http://{leader}").copy_with(
                raw_path=(scope.get("raw_path") or scope["path"].encode())
                + (b"?" + query if query else b"")
            ),
            headers=[*headers, (HANDED_ON, b"1")],
            content=_body(receive, arrived) if has_body else None,
        )
        has_begun = False
        gone = asyncio.create_task(_until_gone(receive, arrived))
        try:
            answering = asyncio.create_task(self._http.send(request, stream=True))
            await asyncio.wait({gone, answering}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():  # nobody waits for the answer any more
                answering.cancel()
                await asyncio.wait({answering})
                return True
            answer = answering.result()
            try:
                has_begun = True
                await self._pass_on(answer, send, gone)
            finally:
                await answer.aclose()
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            log.warning("the leader at %s cannot be reached: %s", leader, error)
            self._away = (leader, time.monotonic() + AWAY_S)
            return False
        except httpx2.HTTPError as error:
            if has_begun:
                raise  # the answer is cut, and whoever reads it sees that
            away = Temporary(f"the leading operator did not answer: {error}", retry_after_s=2)
            await on_error(Request(scope), away)(scope, receive, send)
        finally:
            gone.cancel()
        return True

    async def _pass_on(self, answer: httpx2.Response, send: Send, gone: asyncio.Task[None]) -> None:
        headers = [(n.lower(), v) for n, v in answer.headers.raw if n.lower() not in HOPS]
        start = {"status": answer.status_code, "headers": headers}
        await send({"type": "http.response.start", **start})
        chunks = answer.aiter_raw()
        while True:
            reading = asyncio.ensure_future(anext(chunks, None))
            await asyncio.wait({reading, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                reading.cancel()
                await asyncio.wait({reading})
                return
            chunk = reading.result()
            body = {"body": chunk or b"", "more_body": chunk is not None}
            await send({"type": "http.response.body", **body})
            if chunk is None:
                return


def _has_body(scope: Scope) -> bool:
    return any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])


def _empty_first(receive: Receive) -> Receive:
    """As a request without a body begins."""
    first: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed


async def _body(receive: Receive, arrived: asyncio.Event) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise httpx2.ReadError("the request was broken off")
        yield message.get("body", b"")
        if not message.get("more_body"):
            arrived.set()
            return


async def _until_gone(receive: Receive, arrived: asyncio.Event) -> None:
    """Returns when nobody waits for the answer any more."""
    await arrived.wait()
    while (await receive())["type"] != "http.disconnect":
        pass
