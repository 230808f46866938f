"""The files of a gang that its supervisor and its control plane both write.

Either may find them deleted or damaged by somebody else. What cannot be read is as good as absent.
Only the standard library is imported: a rank cannot start before this has loaded.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atoll.backends.local.journal import clear_way, write_durably

GANG = "gang.json"
SOCKET = "control"
RESTORE = signal.SIGHUP  # asks a supervisor that cannot be reached to write its files again
BACKLOG = 16


def read_gang(directory: Path) -> dict[str, Any]:
    """The wish, with all that a supervisor needs for it. Empty if there is none that is whole."""
    try:
        gang = json.loads((directory / GANG).read_bytes())
    except (OSError, ValueError):
        return {}
    is_complete = isinstance(gang, dict) and gang.get("uid") == directory.name
    return gang if is_complete and isinstance(gang.get("version"), int) else {}


def write_gang(directory: Path, gang: dict[str, Any]) -> None:
    directory.mkdir(exist_ok=True, mode=0o700)
    for name in ("errors", "results"):
        (directory / name).mkdir(exist_ok=True, mode=0o700)
    clear_way(directory / GANG)
    write_durably(directory / GANG, json.dumps(gang).encode())


def bound_socket(directory: Path) -> socket.socket:
    """Listens where control planes look for the supervisor, whatever was there before."""
    clear_way(directory / SOCKET)
    (directory / SOCKET).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with short_name(directory) as here:
            listener.bind(f"{here}/{SOCKET}")
            os.chmod(f"{here}/{SOCKET}", 0o600)  # whatever the umask
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def short_name(directory: Path) -> Iterator[str]:
    """A short name for the directory: socket paths may have 107 bytes at the most."""
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}"
    finally:
        os.close(folder)
