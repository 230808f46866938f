"""Log lines from the server, followed over dropped connections without losing or repeating one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec

from atoll.core.errors import Temporary
from atoll.core.status import LogLine
from atoll.sdk.effects import Reply, Send
from atoll.sdk.flows import Who
from atoll.sdk.requests import accepted
from atoll.sdk.wire import Wire, stream_request, translated

RETRY_S = 0.2
PATIENCE_S = 60.0


class Position:
    """How much of each rank's log was given out, so that a second reading skips it."""

    def __init__(self, who: Who, ranks: Sequence[int] | None, tail: int | None, follow: bool):
        query = {"rank": list(ranks or ()), "tail": tail, "follow": follow or None}
        self.request = stream_request(Send("GET", f"{who.path}/logs", query))
        self._can_resume = follow and tail is None
        self._given: Counter[int] = Counter()
        self._passed: Counter[int] = Counter()
        self._lost_at: float | None = None

    def new(self, raw: str) -> LogLine | None:
        """The line, unless it was given out before. Raises Temporary where the server cut it."""
        if not raw:
            return None
        found: dict[str, Any] = msgspec.json.decode(raw)
        if found.get("cut"):
            raise Temporary("the server went away while its log was read")
        line = LogLine(rank=found["rank"], text=found["text"])
        self._passed[line.rank] += 1
        if self._passed[line.rank] <= self._given[line.rank]:
            return None
        self._given[line.rank] += 1
        self._lost_at = None
        return line

    def lost(self, error: Temporary) -> None:
        """The connection broke: read again from the start, or give up."""
        self._passed.clear()
        now = time.monotonic()
        self._lost_at = self._lost_at or now
        if not self._can_resume or now - self._lost_at > PATIENCE_S:
            raise error


def lines(wire: Wire, position: Position) -> Iterator[LogLine]:
    while True:
        try:
            with translated(wire.endpoint):
                with wire.client().stream(**position.request) as response:
                    if response.status_code != 200:
                        accepted(Reply(response.status_code, response.read()))
                    for raw in response.iter_lines():
                        line = position.new(raw)
                        if line is not None:
                            yield line
            return
        except Temporary as error:
            position.lost(error)
            time.sleep(RETRY_S)


async def alines(wire: Wire, position: Position) -> AsyncIterator[LogLine]:
    import asyncio

    while True:
        try:
            with translated(wire.endpoint):
                client = await asyncio.to_thread(wire.async_client)
                async with client, client.stream(**position.request) as response:
                    if response.status_code != 200:
                        accepted(Reply(response.status_code, await response.aread()))
                    async for raw in response.aiter_lines():
                        line = position.new(raw)
                        if line is not None:
                            yield line
            return
        except Temporary as error:
            position.lost(error)
            await asyncio.sleep(RETRY_S)
