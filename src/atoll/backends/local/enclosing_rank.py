"""Whether this process belongs to a rank: what it starts ends with that rank.

A rank's environment tells, and so do its ancestors': a program may clear its own, or have written
over it. Whatever a local rank leaves behind becomes a child of its supervisor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

from atoll.backends.local import processes

SHIM = b"from atoll.backends.local.watchdog import main"  # in the command line of every supervisor


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
        if any(SHIM in word for word in processes.command_line(pid)):
            # Of which of its ranks it was is not known any more.
            yield {b"ATOLL_UID": b"", b"ATOLL_NAME": b"a local training"}
        pid = processes.parent(pid)


def _text(env: dict[bytes, bytes], name: bytes) -> str:
    return env.get(name, b"?").decode(errors="replace")
