"""The SQLite file of the metrics. The control plane survives whatever happens to it.

No training depends on this file. So one that is damaged or has another format is quarantined under
a name that says so, and an empty one replaces it. A file that is deleted or replaced while it is in
use is written again from the one that is still open.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from atoll.core.errors import Permanent, Temporary
from atoll.files.ownership import make_private_file

FORMAT = 2  # of the tables; a file with another one is quarantined
BUSY_S = 1.0  # a statement waits so long for another process, such as a backup
MAX_NOTES = 10  # warnings in memory; more repeat the same
# Not a fault of the file: another process has it locked, or the disk is full.
TEMPORARY = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_INTERRUPT,
)
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
MEMORY = ":memory:"

log = logging.getLogger(__name__)


class MetricFile:
    """One file for several threads: `with file:` locks it.

    Inside, errors of SQLite become Temporary, and a damaged file is quarantined. `trouble` is the
    last write error; it is empty once a write has worked again.
    """

    def __init__(self, path: Path | str, schema: str, what: str = "metrics") -> None:
        """`what` names the content, for messages."""
        self._path = path
        self._what = what
        self._schema = schema
        self._lock = threading.RLock()
        self._depth = 0
        self._stats: dict[Path, os.stat_result] = {}
        self.trouble = ""
        self.notes: list[str] = []  # files that were quarantined, and why
        self.on_rollback: Callable[[], None] = lambda: None  # after a transaction was rolled back
        self.on_empty: Callable[[], None] = lambda: (
            None
        )  # after an empty file replaced a damaged one
        self.db = self._opened()

    def __enter__(self) -> MetricFile:
        self._lock.acquire()
        self._depth += 1
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._depth -= 1
        try:
            if isinstance(error, sqlite3.Error) and not self._depth:
                self.trouble = f"{self._path}: {error}"
                if _code(error) in DAMAGED:
                    with contextlib.suppress(OSError, sqlite3.Error):  # else the next user does
                        self._replace(str(error))
                raise Temporary(
                    f"{self._what} cannot be read or written: {self.trouble}"
                ) from error
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        self.db.execute("begin immediate")
        try:
            yield
            self.db.execute("commit")
        except BaseException:
            self.on_rollback()
            if self.db.in_transaction:
                self.db.execute("rollback")
            raise
        self.trouble = ""

    def check(self) -> None:
        """Writes the file again if it was deleted or replaced: SQLite would go on writing into the
        old one, which has no name any more."""
        with self:
            if str(self._path) == MEMORY:
                return
            self._note_files()
            missing = [path for path, before in self._stats.items() if not _is_same(path, before)]
            if missing:
                self._restore(f"{missing[0]} was deleted or replaced")
            elif self.trouble:
                with self.transaction():  # find out whether writes work again
                    pass

    def close(self) -> None:
        with self._lock:
            self.db.close()

    def _opened(self) -> sqlite3.Connection:
        """Raises Permanent if the file cannot be created."""
        try:
            return self._open()
        except sqlite3.Error as error:
            if _code(error) in TEMPORARY:
                raise Permanent(f"cannot use {self._path}: {error}") from error
            self._quarantine(str(error))
        try:
            return self._open()
        except sqlite3.Error as error:
            raise Permanent(f"cannot use {self._path}: {error}") from error

    def _open(self) -> sqlite3.Connection:
        if str(self._path) != MEMORY:
            with contextlib.suppress(OSError):  # SQLite says why it cannot be opened
                make_private_file(Path(self._path))
        db = sqlite3.connect(
            self._path, isolation_level=None, check_same_thread=False, timeout=BUSY_S
        )
        try:
            db.execute("pragma journal_mode = wal")
            db.execute("pragma synchronous = normal")
            (version,) = db.execute("pragma user_version").fetchone()
            (tables,) = db.execute("select count(*) from sqlite_schema").fetchone()
            if tables and version != FORMAT:
                raise sqlite3.DatabaseError(f"its format is {version}, and not {FORMAT}")
            if not tables:
                db.executescript(f"begin; {self._schema}; pragma user_version = {FORMAT}; commit")
        except BaseException:
            db.close()
            raise
        self._stats = {}
        self._note_files()
        return db

    def _note_files(self) -> None:
        """Remembers the identity of each file; SQLite creates its log when it needs one."""
        for path in _files(self._path):
            with contextlib.suppress(OSError):
                self._stats.setdefault(path, path.stat())

    def _replace(self, why: str) -> None:
        """Replaces a damaged file by an empty one."""
        self.db.close()
        self._quarantine(why)
        self.db = self._open()
        self.on_empty()

    def _restore(self, why: str) -> None:
        """Writes the content of the open file to its path, and quarantines what is there now."""
        before = self.db
        self._quarantine(why)
        self.db = self._open()
        try:
            before.backup(self.db)
        except sqlite3.Error as error:
            log.warning("%s cannot be written again from the open file: %s", self._path, error)
            self.on_empty()
        finally:
            before.close()

    def _quarantine(self, why: str) -> None:
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        moved = []
        for path in _files(self._path):
            quarantined = path.with_name(f"{path.name}.damaged-{stamp}")
            with contextlib.suppress(FileNotFoundError):
                path.replace(quarantined)
                moved.append(str(quarantined))
        where = f"it is now {moved[0]}" if moved else "nothing was left of it"
        note = f"{self._what} before {stamp} may be missing: {self._path}: {why}; {where}"
        self.notes = [*self.notes, note][-MAX_NOTES:]
        log.error("%s", note)


def _files(path: Path | str) -> list[Path]:
    return [Path(f"{path}{ending}") for ending in ("", "-wal", "-shm")]


def _code(error: sqlite3.Error) -> int:
    """SQLite's error code without its details."""
    code: int = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_MISUSE)
    return code & 0xFF


def _is_same(path: Path, before: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), before)
    except OSError:
        return False
