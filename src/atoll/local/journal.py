"""The journal of a gang as a file: appended durably by one writer, followed by any reader."""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from atoll.core.retry import restart_delay_s
from atoll.local.processes import boot_id

Record = Mapping[str, Any]
PAST_KEPT = 20  # attempts of a rank before its newest, as many as stores keep


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
    up: float | None = None  # `started_at` by the monotonic clock of the gang's boot
    is_stopping: bool = False  # a wish without it was accepted; a later one does not undo that

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


class Anchor(NamedTuple):
    """One moment by the gang's own time and by the monotonic clock of that boot."""

    boot: str
    at: float
    up: float


class GangState:
    """The state of a gang after all records of its journal."""

    def __init__(self) -> None:
        self.version = 0
        self.size: int | None = None
        self.redo: dict[int, int] = {}
        self.attempts: dict[int, Attempt] = {}
        self.past: dict[int, deque[Attempt]] = {}  # the attempts before, by rank
        self.anchor: Anchor | None = None

    def fold(self, record: Record) -> None:
        kind = record["t"]
        if "boot" in record:
            self.anchor = Anchor(record["boot"], record["at"], record["up"])
        if kind == "applied":
            self.version = record["version"]
            self.size = record["size"]
            self.redo = {int(rank): attempt for rank, attempt in record["redo"].items()}
            for attempt in self.alive():
                if attempt.rank >= record["size"]:
                    self.attempts[attempt.rank] = attempt._replace(is_stopping=True)
        elif kind == "start":
            last = self.attempts.get(record["rank"])
            if last is not None:
                own = self.past.setdefault(last.rank, deque(maxlen=PAST_KEPT))
                own.append(last._replace(previous=None))
            self.attempts[record["rank"]] = Attempt(
                record["rank"],
                record["attempt"],
                record["restarts"],
                record["pid"],
                record["born"],
                record["at"],
                earlier_s=0.0 if last is None else last.ran_s(record["at"]),
                previous=None if last is None else last.exit,
                up=record.get("up"),
            )
        elif kind == "exit":
            last = self.attempts.get(record["rank"])
            if last is not None and last.attempt == record["attempt"] and last.exit is None:
                self.attempts[last.rank] = last._replace(exit=record)

    def time(self, boot: str, up: float) -> float | None:
        """The gang's own time at a moment of the monotonic clock; None if it is not known."""
        if self.anchor is None or self.anchor.boot != boot:
            return None
        return self.anchor.at + up - self.anchor.up

    def alive(self) -> list[Attempt]:
        return [a for a in self.attempts.values() if a.exit is None]

    def due(self, max_restarts: int) -> Iterator[Due]:
        """The attempts to start for the wish, within the restart budget."""
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


def encode_record(record: Record) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def parse_records(data: bytes) -> tuple[list[Record], int]:
    """The complete records in `data` and their size in bytes. A torn last line is left out."""
    whole = data.rfind(b"\n") + 1
    return [json.loads(line) for line in data[:whole].splitlines() if line], whole


RESERVE_BYTES = 64 * 1024  # set aside at the start, so that exits still fit on a full disk


class JournalReader:
    """The state of a gang as far as the file has been read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.offset = 0
        self.state = GangState()

    def refresh(self) -> bool:
        """Reads on; returns whether there were new records."""
        try:
            with self._path.open("rb") as file:
                file.seek(self.offset)
                records, consumed = parse_records(file.read())
        except FileNotFoundError:
            if self.offset:
                self.offset, self.state = 0, GangState()
            return False
        for record in records:
            self.state.fold(record)
        self.offset += consumed
        return bool(records)


class JournalWriter:
    """Appends to the journal. The caller holds the gang's lock, so there is one writer."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.state = GangState()
        data = b""
        while chunk := os.read(self._file, 1 << 20):
            data += chunk
        records, self._end = parse_records(data)
        os.ftruncate(self._file, self._end)  # a line torn by a crash was never acknowledged
        for record in records:
            self.state.fold(record)
        self._last_at = max((record["at"] for record in records), default=0.0)
        self._anchor = self._own_anchor(boot_id())
        reserve(self._file, self._end)

    def now(self) -> float:
        """The gang's own time: always later than the last one, so that records keep their order.

        It starts as the wall clock and goes on as the monotonic one, under later supervisors too:
        setting the wall clock changes no duration.
        """
        at = self._anchor.at + time.monotonic() - self._anchor.up
        self._last_at = max(at, self._last_at + 1e-6)
        return self._last_at

    def _own_anchor(self, boot: str) -> Anchor:
        stored = self.state.anchor
        if stored is not None and stored.boot == boot:
            return stored
        return Anchor(boot, max(time.time(), self._last_at), time.monotonic())

    def stamp(self) -> dict[str, Any]:
        """The present moment, for a record that later supervisors take their time from."""
        return {"at": self.now(), "up": time.monotonic(), "boot": self._anchor.boot}

    def append(self, records: Sequence[Record]) -> None:
        """Writes the records durably. On a full disk it raises OSError and writes nothing."""
        data = b"".join(encode_record(record) for record in records)
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._end + written)
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        self._end += len(data)
        for record in records:
            self.state.fold(record)

    def close(self) -> None:
        os.close(self._file)


def reserve(file: int, end: int) -> None:
    """Reserves disk blocks past the end of the file without changing its size."""
    try:
        import ctypes

        keep_size = 1
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate(
            file, keep_size, ctypes.c_int64(end), ctypes.c_int64(RESERVE_BYTES)
        )  # without a reserve, a full disk is handled by retrying
    except (OSError, AttributeError):
        return


def write_durably(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replaces the content of `path` by `data`, atomically."""
    draft = path.with_name(path.name + ".new")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(file, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
