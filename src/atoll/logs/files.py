"""What ranks wrote to log files, line by line. A place in a log is the offset of a byte in it.

Lines of several ranks come in the order of their times; those without a time, rank by rank.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from atoll.core.status import LogLine, OffsetLine
from atoll.logs.segments import log_end, log_start, read_log, segments, since_offset, tail_offset
from atoll.logs.times import LogTimes

Line = TypeVar("Line", bound=LogLine)

LINE_BYTES = 1 << 20  # a longer line comes in pieces
CHUNK_BYTES, MIN_CHUNK = 1 << 20, 16 << 10  # read at once of one rank
BUFFER_BYTES = 32 << 20  # of all ranks together
POLL_S, MAX_POLL_S = 0.02, 0.2
GROWTH = 1.15  # of the pause between looks: what is seen late is late by a share of its age
PROGRESS_S = 1.0  # how often a bar that only ever goes back to its start is shown


def tail_offsets(folder: Path, ranks: Sequence[int] | None, tail: int) -> dict[int, int]:
    """Where the last `tail` lines of each rank begin; a rank that has no log yet has no place.

    Nor has one of which fewer lines are kept: it is read from its start, which says so.
    """
    offsets = {}
    for rank in ranks_in(folder, ranks):
        offset = tail_offset(folder / str(rank), tail)
        start = log_start(folder / str(rank))
        if start == 0 or offset > start:
            offsets[rank] = offset
    return offsets


def offsets_since(folder: Path, ranks: Sequence[int] | None, since: float) -> dict[int, int]:
    """Where the lines begin that were written at `since` or later."""
    return {rank: since_offset(folder / str(rank), since) for rank in ranks_in(folder, ranks)}


class RankLog:
    """The log of one rank, read on from a place."""

    def __init__(self, folder: Path, rank: int, offset: int) -> None:
        self._folder = folder / str(rank)
        self._rank = rank
        self._offset = offset
        self._partial = b""
        self._printed_at = 0.0
        self._times = LogTimes(self._folder)
        self._segments: Sequence[int] = ()

    def lines(self, chunk_bytes: int, until: int | None = None) -> Iterator[OffsetLine]:
        """The whole lines that are there by now; not many more than `until` that place."""
        while until is None or self._offset < until:
            data, end = read_log(self._folder, self._offset, chunk_bytes)
            if not data:
                return
            if end - len(data) > self._offset:
                was = self._offset - len(self._partial)
                self._partial = b""
                self._offset = log_start(self._folder)
                yield _dropped(self._rank, self._offset - was, self._offset)
                continue
            self._offset = end
            self._segments = segments(self._folder)
            self._times.refresh()
            complete = self._partial + data
            at = end - len(complete)
            *lines, self._partial = complete.split(b"\n")
            for line in lines:
                at += len(line) + 1
                yield self._line(line, at)
            if len(self._partial) >= LINE_BYTES:
                remainder, self._partial = self._partial, b""
                yield self._line(remainder, end)

    def progress(self) -> Iterator[OffsetLine]:
        """What of an unfinished line was since written over, now and then."""
        size, now = _progress(self._partial), time.monotonic()
        if size and now >= self._printed_at + PROGRESS_S:
            self._printed_at = now
            printed, self._partial = self._partial[:size], self._partial[size:]
            yield self._line(printed, self._offset - len(self._partial))

    def remainder(self) -> Iterator[OffsetLine]:
        """The line that has begun, as far as it is there; it may have no end."""
        if self._partial:
            more, _ = read_log(self._folder, self._offset, LINE_BYTES)
            text, newline, _ = more.partition(b"\n")
            yield self._line(self._partial + text, self._offset + len(text) + len(newline))

    def _line(self, text: bytes, at: int) -> OffsetLine:
        return OffsetLine(
            rank=self._rank,
            text=text.decode("utf-8", errors="replace"),
            time=self._times.at(at - 1, self._segments),
            at=at,
        )


async def read_lines(
    folder: Path,
    offsets: Mapping[int, int],
    *,
    ranks: Sequence[int] | None,
    follow: Callable[[], bool] | None,
) -> AsyncIterator[LogLine]:
    """From these places on; the logs of other ranks from their start."""
    logs: dict[int, RankLog] = {}
    # Who does not follow reads what is there now: a rank may print faster than it is read.
    ends: dict[int, int] = {}
    unseen = None if follow else 0
    if follow is None:
        ends = {rank: log_end(folder / str(rank)) for rank in ranks_in(folder, ranks)}
    pause_s = POLL_S
    while True:
        is_last = follow is None or follow()
        is_new = False
        for rank in ranks_in(folder, ranks):
            logs.setdefault(rank, RankLog(folder, rank, offsets.get(rank, 0)))
        chunk = max(MIN_CHUNK, min(CHUNK_BYTES, BUFFER_BYTES // max(1, len(logs))))
        looks = [log.lines(chunk, ends.get(rank, unseen)) for rank, log in sorted(logs.items())]
        for line in merged(looks):
            is_new = True
            yield line
        if is_last:
            break
        for log in logs.values():
            for line in log.progress():
                yield line
        pause_s = POLL_S if is_new else min(pause_s * GROWTH, MAX_POLL_S)
        await asyncio.sleep(pause_s)
    for _, log in sorted(logs.items()):
        for line in log.remainder():
            yield line


def merged(logs: Sequence[Iterator[Line]]) -> Iterator[Line]:
    """The lines in the order of their times; one without a time comes after the one before it."""
    if len(logs) == 1:
        return logs[0]
    return (line for _, line in heapq.merge(*map(_dated, logs), key=lambda pair: pair[0]))


def _dated(lines: Iterator[Line]) -> Iterator[tuple[float, Line]]:
    last = 0.0
    for line in lines:
        last = last if line.time is None else line.time
        yield last, line


async def amerged(logs: Sequence[AsyncIterator[LogLine]]) -> AsyncIterator[LogLine]:
    """The same for lines that have to be waited for."""
    heads: list[tuple[float, int, LogLine]] = []
    for number, log in enumerate(logs):
        async for line in log:
            heads.append((line.time or 0.0, number, line))
            break
    heapq.heapify(heads)
    while heads:
        at, number, line = heads[0]
        yield line
        async for after in logs[number]:
            heapq.heapreplace(heads, (after.time or at, number, after))
            break
        else:
            heapq.heappop(heads)


def _progress(remainder: bytes) -> int:
    """How much of an unfinished line was since written over. Its last byte may be half an end."""
    size = remainder.rfind(b"\r", 0, -1) + 1
    return size if remainder[:size].strip(b"\r") else 0


def _dropped(rank: int, size: int, at: int) -> OffsetLine:
    """A line of atoll's own in place of what is not kept."""
    text = (
        f"[atoll: {size:,} bytes of this log were dropped here; the newest ones are kept: "
        "log_bytes in atoll.toml says how many]"
    )
    return OffsetLine(rank=rank, text=text, at=at)


def ranks_in(folder: Path, wanted: Sequence[int] | None) -> list[int]:
    try:
        match = sorted(int(name) for name in os.listdir(folder))
    except FileNotFoundError:
        return []
    return match if wanted is None else [rank for rank in match if rank in set(wanted)]
