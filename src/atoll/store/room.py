"""Room on the disk for stopping: `cancel` and `delete` work where nothing else can be written.

A store keeps some blocks beyond the end of its files. What a training needs to be stopped may use
them; all other writes are refused once the disk is full, so they stay for that.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE: blocks are allotted, and the file is as long as before
RESERVE_BYTES = 512 * 2**10  # beyond the end of each file: some hundred cancels and deletions
MIN_BYTES = 64 * 2**10  # a disk with less left counts as full: one write may need so much


def has_room(where: Path, needed: int = MIN_BYTES) -> bool:
    """Whether the file system has so many bytes left. A quota does not show in this."""
    try:
        room = os.statvfs(where)
    except OSError:
        return True  # SQLite says what is wrong
    blocks = room.f_bfree if os.geteuid() == 0 else room.f_bavail
    return blocks * room.f_frsize >= needed


class FileReserve:
    """Blocks beyond the end of one file, as far as its file system can allot them."""

    def __init__(self) -> None:
        self._until = 0
        self._file: int | None = None

    def renew(self, path: Path) -> None:
        """Called after the file has grown. The file stays open: to close it would drop the locks
        that SQLite holds on it."""
        with contextlib.suppress(OSError):
            if self._file is None:
                self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            size = os.fstat(self._file).st_size
            if size + RESERVE_BYTES // 2 > self._until and has_room(path, 4 * RESERVE_BYTES):
                _allot(self._file, size + RESERVE_BYTES)
                self._until = size + RESERVE_BYTES

    def close(self) -> None:
        """After SQLite has closed the file."""
        if self._file is not None:
            os.close(self._file)
        self._file, self._until = None, 0


def _allot(file: int, length: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_int(KEEP_SIZE), ctypes.c_int64(0), ctypes.c_int64(length))
    if libc.fallocate64(file, *arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
