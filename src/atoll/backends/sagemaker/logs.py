"""The lines of ranks in CloudWatch. A place in a log is a time in ms, and a count within it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from atoll.backends.sagemaker.client import TrainingJobs
from atoll.core.status import LogLine, OffsetLine

Json = dict[str, Any]

IN_ONE_MS = 4096
PAGE_LINES = 10_000
POLL_S, MAX_POLL_S = 0.5, 5.0


class _Stream(NamedTuple):
    rank: int
    name: str


class _Cursor:
    """How far one stream has been read."""

    def __init__(self) -> None:
        self.token: str | None = None
        self.at = 0
        self.known = 0  # events of that millisecond

    def position(self, event: Json) -> int:
        if event["timestamp"] != self.at:
            self.at, self.known = event["timestamp"], 0
        self.known = min(self.known + 1, IN_ONE_MS - 1)
        return self.at * IN_ONE_MS + self.known


class RankLogs:
    """The logs of a training, whose jobs `names` lists by rank: those of its attempts in order."""

    def __init__(
        self, jobs: TrainingJobs, names: Callable[[], Mapping[int, Sequence[str]]]
    ) -> None:
        self._jobs = jobs
        self._names = names
        self._streams: dict[str, list[str]] = {}  # by job, once it has some

    async def offsets(self, tail: int, ranks: Sequence[int] | None) -> dict[int, int]:
        """Where the last `tail` lines of each rank begin; no place for one that has fewer."""
        offsets = {}
        by_rank: dict[int, list[str]] = {}
        for stream in await self._of(ranks):
            by_rank.setdefault(stream.rank, []).append(stream.name)
        for rank, streams in by_rank.items():
            ends = [await self._last(name, tail) for name in streams]
            lines = [position for offsets in ends for position in offsets]
            if len(lines) > tail:
                offsets[rank] = lines[-tail - 1] if tail else lines[-1]
        return offsets

    async def _last(self, stream: str, tail: int) -> list[int]:
        """The places of the last lines of a stream, one more than asked for."""
        events: list[Json] = []
        more: Json = {"startFromHead": False, "limit": min(max(tail + 1, 1), PAGE_LINES)}
        while len(events) <= tail:
            page = await self._jobs.log_events(stream, **more)
            if not page["events"]:
                break
            events = [*page["events"], *events]
            more["nextToken"] = page["nextBackwardToken"]
        cursor = _Cursor()
        return [cursor.position(event) for event in events][-tail - 1 :]

    async def lines(
        self,
        offsets: Mapping[int, int],
        ranks: Sequence[int] | None,
        follow: Callable[[], bool] | None,
    ) -> AsyncIterator[LogLine]:
        cursors: dict[str, _Cursor] = {}
        pause_s = POLL_S
        while True:
            is_last = follow is None or follow()
            is_new = False
            for stream in await self._of(ranks):
                cursor = cursors.setdefault(stream.name, _Cursor())
                async for line in self._remainder(stream, cursor, offsets.get(stream.rank, 0)):
                    is_new = True
                    yield line
            if is_last:
                return
            pause_s = POLL_S if is_new else min(pause_s * 1.3, MAX_POLL_S)
            await asyncio.sleep(pause_s)

    async def _remainder(
        self, stream: _Stream, cursor: _Cursor, after: int
    ) -> AsyncIterator[LogLine]:
        while True:
            more: Json = {"startFromHead": True, "limit": PAGE_LINES}
            if cursor.token is not None:
                more["nextToken"] = cursor.token
            elif after:
                more["startTime"] = after // IN_ONE_MS
            page = await self._jobs.log_events(stream.name, **more)
            for event in page["events"]:
                at = cursor.position(event)
                if at > after:
                    yield OffsetLine(
                        rank=stream.rank,
                        text=event["message"],
                        time=event["timestamp"] / 1000,
                        at=at,
                    )
            token = page.get("nextForwardToken")
            if token == cursor.token or not page["events"]:
                cursor.token = token or cursor.token
                return
            cursor.token = token

    async def _of(self, ranks: Sequence[int] | None) -> list[_Stream]:
        streams = []
        for rank, names in sorted(self._names().items()):
            if ranks is not None and rank not in ranks:
                continue
            for name in names:
                if name not in self._streams and (found := await self._jobs.log_streams(name)):
                    self._streams[name] = found
                streams += [_Stream(rank, each) for each in self._streams.get(name, ())]
        return streams
