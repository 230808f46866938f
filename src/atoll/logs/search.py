"""Searches log files for a text, in steps of bounded work, and reads around an offset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from atoll.core.status import LogMatch, OffsetLine
from atoll.logs.files import RankLog, ranks_in
from atoll.logs.segments import LogTimes, log_end, log_start, read_log, segments, tail_offset

STEP_BYTES = 8 << 20  # between two signs of life: 20 ms of a thread
CHUNK_BYTES = 1 << 20  # searched at once: `bytes.find` is as fast as it gets from here on
LONG_LINE = 1 << 20  # bytes in which the ends of a line are searched
EXCERPT_BYTES = 4096  # of a line that matches: a page shows no more of it
AROUND_BYTES = 256 << 10  # read at once around a match: 1,000 lines, as many as may be asked for


class LogSearch:
    """The lines that contain a text, rank by rank. `offsets`: where to begin."""

    def __init__(
        self,
        folder: Path,
        text: str,
        *,
        ranks: Sequence[int] | None = None,
        is_case_blind: bool = False,
        offsets: Mapping[int, int] | None = None,
    ) -> None:
        self._folder = folder
        self._is_case_blind = is_case_blind
        self._needle = (text.lower() if is_case_blind else text).encode()
        self._left = ranks_in(folder, ranks)[::-1]
        self._offsets = dict(offsets or {})
        self.offsets: dict[int, int] = {}  # how far each rank was searched
        self._log: _OneLog | None = None

    def step(self, step_bytes: int = STEP_BYTES) -> list[LogMatch] | None:
        """The lines found in the next `step_bytes`; None at the end."""
        if self._log is None:
            if not self._left:
                return None
            rank = self._left.pop()
            offset = max(self._offsets.get(rank, 0), log_start(self._folder / str(rank)))
            self._log = _OneLog(self._folder, rank, offset)
        hits, is_over = self._log.step(self._needle, self._is_case_blind, step_bytes)
        self.offsets[self._log.rank] = self._log.offset
        if is_over:
            self._log = None
        return hits


class _OneLog:
    def __init__(self, folder: Path, rank: int, offset: int) -> None:
        self.rank = rank
        self.offset = offset  # always the start of a line, or of a piece of a very long one
        self._folder = folder / str(rank)
        self._end = log_end(self._folder)
        self._times = LogTimes(self._folder)

    def step(
        self, needle: bytes, is_case_blind: bool, step_bytes: int
    ) -> tuple[list[LogMatch], bool]:
        hits: list[LogMatch] = []
        until = min(self._end, self.offset + step_bytes)
        while self.offset < until:
            data, end = read_log(self._folder, self.offset, CHUNK_BYTES)
            if not data:
                return hits, True
            start = end - len(data)  # later than asked for, where much was dropped meanwhile
            cut = data.rfind(b"\n") + 1
            if end < self._end and cut == 0:
                data, cut = self._long_line(start)
            data = data[:cut] if cut and end < self._end else data
            hits += self._matches(needle, data, start, is_case_blind)
            self.offset = start + len(data)
        return hits, self.offset >= self._end

    def _long_line(self, start: int) -> tuple[bytes, int]:
        """More of a line that has no end in one chunk; in pieces if it is longer than that."""
        data = b""
        while len(data) < LONG_LINE + CHUNK_BYTES:
            more, _ = read_log(self._folder, start + len(data), CHUNK_BYTES)
            data += more
            if not more or b"\n" in more:
                break
        return data, data.rfind(b"\n") + 1

    def _matches(
        self, needle: bytes, data: bytes, start: int, is_case_blind: bool
    ) -> list[LogMatch]:
        searched = _lowered(data) if is_case_blind else data
        hits, at, marks = [], 0, segments(self._folder)
        self._times.refresh()
        while (at := searched.find(needle, at)) >= 0:
            begin = data.rfind(b"\n", 0, at) + 1
            end = data.find(b"\n", at)
            after = len(data) if end < 0 else end + 1
            text = data[begin : after if end < 0 else end]
            hits.append(
                LogMatch(
                    rank=self.rank,
                    text=text[:EXCERPT_BYTES].decode(errors="replace"),
                    time=self._times.at(start + after - 1, marks),
                    at=start + after,
                    start=start + begin,
                )
            )
            at = after
        return hits


def _lowered(data: bytes) -> bytes:
    """In lower case, every byte at its offset: where letters change their length, only ASCII."""
    if data.isascii():
        return data.lower()
    lower = data.decode(errors="surrogateescape").lower().encode(errors="surrogateescape")
    return lower if len(lower) == len(data) else data.lower()


def lines_around(folder: Path, rank: int, at: int, before: int, after: int) -> list[OffsetLine]:
    """Up to `before` lines that end at the offset or before it, and `after` that begin at it.

    At most so many bytes of each.
    """
    log = folder / str(rank)
    at = min(max(at, log_start(log)), log_end(log))
    start = max(tail_offset(log, before, at), at - AROUND_BYTES) if before else at
    earlier = _lines(folder, rank, start, at, before)
    return [*earlier[-before:], *_lines(folder, rank, at, at + AROUND_BYTES, after)]


def _lines(folder: Path, rank: int, start: int, end: int, most: int) -> list[OffsetLine]:
    lines: list[OffsetLine] = []
    if start >= end or not most:
        return lines
    reader = RankLog(folder, rank, start)
    for line in reader.lines(AROUND_BYTES):
        if line.at is None or line.at > end or len(lines) >= most:
            return lines
        lines.append(line)
    return [
        *lines,
        *(line for line in reader.remainder() if line.at is not None and line.at <= end),
    ]
