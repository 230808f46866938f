"""One SQLite file: its tables, the reserve for a full disk, and the tokens in it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sqlite3
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import atoll
from atoll.core.errors import Permanent, Temporary
from atoll.core.ports import Token, token_of, with_id
from atoll.files.ownership import make_private, make_private_file
from atoll.store.feed import SCHEMA as OUTBOX

# Space on the disk for stopping: `cancel` and `delete` work where nothing else can be written.
#
# A store keeps some blocks beyond the end of its files. What a training needs to be stopped may use
# them; all other writes are refused once the disk is full, so they stay for that.

KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE: blocks are allotted, and the file is as long as before
RESERVE_BYTES = 512 * 2**10  # beyond the end of each file: some hundred cancels and deletions
MIN_BYTES = 64 * 2**10  # a disk with less left counts as full: one write may need so much


def has_room(where: Path, needed: int = MIN_BYTES) -> bool:
    """Whether the file system has so many bytes left. A quota does not show in this."""
    try:
        room = os.statvfs(where)
    except OSError:
        return True  # SQLite says what is wrong
    blocks = room.f_bfree if os.geteuid() == 0 else room.f_bavail
    return blocks * room.f_frsize >= needed


class FileReserve:
    """Blocks beyond the end of one file, as far as its file system can allot them."""

    def __init__(self) -> None:
        self._until = 0
        self._file: int | None = None

    def renew(self, path: Path) -> None:
        """Called after the file has grown. The file stays open: to close it would drop the locks
        that SQLite holds on it."""
        with contextlib.suppress(OSError):
            if self._file is None:
                self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            size = os.fstat(self._file).st_size
            if size + RESERVE_BYTES // 2 > self._until and has_room(path, 4 * RESERVE_BYTES):
                _allot(self._file, size + RESERVE_BYTES)
                self._until = size + RESERVE_BYTES

    def close(self) -> None:
        """After SQLite has closed the file."""
        if self._file is not None:
            os.close(self._file)
        self._file, self._until = None, 0


def _allot(file: int, length: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_int(KEEP_SIZE), ctypes.c_int64(0), ctypes.c_int64(length))
    if libc.fallocate64(file, *arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


# The tables of a SQLite store: created once, and refused if another version of atoll made them.
#
# The store's owner or `tokens.py` creates them, whichever comes first. There is no release yet, so
# there are no migrations: a file of another version is refused by name and left as it is.

_TABLES = """
    create table trainings (
        namespace text not null, name text not null, uid text not null, version integer not null,
        phase text not null, is_settled integer not null, idempotency_key text,
        body blob not null,
        primary key (namespace, name));
    create unique index by_idempotency on trainings (namespace, idempotency_key);
    create index by_phase on trainings (namespace, phase, name);
    create index by_settled on trainings (is_settled, uid, namespace, name, phase);
    create table changes (
        version integer primary key autoincrement, namespace text not null, name text not null,
        is_removed integer not null, body blob not null);
    create table events (
        id integer primary key autoincrement, uid text not null, at real not null,
        type text not null, reason text not null, message text not null,
        count integer not null default 1);
    create index events_by_training on events (uid, at);
    create table tokens (
        hash text primary key, namespace text not null, label text not null,
        created_at real not null);
    create table sources (uid text primary key, content blob not null);
    create table written_by (release text not null);
    create table codes (digest text primary key, content blob not null);
    create table code_users (uid text primary key, digest text not null);
    create index code_users_by_digest on code_users (digest);
    create table attempts (
        uid text not null, rank integer not null, attempt integer not null, body blob not null,
        primary key (uid, rank, attempt)) without rowid
"""
TABLES = ";".join((_TABLES, OUTBOX))
SCHEMA_VERSION = 10  # grows with every change of the tables or of what is stored in them


def prepare(db: sqlite3.Connection, path: Path, *, is_owner: bool) -> None:
    """Creates the tables if there are none. Safe to run in several processes at once, and atomic.

    Raises Permanent, and changes nothing, if they are of another version.
    """
    version = _version(db)
    if version not in (0, SCHEMA_VERSION):
        raise Permanent(_of_another_version(db, path, version))
    db.execute("pragma journal_mode = wal")
    db.execute("pragma synchronous = full")
    if version == 0:
        _create(db)
    if is_owner:
        _sign(db)


def read_phases(path: Path) -> dict[str, str]:
    """The phase of each training there, by its uid. Changes nothing.

    Raises sqlite3.Error for a file that cannot be read.
    """
    if not path.exists():
        return {}
    with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
        return dict(db.execute("select uid, phase from trainings").fetchall())


def _create(db: sqlite3.Connection) -> None:
    with db:  # commits, or rolls back
        db.execute("begin immediate")
        if _version(db) == 0:  # another process may have been faster
            for statement in TABLES.split(";"):
                db.execute(statement)
            db.execute(f"pragma user_version = {SCHEMA_VERSION}")


def _sign(db: sqlite3.Connection) -> None:
    if _written_by(db) == atoll.__version__:
        return
    with db:
        db.execute("begin immediate")
        db.execute("delete from written_by")
        db.execute("insert into written_by values (?)", (atoll.__version__,))


def _written_by(db: sqlite3.Connection) -> str | None:
    row = db.execute("select release from written_by").fetchone()
    return None if row is None else str(row[0])


def _of_another_version(db: sqlite3.Connection, path: Path, version: int) -> str:
    try:
        writer = _written_by(db)
    except sqlite3.OperationalError:  # another version may keep it elsewhere
        writer = None
    return (
        f"{path} has schema version {version}, written by atoll {writer or 'of another version'}; "
        f"atoll {atoll.__version__} here needs schema version {SCHEMA_VERSION}: "
        "use the atoll that wrote it, or another state directory (--state-dir)"
    )


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("pragma user_version").fetchone()[0])


# Tokens of a control plane, in the file of its store: a process that can write it can create them.
#
# The control plane need not run. If it does, a new token works at once: it looks up every token.

BUSY_S = 10.0  # for the write of another process: fsync on a slow disk takes seconds


class SQLiteTokens:
    """The Tokens of `core/ports.py` on one file, created if it is missing."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def close(self) -> None:
        if "_db" in self.__dict__:
            self._db.close()

    async def namespace_of(self, hashed: str) -> str | None:
        with self._translate_errors():
            row = self._db.execute(
                "select namespace from tokens where hash = ?", (hashed,)
            ).fetchone()
        return str(row[0]) if row else None

    async def add(self, hashed: str, namespace: str, label: str, now: float) -> Token:
        row = (hashed, namespace, label, now)
        with self._translate_errors(), self._db:
            self._db.execute("insert or replace into tokens values (?, ?, ?, ?)", row)
        return token_of(*row)

    async def all(self) -> Sequence[Token]:
        with self._translate_errors():
            rows = self._db.execute("select * from tokens order by created_at").fetchall()
        return [token_of(*row) for row in rows]

    async def remove(self, id: str) -> bool:
        with self._translate_errors(), self._db:
            hashed = with_id(id, (row[0] for row in self._db.execute("select hash from tokens")))
            self._db.execute("delete from tokens where hash = ?", (hashed,))
        return hashed is not None

    @cached_property
    def _db(self) -> sqlite3.Connection:
        make_private(self._path.parent)
        with contextlib.suppress(OSError):  # SQLite says why it cannot be opened
            make_private_file(self._path)
        db = sqlite3.connect(
            self._path, isolation_level=None, timeout=BUSY_S, check_same_thread=False
        )
        try:
            prepare(db, self._path, is_owner=False)
        except BaseException:
            db.close()
            raise
        return db

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise Temporary(f"cannot write {self._path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise Permanent(f"cannot use {self._path}: {error}") from error
        except OSError as error:
            raise Permanent(f"cannot open {self._path}: {error}") from error
