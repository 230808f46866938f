"""The journal of a local training: appended durably by one writer, followed by any reader.

One line is one batch of records, `{"n":17,"r":[…]}`, and `n` grows by one. What is torn or rolled
back has no newline, so no reader sees a part of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from atoll.agent.records import Facts
from atoll.backends.local.processes import boot_id
from atoll.files.writing import clear_way, write_file

FORMAT = 2  # of the journal, in its first line
# How often a supervisor shows that it lives, in the time stamp of its journal. A machine that loses
# power dates the ends of its ranks by it, so this is what they may be charged too little.
JOURNAL_STAMP_S = 60.0


class Anchor(NamedTuple):
    """One moment by the training's own time and by the monotonic clock of that boot."""

    boot: str
    at: float
    up: float


def anchor_of(facts: Facts) -> Anchor | None:
    """Return the moment that the newest desired state was accepted."""
    desired = facts.desired
    if desired is None or "boot" not in desired:
        return None
    return Anchor(desired["boot"], desired["at"], desired["up"])


def time_of(facts: Facts, boot: str, up: float) -> float | None:
    """Return the training's own time at a moment of the monotonic clock; None if unknown."""
    anchor = anchor_of(facts)
    return None if anchor is None or anchor.boot != boot else anchor.at + up - anchor.up


RESERVE_BYTES = 64 * 1024  # reserved at the start: exits of 16 ranks still fit on a full disk


Record = Mapping[str, Any]


class JournalDamaged(Exception):
    """The journal is not what its writer wrote: lines are broken, missing, or older ones."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"{path} is damaged: {what}")


class Cursor(NamedTuple):
    """How far a journal has been read. It is a value: reading twice from one is harmless."""

    inode: int = 0
    offset: int = 0
    batch: int = 0  # the number of the last one read


def encode_batch(number: int, records: Sequence[Record]) -> bytes:
    head = {"format": FORMAT} if number == 1 else {}
    return json.dumps({**head, "n": number, "r": records}, separators=(",", ":")).encode() + b"\n"


def read_batches(data: bytes, after: int) -> Iterator[tuple[int, list[Record]]]:
    """The size and the records of each whole batch in `data`, the first of which follows `after`.

    What has no newline yet is left out. Raises ValueError at a line that is no such batch.
    """
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(True), after + 1):
        document = json.loads(line)
        if not isinstance(document, dict) or document.get("n") != number:
            raise ValueError(f"there is no batch {number} where it should be")
        if number == 1 and document.get("format") != FORMAT:
            raise ValueError(f"its format is {document.get('format')}, expected {FORMAT}")
        yield len(line), document["r"]


def is_salvageable(path: Path) -> bool:
    """Whether a journal is broken, and begins with something that is not."""
    count = 0
    try:
        for _ in read_batches(path.read_bytes(), 0):
            count += 1
    except OSError:
        return False
    except ValueError:
        return count > 0
    return False


class JournalReader:
    """The facts of a training as far as its journal has been read. It has one owner."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._view = (Cursor(), Facts())  # replaced as a whole: threads cannot tear it

    @property
    def cursor(self) -> Cursor:
        return self._view[0]

    @property
    def facts(self) -> Facts:
        """What has been read; never changed once it was returned."""
        return self._view[1]

    def refresh(self) -> bool:
        """Read on; return whether there were new records. A file that was replaced is read anew.

        Raises JournalDamaged, and keeps what it has, if the file is broken, or older than what was
        read before. A journal that has not been written yet is empty.
        """
        before, facts = self._view
        try:
            cursor, records = self._read(before)
            facts = facts.copy() if records else facts
        except ValueError:
            try:
                cursor, records = self._read(Cursor())
            except ValueError as error:
                raise JournalDamaged(self._path, str(error)) from error
            facts = Facts()
        if cursor.batch < before.batch:
            message = f"it ends with batch {cursor.batch}, and had {before.batch}"
            raise JournalDamaged(self._path, message)
        for record in records:
            facts.add(record)
        self._view = (cursor, facts)
        return cursor != before

    def _read(self, cursor: Cursor) -> tuple[Cursor, list[Record]]:
        """Raises ValueError if the cursor does not fit the file, or a line is broken."""
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if cursor.inode not in (0, status.st_ino) or status.st_size < cursor.offset:
                    raise ValueError("it is another file")
                file.seek(cursor.offset)
                data = file.read()
        except (FileNotFoundError, NotADirectoryError):
            if cursor.inode:
                raise ValueError("it is missing") from None
            return cursor, []
        except IsADirectoryError:
            raise ValueError("it is a directory") from None
        offset, batch, read_records = cursor.offset, cursor.batch, []
        for size, records in read_batches(data, batch):
            read_records += records
            offset, batch = offset + size, batch + 1
        return Cursor(status.st_ino, offset, batch), read_records


class JournalWriter:
    """Appends to the journal. The caller holds the training's lock, so there is one writer.

    It knows all that it has written, and writes it again where somebody has deleted or changed it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = self._open()
        self.facts = Facts()
        self._batches = 0
        self._data = bytearray()
        self._last_at = 0.0
        data = b""
        while chunk := os.read(self._file, 1 << 20):
            data += chunk
        stamp = os.fstat(self._file).st_mtime
        try:
            self._take_over(data)
            os.ftruncate(self._file, len(self._data))  # nobody has read what a crash has torn
        except ValueError:  # the ranks are judged by the batches before it
            os.rename(path, path.with_name(path.name + ".damaged"))
            self._write_anew()
        self._anchor = self._own_anchor(boot_id())
        self._last_alive = min(max(stamp, self._last_at), self._anchor_now())
        reserve(self._file, len(self._data))

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def _take_over(self, data: bytes) -> None:
        for size, records in read_batches(data, 0):
            for record in records:
                self.facts.add(record)
                self._last_at = max(self._last_at, record["at"])
            self._data += data[len(self._data) : len(self._data) + size]
            self._batches += 1

    def now(self) -> float:
        """Its own time: always later than the last one, so that records keep their order.

        It starts as the wall clock and goes on as the monotonic one, under later supervisors too:
        setting the wall clock changes no duration.
        """
        self._last_at = max(self._anchor_now(), self._last_at + 1e-6)
        return self._last_at

    def last_alive_at(self) -> float:
        """When an earlier supervisor last showed that it lived, by the training's own time."""
        return self._last_alive

    def is_of_this_boot(self) -> bool:
        """Whether the journal has the time of this boot, for readers and later supervisors."""
        anchor = anchor_of(self.facts)
        return anchor is not None and anchor.boot == self._anchor.boot

    def heartbeat(self) -> None:
        """Shows that the supervisor lives, in the time stamp of the file."""
        with contextlib.suppress(OSError):  # a sign of life more or less
            os.utime(self._file, times=(self.now(),) * 2)

    def _anchor_now(self) -> float:
        return self._anchor.at + time.monotonic() - self._anchor.up

    def _own_anchor(self, boot: str) -> Anchor:
        stored = anchor_of(self.facts)
        if stored is not None and stored.boot == boot:
            return stored
        return Anchor(boot, max(time.time(), self._last_at), time.monotonic())

    def stamp(self) -> dict[str, Any]:
        """The present moment, for a record that later supervisors take their time from."""
        return {"at": self.now(), "up": time.monotonic(), "boot": self._anchor.boot}

    def append(self, records: Sequence[Record]) -> None:
        """Write the records durably, as one batch, but for those whose key is taken.

        On a full disk it raises OSError and writes nothing.
        """
        records = [record for record in records if not self.facts.has(record)]
        if not records:
            return
        if not self._is_current():
            # Without even a directory for it, it goes on in the file that has no name.
            with contextlib.suppress(OSError):
                self._write_anew()
        data, end = encode_batch(self._batches + 1, records), len(self._data)
        try:
            written = 0
            while written < len(data):
                written += os.pwrite(self._file, data[written:], end + written)
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, end)
            raise
        self._data += data
        self._batches += 1
        for record in records:
            self.facts.add(record)
        self.heartbeat()

    def restore(self) -> bool:
        """Writes the journal again if it is not as it was written. Returns whether it was not."""
        try:
            if self._is_current() and self._path.read_bytes() == self._data:
                return False
        except OSError:
            pass
        self._write_anew()
        return True

    def _is_current(self) -> bool:
        try:
            current, own = os.stat(self._path), os.fstat(self._file)
        except OSError:
            return False
        return os.path.samestat(current, own) and current.st_size == len(self._data)

    def _write_anew(self) -> None:
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        clear_way(self._path)
        write_file(self._path, bytes(self._data))
        file = self._open()
        os.close(self._file)
        self._file = file
        reserve(self._file, len(self._data))

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
