"""The state directory of a control plane: where it is, whether it can be used, and its socket.

Nobody else can put another socket there. Each side also asks the kernel whose process the other is,
before it sends or reads anything. No control plane is started inside of a rank, with which it would
end: a rank's environment tells, and so do its ancestors', as a program may clear its own, or have
written over it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from atoll.backends.local import processes
from atoll.backends.local.protocol import short_name
from atoll.core.errors import Permanent
from atoll.files.ownership import check_directory, make_private

ENDPOINT = "endpoint.json"  # where its control plane listens
SOCKET = "socket"
_CREDENTIALS = struct.Struct("3i")  # the pid, uid and gid of SO_PEERCRED
SUPERVISOR_CODE = (
    b"from atoll.backends.local.watchdog import main"  # in the command line of every supervisor
)
# What a control plane writes when it starts: SQLite's files and the small ones beside them.
START_BYTES = 2**18
REMEDIES = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or raise the quota",
    errno.EROFS: "mount it writable",
}


def home() -> Path | None:
    """The user's home directory, by HOME or the system's list of users; None if neither has one."""
    if os.environ.get("HOME") == "":
        return None
    try:
        return Path.home().absolute()
    except RuntimeError:
        return None


def state_dir(override: Path | None = None) -> Path:
    """The directory that is given, else ATOLL_STATE_DIR, else the user's own of the platform.

    Raises Permanent if there is none, or others could give commands through it.
    """
    where = (override or _usual()).absolute()
    check_directory(where)
    return where


def _usual() -> Path:
    if override := os.environ.get("ATOLL_STATE_DIR"):
        return Path(override)
    base = os.environ.get("XDG_STATE_HOME")
    if base:
        return Path(base) / "atoll"
    if (user := home()) is None:
        raise Permanent("there is no home directory to keep state in: set ATOLL_STATE_DIR")
    return user / ".local" / "state" / "atoll"


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


def listen_locally(directory: Path, backlog: int) -> socket.socket:
    """A new listening socket in the directory, in place of what an earlier control plane left.

    Only who holds the lock of the state directory may call this. Raises Permanent.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listening.fileno(), 0o600)  # the file gets this mode when it is made
        (directory / SOCKET).unlink(missing_ok=True)
        with short_name(directory) as name:
            listening.bind(f"{name}/{SOCKET}")
        listening.listen(backlog)
    except OSError as error:
        listening.close()
        raise Permanent(
            f"cannot listen on {directory / SOCKET}: {error.strerror}; choose a state directory "
            "on a local file system (ATOLL_STATE_DIR, --state-dir)"
        ) from error
    return listening


def connect_locally(directory: Path, timeout: float) -> socket.socket:
    """A connection to the control plane. Raises OSError if none is there, and Permanent if what
    listens there is another user's."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        with short_name(directory) as name:
            connection.connect(f"{name}/{SOCKET}")
        check_listener(connection, directory)
    except BaseException:
        connection.close()
        raise
    return connection


def check_listener(connection: socket.socket, directory: Path) -> None:
    """Raises Permanent unless the other side listens as the user of this process."""
    if (uid := peer_uid(connection)) != os.geteuid():
        raise Permanent(
            f"{directory / SOCKET} is served by the user with id {uid}, not by you: nothing was "
            "sent; choose a directory of your own (ATOLL_STATE_DIR)"
        )


def peer_uid(connection: socket.socket) -> int:
    """The user who connected, or who began to listen at the other side."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])


class EnclosingRank(NamedTuple):
    """The rank that a process is, or that started it, however many processes lie between."""

    training: str
    rank: str

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.training}"


def enclosing_rank() -> EnclosingRank | None:
    """None outside of ranks."""
    for env in _environments():
        if b"ATOLL_UID" in env:
            return EnclosingRank(_text(env, b"ATOLL_NAME"), _text(env, b"ATOLL_RANK"))
    return None


def _environments() -> Iterator[dict[bytes, bytes]]:
    """Those of this process and its ancestors, the nearest first."""
    yield dict(os.environb)
    pid = os.getpid()
    while pid > 1:
        yield processes.environment_of(pid)
        if any(SUPERVISOR_CODE in argument for argument in processes.command_line(pid)):
            # Of which of its ranks it was, nobody knows.
            yield {b"ATOLL_UID": b"", b"ATOLL_NAME": b"a local training"}
        pid = processes.parent(pid)


def _text(env: dict[bytes, bytes], name: bytes) -> str:
    return env.get(name, b"?").decode(errors="replace")
