"""Lines of logs: their times in every form that runtimes write, and what is no line of a log."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from atoll.backends.kubernetes.client import Cluster, _nanosecond
from atoll.core.errors import NotFound


@pytest.mark.parametrize(
    ("text", "fraction"),
    [
        ("2026-11-15T23:05:48.123456789Z", 123456789),
        ("2026-11-15T23:05:48.5Z", 500000000),
        ("2026-11-16T00:05:48.000000001+01:00", 1),
        ("2026-11-15T23:05:48Z", 0),
        ("2026-11-15T18:05:48-05:00", 0),
    ],
)
def test_nanoseconds(text: str, fraction: int) -> None:
    assert _nanosecond(text) == 1794783948 * 10**9 + fraction


class Saying(Cluster):
    """A cluster whose logs all have these lines."""

    def __init__(self, *lines: str) -> None:
        self._lines = lines

    @contextlib.asynccontextmanager
    async def _stream(self, *_: Any) -> AsyncIterator[AsyncIterator[str]]:
        async def lines() -> AsyncIterator[str]:
            for line in self._lines:
                yield line

        yield lines()


def test_the_kubelets_words_for_a_log_that_is_gone_are_not_the_log() -> None:
    words = f"unable to retrieve container logs for containerd://{'e7d4' * 16}"
    stamp = "2026-11-15T23:05:48Z"

    async def read(cluster: Cluster) -> list[str]:
        return [text async for _, text in cluster.log_with_times("x", "pod")]

    with pytest.raises(NotFound):
        asyncio.run(read(Saying(words)))
    assert asyncio.run(read(Saying(f"{stamp} {words}"))) == [words]  # a rank wrote this
