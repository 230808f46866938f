"""What ranks wrote to log files, line by line, from the offset of a byte on.

Lines of several ranks come in the order of their times; those without a time, rank by rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import os
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

from atoll.core.status import LogLine, OffsetLine
from atoll.logs.segments import (
    LogTimes,
    log_end,
    log_start,
    read_log,
    segment_path,
    segments,
    since_offset,
    tail_offset,
)

Line = TypeVar("Line", bound=LogLine)

# A longer line comes in pieces: what a rank prints without an end must fit into memory.
LINE_BYTES = 16 << 20
CHUNK_BYTES, MIN_CHUNK = 1 << 20, 16 << 10  # read at once of one rank
BUFFER_BYTES = 32 << 20  # read at once of all ranks: with 1,000 of them 32 KiB each
POLL_S, MAX_POLL_S = 0.02, 0.2  # of files on a shared file system, where nobody sends notices
GROWTH = 1.15  # of the pause between two polls: a line is late by a share of its age
PROGRESS_S = 1.0  # between two lines of a progress bar that only ever goes back to its start
READ_EVERY_S = 0.005  # of a log that grows all the time: 200 reads a second cost a tenth of a CPU
READ_ALL_EVERY_S = 2.0  # a notice that was lost delays a line by no more than this
OVER_EVERY_S = 0.2  # between two checks whether the training is over, which are a look-up in memory
TICK_NS = 10**8  # files of one time stamp may be this far apart, with room to spare


def tail_offsets(folder: Path, ranks: Sequence[int] | None, tail: int) -> dict[int, int]:
    """Where the last `tail` lines of each rank begin; a rank that has no log yet has no offset.

    Nor has one of which fewer lines are left: it is read from its start, which says so.
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
    """The log of one rank, read on from an offset."""

    def __init__(self, folder: Path, rank: int, offset: int) -> None:
        self._folder = folder / str(rank)
        self._rank = rank
        self._offset = offset
        self._parts: list[bytes] = []  # of a line that has no end yet
        self._printed_at = 0.0
        self._times = LogTimes(self._folder)
        self._segments: Sequence[int] = ()
        self._stamp: tuple[int, int] | None = None  # of its files, when all of them was read

    def lines(self, chunk_bytes: int, until: int | None = None) -> Iterator[OffsetLine]:
        """The whole lines that are there by now; not many more than `until` that offset."""
        while until is None or self._offset < until:
            self._segments = segments(self._folder)
            stamp = self._stamp_of_files()
            data, end = read_log(self._folder, self._offset, chunk_bytes, self._segments)
            if not data:
                self._stamp = stamp
                return
            if end - len(data) > self._offset:
                was = self._offset - self._partial_size()
                self._parts = []
                self._offset = log_start(self._folder)
                yield _dropped(self._rank, self._offset - was, self._offset)
                continue
            self._offset = end
            self._times.refresh()
            head, newline, _ = data.partition(b"\n")
            self._parts.append(head)
            if not newline:
                if self._partial_size() >= LINE_BYTES:
                    yield self._line(self._take_partial(), end)
                continue
            first, at = self._take_partial(), end - len(data) + len(head) + 1
            *lines, partial = data[len(head) + 1 :].split(b"\n")
            self._parts = [partial] if partial else []
            yield self._line(first, at)
            for line in lines:
                at += len(line) + 1
                yield self._line(line, at)

    @property
    def has_partial(self) -> bool:
        return bool(self._parts)

    def has_changed(self) -> bool:
        """Whether there may be more than was read. It asks for no listing."""
        stamp = self._stamp_of_files()
        return stamp is None or stamp != self._stamp

    def progress(self) -> Iterator[OffsetLine]:
        """What of an unfinished line was since written over, now and then."""
        now = time.monotonic()
        if not self._parts or now < self._printed_at + PROGRESS_S:
            return
        partial = self._take_partial()
        size = _progress(partial)
        self._parts = [partial[size:]]  # at least the last byte
        if size:
            self._printed_at = now
            yield self._line(partial[:size], self._offset - self._partial_size())

    def remainder(self) -> Iterator[OffsetLine]:
        """The line that has begun, as far as it is there; it may have no end."""
        if self._parts:
            more, _ = read_log(self._folder, self._offset, LINE_BYTES)
            text, newline, _ = more.partition(b"\n")
            partial = self._take_partial()
            yield self._line(partial + text, self._offset + len(text) + len(newline))

    def _partial_size(self) -> int:
        return sum(map(len, self._parts))

    def _take_partial(self) -> bytes:
        partial, self._parts = b"".join(self._parts), []
        return partial

    def _stamp_of_files(self) -> tuple[int, int] | None:
        """Differs after a write to the newest segment, or a new one; None if nobody can tell."""
        try:
            folder = os.stat(self._folder).st_mtime_ns
            newest = os.stat(segment_path(self._folder, self._segments[-1])).st_size
        except (OSError, IndexError):
            return None
        is_too_new = abs(time.time_ns() - folder) < TICK_NS  # another change may not show
        return None if is_too_new else (folder, newest)

    def _line(self, text: bytes, at: int) -> OffsetLine:
        return OffsetLine(
            rank=self._rank,
            text=text.decode("utf-8", errors="replace"),
            time=self._times.at(at - 1, self._segments),
            at=at,
        )


class RankLogs:
    """The logs of several ranks; those of new ranks are added."""

    def __init__(
        self, folder: Path, offsets: Mapping[int, int], ranks: Sequence[int] | None
    ) -> None:
        self._folder = folder
        self._offsets = offsets
        self._wanted = None if ranks is None else set(ranks)
        self._logs: dict[int, RankLog] = {}
        self._partial: set[RankLog] = set()
        self._listed = 0  # the time stamp of the folder before it was last listed

    def read(
        self, grown: Collection[int] | None, *, is_bounded: bool = False
    ) -> Iterator[OffsetLine]:
        """What is new in the logs of these ranks; None: in all of them.

        `is_bounded`: only what is there now, as a rank may print faster than it is read.
        """
        if grown is None:
            self._listed = _changed_at(self._folder)
            grown = self._logs.keys() | set(ranks_in(self._folder, None))
        ranks = [rank for rank in sorted(grown) if self._wanted is None or rank in self._wanted]
        for rank in ranks:
            if rank not in self._logs:
                self._logs[rank] = RankLog(self._folder, rank, self._offsets.get(rank, 0))
        ends = {rank: log_end(self._folder / str(rank)) for rank in ranks} if is_bounded else {}
        chunk = max(MIN_CHUNK, min(CHUNK_BYTES, BUFFER_BYTES // max(1, len(ranks))))
        yield from merged([self._logs[rank].lines(chunk, ends.get(rank)) for rank in ranks])
        self._partial.update(log for rank in ranks if (log := self._logs[rank]).has_partial)

    def changed(self) -> set[int] | None:
        """The ranks whose files changed since they were read; None if there may be new ranks."""
        if _changed_at(self._folder) != self._listed:
            return None
        return {rank for rank, log in self._logs.items() if log.has_changed()}

    def progress(self) -> Iterator[OffsetLine]:
        self._partial = {log for log in self._partial if log.has_partial}
        for log in self._partial:
            yield from log.progress()

    def remainders(self) -> Iterator[OffsetLine]:
        for _, log in sorted(self._logs.items()):
            yield from log.remainder()


class LogPolling:
    """Looks at all logs again and again, less often while nothing is printed."""

    def __init__(self) -> None:
        self._pause_s = POLL_S

    async def next(self, logs: RankLogs, *, has_lines: bool) -> Collection[int] | None:
        self._pause_s = POLL_S if has_lines else min(self._pause_s * GROWTH, MAX_POLL_S)
        await asyncio.sleep(self._pause_s)
        return None


class LogGrowth:
    """Waits until somebody says which logs grew."""

    def __init__(self) -> None:
        self._grown: set[int] = set()
        self._is_any = False
        self._news = asyncio.Event()
        self._read_at = self._all_at = time.monotonic()

    def add(self, ranks: Iterable[int] | None) -> None:
        """The logs of these ranks grew; None: any may have."""
        self._is_any = self._is_any or ranks is None
        self._grown.update(ranks or ())
        self._news.set()

    async def next(self, logs: RankLogs, *, has_lines: bool) -> Collection[int] | None:
        """The ranks whose logs to read next; none if it is time to check the training."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OVER_EVERY_S):
                await self._news.wait()
        await asyncio.sleep(self._read_at + READ_EVERY_S - time.monotonic())
        self._read_at = now = time.monotonic()
        grown, is_any = self._grown, self._is_any
        self._grown, self._is_any = set(), False
        self._news.clear()
        if now >= self._all_at + READ_ALL_EVERY_S:
            changed = logs.changed()
            grown, is_any = grown.union(changed or ()), is_any or changed is None
            self._all_at = now
        return None if is_any else grown


async def read_lines(
    folder: Path,
    offsets: Mapping[int, int],
    *,
    ranks: Sequence[int] | None,
    follow: Callable[[], bool] | None,
    growth: AbstractContextManager[LogGrowth] | None = None,
) -> AsyncGenerator[LogLine, None]:
    """From these offsets on; the logs of other ranks from their start.

    `growth`: says what to read while it is followed; None: everything is polled.
    """
    logs, grown = RankLogs(folder, offsets, ranks), None
    if follow is None:
        for line in logs.read(None, is_bounded=True):
            yield line
    else:
        polling: AbstractContextManager[LogPolling] = contextlib.nullcontext(LogPolling())
        with growth or polling as waiting:
            is_last = False
            while not is_last:
                is_last, has_lines = follow(), False
                for line in logs.read(None if is_last else grown):
                    has_lines = True
                    yield line
                if not is_last:
                    for line in logs.progress():
                        yield line
                    grown = await waiting.next(logs, has_lines=has_lines)
    for line in logs.remainders():
        yield line


def _changed_at(folder: Path) -> int:
    """The time stamp of a folder; 0 if there is none yet."""
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


def merged(logs: Sequence[Iterator[Line]]) -> Iterator[Line]:
    """The lines in the order of their times; one without a time comes after the one before it."""
    if len(logs) == 1:
        return logs[0]
    return (line for _, line in heapq.merge(*map(_with_times, logs), key=lambda pair: pair[0]))


def _with_times(lines: Iterator[Line]) -> Iterator[tuple[float, Line]]:
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
    """A line of atoll's own where bytes were dropped."""
    text = (
        f"[atoll: {size:,} bytes of this log were dropped here; the newest ones are kept: "
        "log_bytes in atoll.toml says how many]"
    )
    return OffsetLine(rank=rank, text=text, at=at)


def ranks_in(folder: Path, wanted: Sequence[int] | None) -> list[int]:
    try:
        ranks = sorted(int(name) for name in os.listdir(folder))
    except FileNotFoundError:
        return []
    return ranks if wanted is None else [rank for rank in ranks if rank in set(wanted)]
