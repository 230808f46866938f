"""What every home of tokens promises. Runs on each one; a new one is added to `HOMES`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import NotFound, Permanent
from atoll.core.ports import Token
from atoll.operator.tokens import KubernetesTokens
from atoll.store.database import SQLiteTokens


class SecretsInMemory:
    """As much of a cluster as tokens need: Secrets, merged as an API server merges them."""

    def __init__(self) -> None:
        self._secrets: dict[tuple[str, str], dict[str, Any]] = {}

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        try:
            return self._secrets[namespace, name]
        except KeyError:
            raise NotFound(kind, name) from None

    async def create(self, kind: str, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
        self._secrets[namespace, body["metadata"]["name"]] = body
        return body

    async def patch(
        self, kind: str, namespace: str, name: str, change: dict[str, Any]
    ) -> dict[str, Any]:
        secret = await self.get(kind, namespace, name)
        data = {**secret["data"], **change["data"]}
        secret["data"] = {key: text for key, text in data.items() if text is not None}
        return secret


@asynccontextmanager
async def sqlite_tokens(folder: Path) -> AsyncIterator[Any]:
    tokens = SQLiteTokens(folder / "atoll.db")
    yield tokens
    tokens.close()


@asynccontextmanager
async def kubernetes_tokens(folder: Path) -> AsyncIterator[Any]:
    cluster: Any = SecretsInMemory()
    yield KubernetesTokens(cluster, "home")


HOMES = {"kubernetes": kubernetes_tokens, "sqlite": sqlite_tokens}


@pytest.fixture(params=sorted(HOMES))
def on_tokens(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., None]:
    """Runs a test's coroutine on a fresh home."""

    def run(test: Callable[[Any], Awaitable[None]]) -> None:
        async def inside() -> None:
            async with HOMES[request.param](tmp_path) as tokens, asyncio.timeout(30):
                await test(tokens)

        asyncio.run(inside())

    return run


FIRST, SECOND = "ab" + "0" * 62, "ac" + "0" * 62


def test_a_token_is_known_by_its_whole_hash_only(on_tokens: Callable[..., None]) -> None:
    async def check(tokens: Any) -> None:
        assert await tokens.namespace_of(FIRST) is None
        await tokens.add(FIRST, "team", "laptop", 1.0)
        assert await tokens.namespace_of(FIRST) == "team"
        assert await tokens.namespace_of(FIRST[:12]) is None
        assert await tokens.namespace_of(SECOND) is None

    on_tokens(check)


def test_tokens_are_listed_oldest_first_and_never_in_full(on_tokens: Callable[..., None]) -> None:
    async def check(tokens: Any) -> None:
        assert list(await tokens.all()) == []
        late = await tokens.add(FIRST, "team", "laptop", 2.0)
        early = await tokens.add(SECOND, "other", "", 1.0)
        assert late == Token(id=FIRST[:12], namespace="team", label="laptop", created_at=2.0)
        assert list(await tokens.all()) == [early, late]

    on_tokens(check)


def test_a_removed_token_is_gone_and_the_others_stay(on_tokens: Callable[..., None]) -> None:
    async def check(tokens: Any) -> None:
        kept = await tokens.add(FIRST, "team", "", 1.0)
        gone = await tokens.add(SECOND, "team", "", 2.0)
        assert await tokens.remove(gone.id)
        assert not await tokens.remove(gone.id)
        assert await tokens.namespace_of(SECOND) is None
        assert list(await tokens.all()) == [kept]

    on_tokens(check)


def test_the_beginning_of_two_tokens_removes_neither(on_tokens: Callable[..., None]) -> None:
    async def check(tokens: Any) -> None:
        await tokens.add(FIRST, "team", "", 1.0)
        await tokens.add(SECOND, "team", "", 2.0)
        with pytest.raises(Permanent, match="2 tokens begin with 'a'"):
            await tokens.remove("a")
        assert len(await tokens.all()) == 2
        assert await tokens.remove("ab")

    on_tokens(check)
