"""Log lines from the server, followed over dropped connections without losing or repeating one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from atoll.core.errors import Temporary
from atoll.core.lines import alines_of, lines_of
from atoll.core.status import LogLine
from atoll.sdk.effects import Send
from atoll.sdk.flows import Who
from atoll.sdk.requests import accepted
from atoll.sdk.wire import Wire, reply, stream_request, translated

RETRY_S = 0.2
PATIENCE_S = 60.0


class LogPosition:
    """How far each rank's log was given out, so that a second reading goes on from there.

    By the places that lines have; where they have none, by counting lines, all of them again.
    """

    def __init__(
        self,
        who: Who,
        ranks: Sequence[int] | None,
        tail: int | None,
        follow: bool,
        chosen: Mapping[str, Any] | None = None,
    ) -> None:
        self._path = f"{who.path}/logs"
        self._uid = who.uid
        self._ranks = list(ranks or ())
        self.is_empty = ranks is not None and not self._ranks
        self._tail = tail
        self._follow = follow
        self._chosen = dict(chosen or {})  # further options: since, search
        self._offsets: dict[int, int] | None = None
        self._given: Counter[int] = Counter()
        self._passed: Counter[int] = Counter()
        self._lost_at: float | None = None

    @property
    def request(self) -> dict[str, Any]:
        query: dict[str, Any] = {
            "rank": self._ranks,
            "follow": self._follow or None,
            "uid": self._uid,
            **self._chosen,
        }
        if self._offsets is None:
            query["tail"] = self._tail
        elif self._offsets:
            query["offsets"] = ",".join(f"{rank}:{at}" for rank, at in self._offsets.items())
        return stream_request(Send("GET", self._path, query))

    def new(self, raw: str) -> LogLine | None:
        """The line, unless it was given out before. Raises Temporary where the server cut it."""
        self._lost_at = None  # whoever says something, be it a heartbeat, is there
        if not raw:
            return None
        found: dict[str, Any] = msgspec.json.decode(raw)
        if found.get("cut"):
            raise Temporary("the server went away while its log was read")
        if "offsets" in found:
            self._offsets = {int(rank): at for rank, at in found["offsets"].items()}
            return None
        line = LogLine(rank=found["rank"], text=found["text"], time=found.get("time"))
        if "at" in found:
            self._offsets = {} if self._offsets is None else self._offsets
            self._offsets[line.rank] = found["at"]
            return line
        self._passed[line.rank] += 1
        if self._passed[line.rank] <= self._given[line.rank]:
            return None
        self._given[line.rank] += 1
        return line

    def lost(self, error: Temporary) -> None:
        """The connection broke: go on where it did, or give up."""
        self._passed.clear()
        now = time.monotonic()
        self._lost_at = self._lost_at or now
        # Counted lines say nothing of where a tail began.
        is_placed = self._tail is None or self._offsets is not None or not self._given
        if not self._follow or not is_placed or now - self._lost_at > PATIENCE_S:
            raise error


def lines(wire: Wire, position: LogPosition) -> Iterator[LogLine]:
    while not position.is_empty:
        try:
            with translated(wire.endpoint):
                with wire.client().stream(**position.request) as response:
                    if response.status_code != 200:
                        accepted(reply(response, response.read()))
                    for raw in lines_of(response.iter_bytes()):
                        line = position.new(raw)
                        if line is not None:
                            yield line
            return
        except Temporary as error:
            position.lost(error)
            time.sleep(RETRY_S)


async def alines(wire: Wire, position: LogPosition) -> AsyncIterator[LogLine]:
    import asyncio

    while not position.is_empty:
        try:
            with translated(wire.endpoint):
                client = await asyncio.to_thread(wire.async_client)
                async with client, client.stream(**position.request) as response:
                    if response.status_code != 200:
                        accepted(reply(response, await response.aread()))
                    async for raw in alines_of(response.aiter_bytes()):
                        line = position.new(raw)
                        if line is not None:
                            yield line
            return
        except Temporary as error:
            position.lost(error)
            await asyncio.sleep(RETRY_S)
