"""Stacks of local ranks: taken by the control plane or the supervisor, kept beside the logs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from atoll.agent.records import AttemptFacts
from atoll.agent.stacks import find_py_spy, take, write_dumps
from atoll.backends.local import processes
from atoll.backends.local.protocol import STACKS, stacks_file

# Ranks whose stacks are taken before they are killed, of those that are killed at once: a hang of
# thousands has a few places, and each rank takes some 50 ms.
MAX_RANKS = 32
MAX_AT_ONCE = 8


def take_stacks(
    attempts: Sequence[AttemptFacts], cause: str = "", *, can_continue: bool = False
) -> Iterator[dict[str, Any]]:
    """The stacks of these ranks, as JSON has them. They take some 50 ms, seconds at worst.

    With `can_continue`, ranks that a signal stopped run on until they have dumped theirs.
    """
    py_spy = find_py_spy()

    def take_one(one: AttemptFacts) -> dict[str, Any]:
        entry: dict[str, Any] = {"rank": one.rank, "attempt": one.attempt, "at": time.time()}
        entry["cause"] = cause
        if processes.is_running(one.pid, one.start_ticks):
            entry["processes"] = take(one.pid, py_spy, can_continue=can_continue)
        else:
            entry["reason"] = "it has ended"
        return entry

    if len(attempts) <= 1:
        yield from map(take_one, attempts)
        return
    from concurrent.futures import ThreadPoolExecutor  # slow to import, and rarely needed

    with ThreadPoolExecutor(MAX_AT_ONCE) as pool:  # ranks mostly wait for their turn of the CPU
        yield from pool.map(take_one, attempts)


def keep_stacks(
    directory: Path, attempts: Sequence[AttemptFacts], cause: str, *, can_continue: bool = False
) -> None:
    """Takes stacks and writes each to its file, as soon as it is taken."""
    (directory / STACKS).mkdir(exist_ok=True, mode=0o700)
    for entry in take_stacks(attempts[:MAX_RANKS], cause, can_continue=can_continue):
        write_dumps(stacks_file(directory, entry["rank"], entry["attempt"]), entry)
    for one in attempts[MAX_RANKS:]:
        reason = f"those of {MAX_RANKS} other ranks were taken"
        entry = {"rank": one.rank, "attempt": one.attempt, "at": time.time(), "reason": reason}
        write_dumps(stacks_file(directory, one.rank, one.attempt), entry)


def keep_in_child(
    directory: Path, attempts: Sequence[AttemptFacts], cause: str, *, can_continue: bool
) -> int:
    """Has a child do it, so that its parent goes on. Returns its pid."""
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            processes.die_with_parent(parent)
            keep_stacks(directory, attempts, cause, can_continue=can_continue)
        finally:
            os._exit(0)
    return pid


def stored_stacks(directory: Path) -> list[dict[str, Any]]:
    """What was kept of each rank, of its newest attempt, in order of rank."""
    newest: dict[int, dict[str, Any]] = {}
    for path in (directory / STACKS).glob("*.json"):
        with contextlib.suppress(OSError, ValueError):
            stacks = json.loads(path.read_bytes())
            if stacks["attempt"] >= newest.get(stacks["rank"], stacks)["attempt"]:
                newest[stacks["rank"]] = stacks
    return [newest[rank] for rank in sorted(newest)]
