"""Log files of ranks: segments named by the offset of their first byte, oldest dropped first.

A reader asks by offset, so it can follow across a rotation and notices when data was dropped.
What was dropped is known by the name of the oldest segment; reading starts at the first line in it.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from atoll.core.lines import split_lines
from atoll.logs.times import (
    PAIR,
    RESOLUTION_S,
    append_time,
    close_times,
    offset_since,
    times_path,
)

MAX_BYTES = 64 * 2**20  # of each rank's log, unless another size is set
MAX_SEGMENTS = 8  # the oldest of them is dropped when the newest is full
LONG_LINE = 1 << 20  # bytes in which the end of a line that was cut off is looked for


class LogWriter:
    """The log of one rank. On a full disk output is dropped, and the rank is never blocked."""

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._stamped_at = -math.inf
        self._stamps = 0  # bytes of times, which count as kept
        self._segment_bytes = (max_bytes or MAX_BYTES) // MAX_SEGMENTS
        self._file: int | None = None
        self._start = self._size = 0
        self._last = b""  # the last byte written
        with contextlib.suppress(OSError):
            self._begin()

    def write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            if self._file is None:
                self._begin()
            elif os.fstat(self._file).st_nlink == 0:  # somebody has deleted it
                self._rotate(self._file, self._last)
            elif self._size + self._stamps >= self._segment_bytes:
                self._rotate(self._file)
            if self._file is not None:
                self._stamp()
                self._put(self._file, data)

    def _put(self, file: int, data: bytes) -> None:
        written = os.write(file, data)
        self._size += written
        self._last = data[:written][-1:] or self._last

    def _stamp(self) -> None:
        """Notes the time first: a reader of what follows finds it."""
        now = self._clock()
        if 0 <= now - self._stamped_at < RESOLUTION_S:
            return
        with contextlib.suppress(OSError):
            append_time(times_path(self._folder, self._start), self._start + self._size, now)
            self._stamped_at = now
            self._stamps += PAIR.size

    def close(self) -> None:
        close_times(times_path(self._folder, self._start))
        if self._file is not None:
            os.close(self._file)

    def _begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._start = (segments(self._folder) or [0])[-1]
        self._file = self._open(self._start)
        self._size = os.fstat(self._file).st_size
        with contextlib.suppress(FileNotFoundError):
            self._stamps = times_path(self._folder, self._start).stat().st_size

    def _rotate(self, full: int, kept: bytes = b"") -> None:
        """Goes on in another segment, which begins with the bytes that are kept of this one: by
        the last of them, readers know whether a line was cut."""
        start = self._start + self._size - len(kept)
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = self._open(start)
        except OSError:
            return
        os.close(full)
        close_times(times_path(self._folder, self._start))
        self._file, self._start, self._size = file, start, 0
        self._stamped_at, self._stamps = -math.inf, 0
        if kept:
            self._put(file, kept)
        for old in segments(self._folder)[:-MAX_SEGMENTS]:
            segment_path(self._folder, old).unlink(missing_ok=True)
            times_path(self._folder, old).unlink(missing_ok=True)

    def _open(self, start: int) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(segment_path(self._folder, start), flags, 0o600)


def segment_path(folder: Path, start: int) -> Path:
    return folder / f"{start:020d}.log"


def segments(folder: Path) -> list[int]:
    """Offsets at which the kept segments start, oldest first."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name[:-4]) for name in names if name.endswith(".log"))


def read_log(folder: Path, offset: int, limit: int = 1 << 20) -> tuple[bytes, int]:
    """Up to `limit` bytes from `offset` on, or from the oldest byte kept; and the offset after."""
    starts = segments(folder)
    if not starts:
        return b"", offset
    at = max(offset, starts[0])
    for start in reversed(starts):
        if start <= at:
            break
    try:
        with segment_path(folder, start).open("rb") as file:
            file.seek(at - start)
            data = file.read(limit)
    except FileNotFoundError:  # dropped just now
        return read_log(folder, starts[1] if len(starts) > 1 else at, limit)
    later = [s for s in starts if s > at]
    if not data and later:
        return read_log(folder, later[0], limit)
    return data, at + len(data)


def log_start(folder: Path) -> int:
    """Where the first whole line starts that is kept; 0 where nothing was dropped."""
    starts = segments(folder)
    if not starts or starts[0] == 0:
        return 0
    before = starts[0]
    data, end = read_log(folder, before, LONG_LINE)
    cut = data.find(b"\n") + 1
    return end - len(data) + cut  # a line without an end is shown from where it was cut


def log_end(folder: Path) -> int:
    starts = segments(folder)
    if not starts:
        return 0
    with contextlib.suppress(FileNotFoundError):
        return starts[-1] + segment_path(folder, starts[-1]).stat().st_size
    return starts[-1]


def tail_offset(folder: Path, lines: int, end: int | None = None) -> int:
    """The offset from which there are at most `lines` lines until `end`, or until the end."""
    end = at = log_end(folder) if end is None else min(end, log_end(folder))
    oldest = log_start(folder)
    if lines <= 0:
        return end
    count, chunk_bytes = 0, 64 * 1024
    while at > oldest:
        start = max(at - chunk_bytes, oldest)
        data = _read_exactly(folder, start, at - start)
        position = len(data)
        while (position := data.rfind(b"\n", 0, position)) >= 0:
            count += start + position != end - 1  # no line starts after the last newline
            if count == lines:
                return start + position + 1
        at = start
    return oldest


def since_offset(folder: Path, since: float) -> int:
    """Where the first line begins that ended at `since` or later; the end if there is none."""
    at = offset_since(folder, segments(folder), since)
    if at is None:
        return log_end(folder)
    start = max(at - LONG_LINE, log_start(folder))
    if start >= at:
        return start
    return start + _read_exactly(folder, start, at - start).rfind(b"\n") + 1


def last_lines(folder: Path, lines: int, limit_bytes: int = 4096) -> list[str]:
    end = log_end(folder)
    start = max(tail_offset(folder, lines), end - limit_bytes)
    text = _read_exactly(folder, start, end - start).decode("utf-8", errors="replace")
    return split_lines(text)[-lines:] if lines else []


def _read_exactly(folder: Path, start: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more, start = read_log(folder, start, size - len(data))
        if not more:
            break
        data += more
    return data
