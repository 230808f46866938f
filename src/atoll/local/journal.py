"""The journal of a gang as a file: appended durably by one writer, followed by any reader."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from atoll.local.records import GangState, Record, encode_record, parse_records

RESERVE_BYTES = 64 * 1024  # set aside at the start, so that exits still fit on a full disk


class JournalReader:
    """The state of a gang as far as the file has been read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.offset = 0
        self.state = GangState()

    def refresh(self) -> bool:
        """Whether there was anything new."""
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
    """Appends. The caller holds the gang's lock: there is one writer at a time."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.state = GangState()
        data = b""
        while chunk := os.read(self._file, 1 << 20):
            data += chunk
        records, self._end = parse_records(data)
        os.ftruncate(self._file, self._end)  # a line torn by a crash was never promised
        for record in records:
            self.state.fold(record)
        reserve(self._file, self._end)

    def append(self, records: Sequence[Record]) -> None:
        """On the disk when this returns. On a full disk raises OSError and nothing is written."""
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
    """Blocks past the end are set aside without showing in the file's size."""
    try:
        import ctypes

        keep_size = 1
        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate(
            file, keep_size, ctypes.c_int64(end), ctypes.c_int64(RESERVE_BYTES)
        )  # where it cannot be done, a full disk is met by trying again
    except (OSError, AttributeError):
        return


def write_durably(path: Path, data: bytes, mode: int = 0o600) -> None:
    """`path` holds `data`, whole, or what it held before."""
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
