"""Log files of ranks: segments named by the offset of their first byte, oldest dropped first.

A reader asks by offset, so it can follow across a rotation and notices when data was dropped.
What was dropped is known by the name of the oldest segment; reading starts at the first line in it.

The log stays as the rank wrote it: when its bytes were copied is in a file of (offset, time) pairs
beside each segment. A pair holds from its offset on, until the next one. A log of a backend that
copies nothing has no times.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from atoll.core.text import split_lines

MAX_BYTES = 64 * 2**20  # of each rank's log: 1,000 ranks fill 64 GB; `log_bytes` sets another size
MAX_SEGMENTS = 8  # the oldest is dropped when the newest is full: an eighth of the log at a time
LONG_LINE = 1 << 20  # bytes in which the end of a line that was cut off is searched
PAIR = struct.Struct("=Qd")
RESOLUTION_S = 0.001  # bytes that are copied within this time share a pair: lines show ms
MAX_OPEN = 32  # files of pairs: a supervisor of 10,000 ranks may not hold one for each

_open: OrderedDict[Path, int] = OrderedDict()


class LogWriter:
    """The log of one rank. On a full disk output is lost, and the rank is never blocked: a line of
    atoll's own says where, as soon as there is room for it."""

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
        self._stamps = 0  # bytes of times, which count towards the size of the log
        self._segment_bytes = (max_bytes or MAX_BYTES) // MAX_SEGMENTS
        self._file: int | None = None
        self._start = self._size = 0
        self._last = b""  # the last byte written
        self._lost = 0  # bytes that no line tells yet
        with contextlib.suppress(OSError):
            self._begin()

    def write(self, data: bytes) -> None:
        written = 0
        with contextlib.suppress(OSError):
            if self._file is None:
                self._begin()
            elif os.fstat(self._file).st_nlink == 0:  # somebody has deleted it
                self._rotate(self._file, self._last)
            elif self._size + self._stamps >= self._segment_bytes:
                self._rotate(self._file)
            if self._file is not None:
                self._stamp()
                self._report_lost(self._file)
                written = self._put(self._file, data)
        self._lost += len(data) - written

    def _report_lost(self, file: int) -> None:
        if self._lost:
            line = (
                f"[atoll: {self._lost:,} bytes of this log were lost here: they could not be "
                "written, as on a full disk]\n"
            )
            text = b"\n" * (self._last not in (b"", b"\n")) + line.encode()
            if self._put(file, text) == len(text):
                self._lost = 0

    def _put(self, file: int, data: bytes) -> int:
        written = os.write(file, data)
        self._size += written
        self._last = data[:written][-1:] or self._last
        return written

    def _stamp(self) -> None:
        """Writes the time first: a reader of what follows finds it."""
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
            with contextlib.suppress(OSError):
                self._report_lost(self._file)
            os.close(self._file)

    def _begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._start = (segments(self._folder) or [0])[-1]
        self._file = self._open(self._start)
        self._size = os.fstat(self._file).st_size
        with contextlib.suppress(FileNotFoundError):
            self._stamps = times_path(self._folder, self._start).stat().st_size

    def _rotate(self, full: int, carried: bytes = b"") -> None:
        """Goes on in another segment, which begins with the bytes that are carried over: by the
        last of them, readers know whether a line was cut."""
        start = self._start + self._size - len(carried)
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = self._open(start)
        except OSError:
            return
        os.close(full)
        close_times(times_path(self._folder, self._start))
        self._file, self._start, self._size = file, start, 0
        self._stamped_at, self._stamps = -math.inf, 0
        if carried:
            self._put(file, carried)
        for old in segments(self._folder)[:-MAX_SEGMENTS]:
            segment_path(self._folder, old).unlink(missing_ok=True)
            times_path(self._folder, old).unlink(missing_ok=True)

    def _open(self, start: int) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(segment_path(self._folder, start), flags, 0o600)


def segment_path(folder: Path, start: int) -> Path:
    return folder / f"{start:020d}.log"


def segments(folder: Path) -> list[int]:
    """Offsets at which the segments start, oldest first."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(int(name[:-4]) for name in names if name.endswith(".log"))


def read_log(
    folder: Path, offset: int, limit: int = 1 << 20, starts: Sequence[int] | None = None
) -> tuple[bytes, int]:
    """Up to `limit` bytes from `offset` on, or from the oldest byte there is; and the offset after.

    `starts`: of the segments, if they were just listed.
    """
    starts = segments(folder) if starts is None else starts
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
    """Where the first whole line starts; 0 where nothing was dropped."""
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
    is_start = at == 0 or read_log(folder, at - 1, 1) == (b"\n", at)
    return max(at, log_start(folder)) if is_start else tail_offset(folder, 1, at)


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


def times_path(folder: Path, start: int) -> Path:
    return folder / f"{start:020d}.times"


def append_time(path: Path, offset: int, time: float) -> None:
    """What is written from `offset` on, is written at `time`. Raises OSError.

    A file stays open for the next time, but only so many: a rank takes no file of its own.
    """
    file = _open.pop(path, None)
    if file is None:
        while len(_open) >= MAX_OPEN:
            os.close(_open.popitem(last=False)[1])
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        file = os.open(path, flags, 0o600)
    _open[path] = file
    os.write(file, PAIR.pack(offset, time))


def close_times(path: Path) -> None:
    file = _open.pop(path, None)
    if file is not None:
        os.close(file)


class _Pairs:
    """The pairs of one segment, as far as they are written; read in place."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._size = 0
        self.offsets: Sequence[int] = ()
        self.times: Sequence[float] = ()

    def refresh(self) -> None:
        with contextlib.suppress(OSError, ValueError), open(self._path, "rb") as file:
            size = os.fstat(file.fileno()).st_size // PAIR.size * PAIR.size
            if size == self._size:
                return
            # The map lives as long as its views.
            view = memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ))
            self.offsets, self.times = view.cast("Q")[::2], view.cast("d")[1::2]
            self._size = size


class LogTimes:
    """The times of one rank's log. `segments` are the offsets at which those start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._start = -1
        self._pairs: _Pairs | None = None
        self._span = (0, 0)  # offsets that have the time below
        self._time: float | None = None

    def at(self, offset: int, segments: Sequence[int]) -> float | None:
        """When the byte at this offset was copied; None where that is not known."""
        if self._span[0] <= offset < self._span[1]:
            return self._time
        number = bisect_right(segments, offset) - 1
        if number < 0:
            return None
        if segments[number] != self._start or self._pairs is None:
            self._start = segments[number]
            self._pairs = _Pairs(times_path(self._folder, self._start))
            self._pairs.refresh()
        offsets = self._pairs.offsets
        after = bisect_right(offsets, offset)
        self._time = round(self._pairs.times[after - 1], 3) if after else None
        if after and after < len(offsets):
            self._span = (offsets[after - 1], offsets[after])
        return self._time

    def refresh(self) -> None:
        """More may have been written."""
        if self._pairs is not None:
            self._pairs.refresh()


def offset_since(folder: Path, segments: Sequence[int], since: float) -> int | None:
    """Where the first byte begins that was copied at `since` or later; None if there is none."""
    for start in segments:
        pairs = _Pairs(times_path(folder, start))
        pairs.refresh()
        first = bisect_left(pairs.times, since)
        if first < len(pairs.times):
            return pairs.offsets[first]
    return None
