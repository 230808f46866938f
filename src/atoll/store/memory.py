"""The SQLite store without a file, for as long as the process lives."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from atoll.core.status import Training
from atoll.store.feed import Feed
from atoll.store.outbox import Outbox
from atoll.store.schema import prepare
from atoll.store.sqlite import LOG_BYTES, SQLiteStore, explained

NO_FILE = Path(":memory:")


class MemoryStore(SQLiteStore):
    """The Store of `core/ports.py` in memory only. It may be used by any one thread at a time."""

    def __init__(self, *, log_bytes: int = LOG_BYTES) -> None:
        self._path = NO_FILE
        self._log_bytes = log_bytes
        self._logged_bytes = 0
        self._feed = Feed()
        self._db = sqlite3.connect(NO_FILE, isolation_level=None, check_same_thread=False)
        prepare(self._db, NO_FILE, is_owner=True)
        self.outbox = Outbox(lambda: self._db, self._write, lambda: explained(NO_FILE))

    def close(self) -> None:
        self._feed.close()
        self._db.close()

    def _without_code(self, training: Training) -> Training:
        """Of a gang that another process launched, only the digest of its code is known here."""
        code = training.spec.code
        if code is not None and code.is_digest:
            row = (code.digest, code.content)
            self._db.execute("insert or ignore into codes values (?, ?)", row)
        return super()._without_code(training)

    def _before_write(self, is_stopping: bool) -> None:
        """There is no file that could be gone, and no disk that could be full."""

    def _after_write(self) -> None:
        """There is no file to keep room for."""
