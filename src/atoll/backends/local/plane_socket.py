"""The Unix socket of a control plane: how programs of its user reach it.

It is in the state directory, where nobody else can put another one. Each side also asks the kernel
whose process the other is, before it sends or reads anything.
"""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from atoll.backends.local.files import short_name
from atoll.core.errors import Permanent

SOCKET = "socket"
_CREDENTIALS = struct.Struct("3i")  # the pid, uid and gid of SO_PEERCRED


def listen(directory: Path, backlog: int) -> socket.socket:
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


def connect(directory: Path, timeout: float) -> socket.socket:
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
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])
