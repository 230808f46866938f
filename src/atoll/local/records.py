"""What a supervisor of local ranks writes down, and what follows from it. Pure.

The journal is the one truth about a gang on this machine: which wish was accepted, which attempt
of which rank was started, and how each ended. Supervisor and executor fold the same records, so
they cannot disagree. Only the standard library: this is imported before any rank can start.

Records are JSON objects, one a line:
    {"t": "applied", "version", "size", "redo", "at"}
    {"t": "start", "rank", "attempt", "restarts", "pid", "born", "at"}
    {"t": "exit", "rank", "attempt", "code", "signal", "reason", "stopped", "at", ...}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Record = Mapping[str, Any]


class Attempt(NamedTuple):
    """The newest attempt of a rank. `born` tells its process from a later one of the same pid."""

    rank: int
    attempt: int
    restarts: int
    pid: int
    born: int
    started_at: float
    exit: Record | None = None
    earlier_s: float = 0.0  # how long the attempts before this one ran
    previous: Record | None = None  # how the one before this ended

    def ran_s(self, now: float) -> float:
        """How long the rank has run in all its attempts."""
        until = now if self.exit is None else self.exit["at"]
        return self.earlier_s + max(until - self.started_at, 0.0)


class Due(NamedTuple):
    """An attempt to be started, not before `at`."""

    rank: int
    attempt: int
    restarts: int
    at: float


class GangState:
    """The fold of a journal."""

    def __init__(self) -> None:
        self.version = 0
        self.size: int | None = None
        self.redo: dict[int, int] = {}
        self.attempts: dict[int, Attempt] = {}

    def fold(self, record: Record) -> None:
        kind = record["t"]
        if kind == "applied":
            self.version = record["version"]
            self.size = record["size"]
            self.redo = {int(rank): attempt for rank, attempt in record["redo"].items()}
        elif kind == "start":
            last = self.attempts.get(record["rank"])
            self.attempts[record["rank"]] = Attempt(
                record["rank"],
                record["attempt"],
                record["restarts"],
                record["pid"],
                record["born"],
                record["at"],
                earlier_s=0.0 if last is None else last.ran_s(record["at"]),
                previous=None if last is None else last.exit,
            )
        elif kind == "exit":
            last = self.attempts.get(record["rank"])
            if last is not None and last.attempt == record["attempt"] and last.exit is None:
                self.attempts[last.rank] = last._replace(exit=record)

    def alive(self) -> list[Attempt]:
        return [a for a in self.attempts.values() if a.exit is None]

    def due(self, max_restarts: int) -> Iterator[Due]:
        """What is to be started for the wish, within the restart budget."""
        for rank in range(self.size or 0):
            last, redone = self.attempts.get(rank), self.redo.get(rank, -1)
            if last is None or (last.exit is not None and last.attempt <= redone):
                attempt = max(redone, -1 if last is None else last.attempt) + 1
                yield Due(rank, attempt, 0, 0.0)
                continue
            if last.exit is None or last.exit["stopped"] or last.exit["code"] == 0:
                continue
            if last.restarts < max_restarts:
                at = last.exit["at"] + restart_delay_s(last.restarts)
                yield Due(rank, last.attempt + 1, last.restarts + 1, at)


def restart_delay_s(restarts: int) -> float:
    """The first restart is at once, later ones wait longer and longer."""
    return 0.0 if restarts == 0 else min(0.5 * 2 ** min(restarts, 10), 30.0)


def encode_record(record: Record) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def parse_records(data: bytes) -> tuple[list[Record], int]:
    """The whole records in `data`, and how many bytes they are. A torn last line is left."""
    whole = data.rfind(b"\n") + 1
    return [json.loads(line) for line in data[:whole].splitlines() if line], whole
