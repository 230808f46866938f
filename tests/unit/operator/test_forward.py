"""Operators that do not lead hand requests on; over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import httpx2
from starlette.types import ASGIApp, Receive, Scope, Send

from atoll.operator.forward import LeaderAnswers
from atoll.operator.run import _Server
from atoll.server.serving import listen


class Own:
    """The application of one operator: it says who it is and what it was asked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.more = asyncio.Event()
        self.left = asyncio.Event()  # by somebody who read a stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        said = {
            "who": self.name,
            "path": (scope.get("raw_path") or b"").decode(),
            "query": scope["query_string"].decode(),
            "method": scope["method"],
            "headers": headers,
            "body": len(body),
        }
        start = {"status": 207, "headers": [(b"x-own", b"a"), (b"x-own", b"b")]}
        await send({"type": "http.response.start", **start})
        await send({"type": "http.response.body", "body": json.dumps(said).encode() + b"\n",
                    "more_body": True})  # fmt: skip
        if "stream" in scope["path"]:
            gone = asyncio.ensure_future(receive())
            more = asyncio.ensure_future(self.more.wait())
            await asyncio.wait({gone, more}, return_when=asyncio.FIRST_COMPLETED)
            more.cancel()
            if gone.done():
                self.left.set()
            gone.cancel()
        await send({"type": "http.response.body", "body": b"end"})


@contextlib.asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[str]:
    listening = listen("127.0.0.1", 0)
    host, port = listening.getsockname()
    server = _Server(app)
    task = asyncio.create_task(server.serve([listening]))
    try:
        yield f"{host}:{port}"
    finally:
        server.should_exit = True
        await task


class Pair:
    """A leader, another operator, and a client of that one."""

    def __init__(self) -> None:
        self.first, self.second = Own("leader"), Own("other")
        self.leader = ""
        self.is_ready = False

    async def play(
        self, story: Callable[[Pair, httpx2.AsyncClient], Coroutine[Any, Any, None]]
    ) -> None:
        other = LeaderAnswers(self.second, lambda: self.leader, lambda: self.is_ready)
        leader = LeaderAnswers(self.first, lambda: "", lambda: True)
        async with served(leader) as self.leader, served(other) as address:
            async with httpx2.AsyncClient(base_url=f"http://{address}", timeout=60) as client:
                await story(self, client)
        await other.close()
        await leader.close()


def played(story: Callable[[Pair, httpx2.AsyncClient], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(Pair().play(story))


def said(answer: httpx2.Response) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer.text.splitlines()[0])
    return found


def test_a_request_reaches_the_leader_as_it_was_and_so_does_its_answer() -> None:
    async def story(pair: Pair, client: httpx2.AsyncClient) -> None:
        answer = await client.post(
            "/v1/trainings/a%20b/reports?x=1&x=2",
            content=b"z" * 3_000_000,
            headers={"Authorization": "Bearer secret", "Cookie": "a=b", "Origin": "http://me"},
        )
        heard = said(answer)
        assert (heard["who"], answer.status_code) == ("leader", 207)
        assert (heard["path"], heard["query"]) == ("/v1/trainings/a%20b/reports", "x=1&x=2")
        assert (heard["method"], heard["body"]) == ("POST", 3_000_000)
        headers = heard["headers"]
        assert (headers["authorization"], headers["cookie"]) == ("Bearer secret", "a=b")
        assert headers["host"] == str(client.base_url.netloc, "ascii")
        assert answer.headers.get_list("x-own") == ["a", "b"]
        assert len(answer.headers.get_list("date")) == 1
        assert len(answer.headers.get_list("atoll-release")) == 1
        assert answer.text.endswith("\nend")

    played(story)


def test_health_is_of_each_operator_and_the_leader_answers_itself() -> None:
    async def story(pair: Pair, client: httpx2.AsyncClient) -> None:
        assert said(await client.get("/readyz"))["who"] == "other"
        assert said(await client.get("/v1/trainings"))["who"] == "leader"
        pair.is_ready = True
        assert said(await client.get("/v1/trainings"))["who"] == "other"

    played(story)


def test_a_stream_is_passed_on_line_by_line_and_ends_with_its_reader() -> None:
    async def story(pair: Pair, client: httpx2.AsyncClient) -> None:
        async with client.stream("GET", "/stream") as answer:
            lines = answer.aiter_lines()
            assert json.loads(await anext(lines))["who"] == "leader"  # before its end
        await asyncio.wait_for(pair.first.left.wait(), 60)

    played(story)


def test_without_a_leader_others_answer_what_the_cluster_knows_and_no_more() -> None:
    async def story(pair: Pair, client: httpx2.AsyncClient) -> None:
        for leader in ("", "127.0.0.1:1"):  # none; one that does not answer
            pair.leader = leader
            assert said(await client.get("/v1/trainings/series"))["who"] == "other"
            for path in (
                *("/v1/trainings/a/series", "/v1/trainings/a/rounds", "/v1/figures"),
                *("/v1/webhooks", "/v1/webhooks/wh-1/test", "/v1//trainings/a/reports/"),
            ):
                answer = await client.get(path)
                assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
                assert "no operator leads" in answer.text
            assert said(await client.post("/v1/trainings", content=b"xyz"))["body"] == 3

    played(story)


def test_a_request_is_handed_on_once_however_wrong_the_lease_is() -> None:
    async def story(pair: Pair, client: httpx2.AsyncClient) -> None:
        pair.leader = client.base_url.netloc.decode()  # itself
        assert said(await client.get("/v1/trainings"))["who"] == "other"
        assert (await client.get("/v1/webhooks")).status_code == 503

    played(story)
