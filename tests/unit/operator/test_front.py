"""Who answers: the leader alone is ready, so the Service of the manifests reaches no other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx2
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Router
from starlette.types import Receive, Scope, Send

from atoll.operator.front import LeaderFront
from atoll.operator.run import serve_api
from atoll.server.http.server import listen
from atoll.server.http.streams import Streams


@contextlib.asynccontextmanager
async def served(front: LeaderFront) -> AsyncIterator[httpx2.AsyncClient]:
    listening = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    serving = asyncio.create_task(serve_api(front, listening))
    try:
        async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
            yield client
    finally:
        serving.cancel()
        await asyncio.wait({serving})


async def answers(client: httpx2.AsyncClient, *paths: str) -> list[int]:
    return [(await client.get(path)).status_code for path in paths]


def leaders_api(name: str) -> Router:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse(name)(scope, receive, send)

    return Router(default=answer)


def test_an_operator_that_does_not_lead_lives_and_is_not_ready() -> None:
    async def story() -> None:
        front = LeaderFront()
        async with served(front) as client:
            paths = ("/healthz", "/readyz", "/v1/trainings", "/metrics", "/ui")
            assert await answers(client, *paths) == [200, 503, 503, 503, 503]
            refused = await client.post("/v1/trainings", content=b"{}")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
            assert "does not lead" in refused.json()["detail"]
            async with front.serving(leaders_api("one"), Streams()):
                assert await answers(client, "/healthz", "/readyz", "/v1/trainings") == [200] * 3
            assert await answers(client, *paths) == [200, 503, 503, 503, 503]

    asyncio.run(story())


def test_each_time_that_it_leads_the_api_is_a_new_one_and_begins_and_ends_with_it() -> None:
    async def story() -> None:
        life: list[str] = []

        def api(name: str) -> Router:
            @contextlib.asynccontextmanager
            async def lifespan(_: Router) -> AsyncIterator[None]:
                life.append(f"{name} begins")
                yield
                life.append(f"{name} ends")

            router = leaders_api(name)
            router.lifespan_context = lifespan
            return router

        front = LeaderFront()
        async with served(front) as client:
            for name in ("first", "second"):
                async with front.serving(api(name), Streams()):
                    assert (await client.get("/")).text == name
        assert life == ["first begins", "first ends", "second begins", "second ends"]

    asyncio.run(story())


def test_open_streams_end_with_the_lead_so_that_clients_turn_to_the_next_leader() -> None:
    async def story() -> None:
        streams = Streams()

        async def endless() -> AsyncIterator[bytes]:
            yield b"first"
            await asyncio.Event().wait()

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            chunks = streams.run(endless(), heartbeat=b"", cut=b"cut")
            await StreamingResponse(chunks)(scope, receive, send)

        front = LeaderFront()
        async with served(front) as client:
            async with contextlib.AsyncExitStack() as leading:
                await leading.enter_async_context(front.serving(Router(default=answer), streams))
                async with client.stream("GET", "/watch") as watch:
                    chunks = watch.aiter_bytes()
                    assert await anext(chunks) == b"first"
                    await leading.aclose()
                    async with asyncio.timeout(60):
                        assert [chunk async for chunk in chunks][-1:] == [b"cut"]

    asyncio.run(story())
