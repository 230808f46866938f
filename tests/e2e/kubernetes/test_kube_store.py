"""The contract of every Store, on custom resources of a real API server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from atoll.operator.store import KubernetesStore
from tests.contract.test_store import *  # noqa: F403
from tests.e2e.kubernetes.conftest import Site

# The archive is in ConfigMaps beside the training, and the executor's: test_kube_code.py.
del test_the_archive_of_a_training_can_be_read_until_nobody_has_it  # noqa: F821

NAMESPACES = ("default", "one", "two", "other")


@pytest.fixture
def on_store(site: Site) -> Callable[..., None]:
    if not site.is_own:
        pytest.skip("the contract suite empties the store: not on a cluster that others use")

    async def inside(test: Callable[[Any], Awaitable[None]]) -> None:
        cluster = site.connect()
        store = KubernetesStore(cluster)
        try:
            for training in await store.list():
                await store.remove(training)
            async with asyncio.timeout(30):
                await test(store)
        finally:
            await store.close()
            await cluster.close()

    for name in NAMESPACES:
        site.kubectl("create", "namespace", name, is_checked=False)
    return lambda test: asyncio.run(inside(test))
