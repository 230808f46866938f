"""What a machine can be short of for a while: processes, files, memory, disk.

A shortage is waited for and told. It never counts as the failure of what could not be started.
"""

from __future__ import annotations

import errno
import os

ERRNOS = (
    errno.EAGAIN,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ENOSPC,
    errno.EDQUOT,
)
MARKS = (*(os.strerror(number) for number in ERRNOS), "MemoryError")
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 10.0
SHORT = b"s"  # begins a line from the supervisor that tells of it; an empty one: it is over


def is_shortage(error: OSError) -> bool:
    return error.errno in ERRNOS


def mentions_shortage(message: str) -> bool:
    """Whether the last words of a program say that it ended for a shortage."""
    return any(mark in message for mark in MARKS)


def waiting_message(what: str, why: str | None) -> str:
    return f"waiting for the machine: cannot {what}: {why or 'no reason given'}; trying again"
