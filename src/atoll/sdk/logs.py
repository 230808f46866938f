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
from atoll.sdk.effects import Send, check_reply
from atoll.sdk.flows import TrainingRef
from atoll.sdk.wire import Wire, reply, stream_request, translate_errors

RETRY_S = 0.2  # a restarted control plane answers within a second
PATIENCE_S = 60.0  # a followed log outlives a restart of the server, on a loaded machine too


class LogPosition:
    """How far each rank's log was read, so that a second connection resumes there.

    By the offsets of lines; where lines have none, by counting them from the beginning.
    """

    def __init__(
        self,
        ref: TrainingRef,
        ranks: Sequence[int] | None,
        tail: int | None,
        follow: bool,
        filters: Mapping[str, Any] | None = None,
    ) -> None:
        self._path = f"{ref.path}/logs"
        self._uid = ref.uid
        self._ranks = list(ranks or ())
        self.is_empty = ranks is not None and not self._ranks
        self._tail = tail
        self._follow = follow
        self._filters = dict(filters or {})  # further options: since, search
        self._offsets: dict[int, int] | None = None
        self._yielded: Counter[int] = Counter()
        self._read: Counter[int] = Counter()
        self._lost_at: float | None = None

    @property
    def request(self) -> dict[str, Any]:
        query: dict[str, Any] = {
            "rank": self._ranks,
            "follow": self._follow or None,
            "uid": self._uid,
            **self._filters,
        }
        if self._offsets is None:
            query["tail"] = self._tail
        elif self._offsets:
            query["offsets"] = ",".join(f"{rank}:{at}" for rank, at in self._offsets.items())
        return stream_request(Send("GET", self._path, query))

    def new(self, raw: str) -> LogLine | None:
        """The line, unless it was read before. Raises Temporary where the server cut the log."""
        self._lost_at = None  # anything, also a heartbeat, shows that the server is alive
        if not raw:
            return None
        message: dict[str, Any] = msgspec.json.decode(raw)
        if message.get("cut"):
            raise Temporary("the server went away while its log was read")
        if "offsets" in message:
            self._offsets = {int(rank): at for rank, at in message["offsets"].items()}
            return None
        line = LogLine(rank=message["rank"], text=message["text"], time=message.get("time"))
        if "at" in message:
            self._offsets = {} if self._offsets is None else self._offsets
            self._offsets[line.rank] = message["at"]
            return line
        self._read[line.rank] += 1
        if self._read[line.rank] <= self._yielded[line.rank]:
            return None
        self._yielded[line.rank] += 1
        return line

    def lost(self, error: Temporary) -> None:
        """The connection broke: go on where it did, or give up."""
        self._read.clear()
        now = time.monotonic()
        self._lost_at = self._lost_at or now
        # Counted lines say nothing of where a tail began.
        is_placed = self._tail is None or self._offsets is not None or not self._yielded
        if not self._follow or not is_placed or now - self._lost_at > PATIENCE_S:
            raise error


def lines(wire: Wire, position: LogPosition) -> Iterator[LogLine]:
    while not position.is_empty:
        try:
            with translate_errors(wire.endpoint):
                with wire.client().stream(**position.request) as response:
                    if response.status_code != 200:
                        check_reply(reply(response, response.read()))
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
            with translate_errors(wire.endpoint):
                client = await asyncio.to_thread(wire.async_client)
                async with client, client.stream(**position.request) as response:
                    if response.status_code != 200:
                        check_reply(reply(response, await response.aread()))
                    async for raw in alines_of(response.aiter_bytes()):
                        line = position.new(raw)
                        if line is not None:
                            yield line
            return
        except Temporary as error:
            position.lost(error)
            await asyncio.sleep(RETRY_S)
