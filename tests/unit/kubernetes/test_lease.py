"""The Lease says who leads, and where that one answers."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from atoll.core.errors import NotFound
from atoll.kubernetes.lease import Lease

Json = dict[str, Any]


class OneLease:
    """A cluster with at most one Lease."""

    def __init__(self) -> None:
        self.body: Json | None = None

    async def get(self, kind: str, namespace: str, name: str) -> Json:
        if self.body is None:
            raise NotFound(kind, name)
        return self.body

    async def create(self, kind: str, namespace: str, body: Json) -> Json:
        self.body = body
        return body

    async def replace(self, kind: str, namespace: str, name: str, body: Json) -> Json:
        self.body = body
        return body


def lease(cluster: Any, identity: str, address: str) -> Lease:
    return Lease(cluster, "home", identity, duration_s=60.0, address=address)


def test_who_does_not_lead_knows_where_the_leader_answers() -> None:
    async def story() -> None:
        cluster = OneLease()
        first, second = lease(cluster, "one", "10.0.0.1:8080"), lease(cluster, "two", "10.0.0.2:1")
        seen: list[tuple[bool, str]] = []

        async def lead() -> None:
            assert not await second._acquire_once()
            seen.append((first.is_held, second.leader))

        await first.lead(lead)
        assert seen == [(True, "10.0.0.1:8080")]
        assert (first.is_held, first.leader) == (False, "")
        assert await second._acquire_once(), "it was given back"
        assert second.leader == ""
        assert not await first._acquire_once()
        assert first.leader == "10.0.0.2:1", "that of the new leader"

    run(story())


def test_a_leader_of_an_older_release_says_nothing_of_where_it_is() -> None:
    async def story() -> None:
        cluster = OneLease()
        first, second = lease(cluster, "one", "10.0.0.1:8080"), lease(cluster, "two", "10.0.0.2:1")
        assert await first._acquire_once()
        assert cluster.body is not None
        del cluster.body["metadata"]["annotations"]
        assert not await second._acquire_once()
        assert second.leader == ""

    run(story())


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)
