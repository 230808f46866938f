"""What a control plane and the supervisor of a training share: files, a socket, and its messages.

Either may find the files deleted or damaged by somebody else. What cannot be read is as good as
absent. Only the standard library is imported: a rank cannot start before this has loaded.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from atoll.agent.records import RESULT, AttemptFacts, name_of
from atoll.files.writing import clear_way, write_file

DESIRED_FILE = "desired.json"
WATCHDOG_FILE = "watchdog"  # names the process of the watchdog
SOCKET = "control"
STACKS = "stacks"  # a folder that is kept as long as the logs
RESTORE = signal.SIGHUP  # asks a supervisor that cannot be reached to write its files again
BACKLOG = 16  # control planes that connect at once: there is one, and whoever replaces it
# Bytes on the socket. From a client:
READ_DESIRED = b"w"  # there is a new desired state, or something is amiss with the files
FOLLOW_LOGS, LEAVE_LOGS = b"f", b"u"
# From the supervisor:
RECORDS_GREW = b"r"
LOGS_GREW = b"l"  # begins a line with the ranks whose logs grew, for clients that follow logs
SHORT = b"s"  # begins a line about a shortage
HEARTBEAT = b"h"
HEARTBEAT_S = 1.0  # three that are missing raise suspicion: a frozen supervisor is known in 4 s
# What a machine can be short of for a while: processes, files, memory, disk. A shortage is waited
# for and reported. It never counts as the failure of what could not be started.
ERRNOS = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT)
MARKS = (*(os.strerror(number) for number in ERRNOS), "MemoryError")
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 10.0  # between two tries, of which each costs a few forks


def read_desired(directory: Path) -> dict[str, Any]:
    """The desired state, with all that a supervisor needs for it. Empty if none can be read."""
    try:
        desired = json.loads((directory / DESIRED_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    is_complete = isinstance(desired, dict) and desired.get("uid") == directory.name
    return desired if is_complete and isinstance(desired.get("version"), int) else {}


def write_desired(directory: Path, desired: dict[str, Any]) -> None:
    directory.mkdir(exist_ok=True, mode=0o700)
    for name in ("errors", "results"):
        (directory / name).mkdir(exist_ok=True, mode=0o700)
    clear_way(directory / DESIRED_FILE)
    write_file(directory / DESIRED_FILE, json.dumps(desired).encode())


def bound_socket(directory: Path) -> socket.socket:
    """Listens where control planes connect to the supervisor, whatever was there before."""
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


def mentions_shortage(message: str) -> bool:
    """Whether a program ended for a shortage, by the last line that it printed."""
    return any(mark in message for mark in MARKS)


def waiting_message(what: str, why: str | None) -> str:
    return f"waiting for the machine: cannot {what}: {why or 'no reason given'}; trying again"


def end_key(attempt: AttemptFacts) -> str:
    return f"{attempt.pid}.{attempt.start_ticks}"


def write_ends(directory: Path, ends: dict[str, float]) -> None:
    """Notes for a supervisor that was stopped when each rank was first missing, by `end_key`.

    The times are those of the monotonic clock, which all processes of a machine share.
    """
    if ends:
        write_file(directory / "ends", json.dumps(ends).encode(), is_durable=False)


def read_ends(directory: Path) -> dict[str, float]:
    try:
        ends: dict[str, float] = json.loads((directory / "ends").read_bytes())
    except (OSError, ValueError):
        return {}
    return ends


def result_file(directory: Path, rank: int, attempt: int) -> str:
    """Return the file in which `atoll.set_result` writes."""
    return str(directory / "results" / name_of(rank, attempt, RESULT))


def stacks_file(directory: Path, rank: int, attempt: int) -> str:
    """Where the stacks are that were last taken of an attempt by atoll itself."""
    return str(directory / STACKS / f"{rank}.{attempt}.json")


def read_stacks(directory: Path, rank: int, attempt: int) -> dict[str, Any] | None:
    try:
        with open(stacks_file(directory, rank, attempt), encoding="utf-8") as file:
            stacks: dict[str, Any] = json.load(file)
        return stacks
    except (OSError, ValueError):
        return None


def error_file(directory: Path, rank: int, attempt: int) -> str:
    """The file in which torch's @record and atoll's entry points write when and why they failed."""
    return str(directory / "errors" / f"{rank}.{attempt}.json")
