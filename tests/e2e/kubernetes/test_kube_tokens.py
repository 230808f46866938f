"""The contract of every home of tokens, on a Secret of a real API server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from atoll.operator.tokens import KubernetesTokens
from tests.contract.test_tokens import *  # noqa: F403
from tests.e2e.kubernetes.conftest import Site, Space


@pytest.fixture
def on_tokens(site: Site, space: Space) -> Callable[..., None]:
    async def inside(test: Callable[[Any], Awaitable[None]]) -> None:
        cluster = site.connect()
        try:
            async with asyncio.timeout(30):
                await test(KubernetesTokens(cluster, space.name))
        finally:
            await cluster.close()

    return lambda test: asyncio.run(inside(test))
