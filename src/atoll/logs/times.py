"""When the bytes of a log were copied: beside each segment a file of (offset, time) pairs.

The log itself stays as the rank wrote it. A pair holds from its offset on, until the next one. A
log without such a file, of a release before or of a backend that copies nothing, has no times.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

PAIR = struct.Struct("=Qd")
RESOLUTION_S = 0.001  # bytes that are copied within this time share a pair
MAX_OPEN = 32  # files, in one process

_open: OrderedDict[Path, int] = OrderedDict()


def times_path(folder: Path, start: int) -> Path:
    return folder / f"{start:020d}.times"


def append_time(path: Path, offset: int, time: float) -> None:
    """What is written from `offset` on, is written at `time`. Raises OSError.

    A file is kept open for the next time, but only so many: a rank takes no file of its own.
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
    """The pairs of one segment, as far as they are written; looked up in place."""

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
            # The map stays for as long as it is looked at.
            message = memoryview(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ))
            self.offsets, self.times = message.cast("Q")[::2], message.cast("d")[1::2]
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
        match = bisect_left(pairs.times, since)
        if match < len(pairs.times):
            return pairs.offsets[match]
    return None
