"""The tables of a SQLite store: created once, and refused if another version of atoll made them.

The store's owner or `tokens.py` creates them, whichever comes first. There is no release yet, so
there are no migrations: a file of another version is refused by name and left as it is.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import atoll
from atoll.core.errors import Permanent
from atoll.store.outbox import SCHEMA as OUTBOX

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


def check_readable(db: sqlite3.Connection, path: Path) -> None:
    """Raises Permanent unless the tables are there, and of this version."""
    version = _version(db)
    if version == 0:
        raise Permanent(f"{path} holds nothing yet")
    if version != SCHEMA_VERSION:
        raise Permanent(_of_another_version(db, path, version))


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
