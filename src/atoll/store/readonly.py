"""What a store's file holds where nothing can be written: on a disk that is full, or mounted
read-only."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from atoll.core.errors import Temporary
from atoll.core.ports import Token
from atoll.store.feed import Feed
from atoll.store.schema import check_readable
from atoll.store.sqlite import Changes, SQLiteStore, explained, locked
from atoll.store.tokens import SQLiteTokens

RETRY_S = 30.0


class ReadOnlyStore(SQLiteStore):
    """The Store of `core/ports.py` on a file that it never writes: every write is refused."""

    def __init__(self, path: Path, refusal: str) -> None:
        self._path = path
        self._refusal = refusal
        self._feed = Feed()
        self._lock = locked(path)
        try:
            self._db = opened(path)
        except BaseException:
            os.close(self._lock)
            raise

    @contextlib.contextmanager
    def _write(self, *, is_stopping: bool = False) -> Iterator[Changes]:
        raise Temporary(self._refusal, retry_after_s=RETRY_S)
        yield []


class ReadOnlyTokens(SQLiteTokens):
    """The Tokens of `core/ports.py` on the same file."""

    def __init__(self, path: Path, refusal: str) -> None:
        super().__init__(path)
        self._refusal = refusal

    async def add(self, hashed: str, namespace: str, label: str, now: float) -> Token:
        raise Temporary(self._refusal, retry_after_s=RETRY_S)

    async def remove(self, id: str) -> bool:
        raise Temporary(self._refusal, retry_after_s=RETRY_S)

    @cached_property
    def _db(self) -> sqlite3.Connection:
        return opened(self._path)


def opened(path: Path) -> sqlite3.Connection:
    """Sees also what is only in the write-ahead log. Makes and changes no file.

    Raises Permanent where the file cannot be read.
    """
    log = Path(f"{path}-wal")
    # The index of a log that is there is made in memory. Without a log, SQLite is told not to look
    # for one: it would create it.
    is_logged = log.exists() and log.stat().st_size > 0
    how = "mode=ro&readonly_shm=1" if is_logged else "mode=ro&immutable=1"
    with explained(path):
        db = sqlite3.connect(
            f"{path.absolute().as_uri()}?{how}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            check_readable(db, path)
        except BaseException:
            db.close()
            raise
    return db
