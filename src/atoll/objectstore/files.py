"""Objects as files of a folder: written all at once, created by link, listed without a client.

A file is written beside its place under a name that no listing shows, and then moved or linked
there, so a torn file is never visible. The names are those that obstore's LocalStore uses.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import NamedTuple

from atoll.core.errors import ObjectTooLarge, Permanent
from atoll.files.writing import Buffer, sync_folder, write_file

# LocalStore spells other keys differently in the names of files.
PLAIN_KEY = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9_.+-]*(/[A-Za-z0-9_+-][A-Za-z0-9_.+-]*)*")
_STAGED = re.compile(r"#[0-9]+$")
# What link() answers where a file system has no hard links: some FUSE mounts, SMB, exFAT.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


class ObjectInfo(NamedTuple):
    """One row of a listing; `modified` is by the store's clock."""

    key: str
    size: int
    modified: datetime


def write_object(
    path: str,
    pieces: Sequence[Buffer],
    after: Iterable[str] = (),
    *,
    is_new: bool = False,
    is_durable: bool = False,
    is_name_durable: bool = True,
) -> None:
    """Write the file all at once; raise FileExistsError if `is_new` and it exists.

    The names in the folders `after` are durable before.
    """
    for folder in after:
        sync_folder(folder)
    while True:
        try:
            write_file(
                path,
                pieces,
                mode=0o666,
                is_new=is_new,
                is_durable=is_durable,
                is_name_durable=is_name_durable,
            )
            return
        except FileNotFoundError:  # a deletion takes empty folders with it
            with suppress(FileNotFoundError):
                _make_folder(os.path.dirname(path))
        except OSError as error:
            if is_new and error.errno in _NO_LINKS:
                raise Permanent(
                    f"{os.path.dirname(path)}: this file system has no hard links, so an object "
                    f"cannot be created only once ({error.strerror}): use another folder or an "
                    "object store"
                ) from None
            raise


def _make_folder(folder: str) -> None:
    """Make the folder and its parents, each with a name that survives a loss of power."""
    parent = os.path.dirname(folder)
    if not os.path.isdir(parent):
        _make_folder(parent)
    with suppress(FileExistsError):
        os.mkdir(folder)
        sync_folder(parent)


def delete_files(folder: str, paths: Sequence[str]) -> None:
    """Delete files of the folder, then the folders that are empty now; those gone are no error."""
    for path in paths:
        with suppress(FileNotFoundError):
            os.unlink(path)
    for parent in {os.path.dirname(path) for path in paths}:
        with suppress(OSError):  # it is not empty, or gone
            while parent != folder:
                os.rmdir(parent)
                parent = os.path.dirname(parent)


def read_file(path: str, start: int, end: int | None, max_bytes: int | None) -> memoryview:
    """Bytes `start:end` of the file, fewer if it is shorter. Raises FileNotFoundError."""
    file = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(file).st_size
        count = max(0, min(size, size if end is None else end) - start)
        check_size(path, count, max_bytes)
        buffer = memoryview(bytearray(count))
        return buffer[: fill_from(file, buffer, start)]
    finally:
        os.close(file)


def check_size(name: str, size: int, max_bytes: int | None) -> None:
    """Raise Permanent before memory is taken for an object that is larger than it can be."""
    if max_bytes is not None and size > max_bytes:
        raise ObjectTooLarge(f"{name}: {size} bytes, expected at most {max_bytes}")


def fill_from(file: int, buffer: memoryview, offset: int) -> int:
    """Read into the buffer; return how many bytes there were for it from `offset` on."""
    count = 0
    while count < buffer.nbytes:
        more = os.preadv(file, [buffer[count:]], offset + count)
        if not more:
            break
        count += more
    return count


def list_files(folder: str, prefix: str, after: str) -> list[ObjectInfo] | None:
    """The objects under `prefix` with keys greater than `after`, sorted; None if the names of files
    are not their keys. What others delete meanwhile may be in it or not.
    """
    match = list[ObjectInfo]()
    folders = [prefix]
    while folders:
        parent = folders.pop()
        try:
            entries = list(os.scandir(f"{folder}/{parent}"))
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in entries:
            key = f"{parent}/{entry.name}"
            if _STAGED.search(key):
                continue
            if not PLAIN_KEY.fullmatch(key):
                return None
            with suppress(FileNotFoundError):
                if entry.is_dir():
                    inside = f"{key}/"  # all keys in it begin with this
                    if inside > after or after.startswith(inside):
                        folders.append(key)
                elif key > after:
                    state = entry.stat()
                    modified = datetime.fromtimestamp(state.st_mtime_ns / 1e9, UTC)
                    match.append(ObjectInfo(key, state.st_size, modified))
    return sorted(match, key=lambda info: info.key)
