"""Where small files go that the state directory cannot take: it is full, or mounted read-only.

The places do not depend on the environment, so that every process of one user looks at the same.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
PLACES = ("/run/user/{uid}/atoll", "/dev/shm/atoll-{uid}", "/tmp/atoll-{uid}")
PROBE_BYTES = 4096


def has_room(where: Path, needed: int = 1) -> bool:
    """Whether the file system has so many bytes left. A quota does not show in this."""
    room = os.statvfs(where)
    return not room.f_flag & os.ST_RDONLY and room.f_bavail * room.f_frsize >= needed


def spare_directories(where: Path) -> Iterator[Path]:
    """The directories there are in place of `where`: of this user, and open to nobody else."""
    for place in _places():
        if _is_private(place) and _is_private(directory := _below(place, where)):
            yield directory


def make_spare(where: Path) -> Path:
    """The first of them that can be made and written. Raises OSError if there is none."""
    trouble = OSError(errno.ENOSPC, "no other place can be written")
    for place in _places():
        directory = _below(place, where)
        try:
            place.mkdir(mode=0o700, exist_ok=True)
            if not _is_private(place):
                continue
            directory.mkdir(parents=True, mode=0o700, exist_ok=True)
            if _is_private(directory) and _can_write(directory):
                return directory
        except OSError as error:
            trouble = error
    raise trouble


def _places() -> Iterator[Path]:
    return (Path(place.format(uid=os.geteuid())) for place in PLACES)


def _below(place: Path, where: Path) -> Path:
    return place / where.resolve().relative_to("/")


def _is_private(directory: Path) -> bool:
    try:
        seen = directory.lstat()
    except OSError:
        return False
    is_closed = not stat.S_IMODE(seen.st_mode) & (stat.S_IRWXG | stat.S_IRWXO)
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.geteuid() and is_closed


def _can_write(directory: Path) -> bool:
    probe = directory / f"probe.{os.getpid()}"
    try:
        probe.write_bytes(b" " * PROBE_BYTES)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return True
