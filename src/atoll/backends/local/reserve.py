"""Files with blocks of their own, so that ranks can be stopped on a full disk.

To stop ranks their supervisor needs a new gang document. Where there is no room for one, a file of
the reserve is filled and takes its name: no block is asked for that a rank could take first.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from atoll.backends.local.journal import clear_way, write_durably
from atoll.core.errors import Permanent, Temporary
from atoll.files.ownership import make_private

FOLDER = "reserve"
FILES = 4  # two for each training that is stopped: its record and its document
FILE_BYTES = 64 * 2**10  # a gang document with an environment of the usual size, many times over

# What a control plane writes when it starts: SQLite's files and the small ones beside them.
START_BYTES = 2**18
REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or raise the quota",
    errno.EROFS: "mount it writable",
}


def check_writable(where: Path) -> None:
    """Creates the state directory. Raises Permanent if nothing can be written there."""
    probe = where / f"space.{os.getpid()}"
    try:
        make_private(where)
        probe.write_bytes(bytes(START_BYTES))
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0)
        if remedy is None:
            raise Permanent(
                f"cannot keep state in {where}: {error.strerror}; set ATOLL_STATE_DIR"
            ) from error
        raise Permanent(
            f"cannot write to {where}: {error.strerror}: {remedy}, then start the control plane "
            "again; running ranks are not affected"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def has_space(where: Path, needed: int) -> bool:
    """Whether the file system has this many bytes left. A quota does not show in this."""
    free = os.statvfs(where)
    return not free.f_flag & os.ST_RDONLY and free.f_bavail * free.f_frsize >= needed


class Reserve:
    """The reserve of one state directory."""

    def __init__(self, where: Path) -> None:
        self._folder = where / FOLDER

    def renew(self) -> None:
        """Makes the files that are missing, if there is room to spare."""
        with contextlib.suppress(OSError):
            self._folder.mkdir(exist_ok=True, mode=0o700)
            for number in range(FILES):
                path = self._folder / str(number)
                if not path.exists() and has_space(self._folder, 4 * FILES * FILE_BYTES):
                    _make(path)

    def save(self, path: Path, data: bytes) -> None:
        """Replaces the content of `path`, atomically, from the reserve if the disk is full.

        For what stops ranks alone: nothing else would stop one that fills it. Raises Temporary.
        """
        try:
            clear_way(path)
            try:
                write_durably(path, data)
            except OSError:
                self._write(path, data)
        except OSError as error:
            raise Temporary(f"cannot write {path}: {error.strerror}") from error

    def _write(self, path: Path, data: bytes) -> None:
        """Raises OSError if no reserve is left."""
        if len(data) > FILE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        draft = path.with_name(path.name + ".new")
        for number in range(FILES):
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._folder / str(number), draft)
                break
        else:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file = os.open(draft, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(file, data, 0)
            os.ftruncate(file, len(data))
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(draft, path)


def _make(path: Path) -> None:
    draft = path.with_name(f"{path.name}.new")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(file, 0, FILE_BYTES)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    finally:
        os.close(file)
    draft.replace(path)
