"""The one way to write a file: whole or not at all.

It is written beside it under a name that no listing shows, and then moved or linked to its own.
Only the standard library is imported: the supervisor of local ranks loads this before the first of
them starts. What travels to hosts without atoll has `agent/process.py:write_file`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress

Buffer = bytes | bytearray | memoryview
MAX_PIECES = 1024  # the kernel's IOV_MAX: so many pieces go into one write


def write_file(
    path: str | os.PathLike[str],
    data: bytes | Sequence[Buffer],
    *,
    mode: int = 0o600,
    is_new: bool = False,
    is_durable: bool = True,
    is_name_durable: bool = True,
) -> None:
    """Replaces the content of `path`; with `is_new` raises FileExistsError if there is one.

    A durable file survives a loss of power, and so does its name, unless the caller syncs folders
    itself. Raises OSError, and leaves nothing behind then.
    """
    path = os.fspath(path)
    draft, file = _open_draft(path, mode)
    try:
        try:
            _write_all(file, [data] if isinstance(data, bytes) else data)
            if is_durable:
                os.fsync(file)
        finally:
            os.close(file)
        (os.link if is_new else os.rename)(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
    if is_new:
        os.unlink(draft)
    if is_durable and is_name_durable:
        sync_folder(os.path.dirname(path))


def _open_draft(path: str, mode: int) -> tuple[str, int]:
    """A new file beside `path`, by a name as obstore's LocalStore gives it."""
    number = 1
    while True:
        draft = f"{path}#{number}"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            return draft, os.open(draft, flags, mode)
        except FileExistsError:
            number += 1


def _write_all(file: int, pieces: Sequence[Buffer]) -> None:
    views = [view for piece in pieces if (view := memoryview(piece).cast("B")).nbytes]
    first = 0
    while first < len(views):
        count = os.writev(file, views[first : first + MAX_PIECES])
        while first < len(views) and count >= views[first].nbytes:
            count -= views[first].nbytes
            first += 1
        if count:
            views[first] = views[first][count:]


def sync_folder(folder: str) -> None:
    """Makes the names in a folder durable."""
    with suppress(FileNotFoundError):
        handle = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that syncs no folders
                raise
        finally:
            os.close(handle)


def clear_way(path: str | os.PathLike[str]) -> None:
    """Removes a directory where a file should be."""
    if os.path.isdir(path) and not os.path.islink(path):
        from shutil import rmtree  # supervisors start without it

        rmtree(path)
