"""The tables of a SQLite store: created, and migrated to the present version.

The store's owner or `tokens.py` creates them, whichever comes first; only the owner migrates. It
keeps a copy of the old file, and a migration is one transaction.
"""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import atoll
from atoll.core.errors import Permanent, Temporary

# The steps from each version to the next. A released step is never edited: the file of an older
# release is migrated by the steps that it lacks.
MIGRATIONS = (
    """
    create table trainings (
        namespace text not null, name text not null, uid text not null, version integer not null,
        phase text not null, idempotency_key text, body blob not null,
        primary key (namespace, name));
    create unique index by_idempotency on trainings (namespace, idempotency_key);
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
        created_at real not null)
    """,
    # The release that wrote the file, so that an older one can name it in its refusal.
    """
    create table if not exists sources (uid text primary key, content blob not null);
    create table written_by (release text not null)
    """,
    # Pages of one phase, whatever else is stored.
    "create index by_phase on trainings (namespace, phase, name)",
    # Ranks are stored in groups, which releases before cannot read. Bodies stay as they are until
    # they are written again: lists of ranks are read, too.
    "select 1",
    # Archives of code, each stored once however many trainings have it.
    """
    create table codes (digest text primary key, content blob not null);
    create table code_users (uid text primary key, digest text not null);
    create index code_users_by_digest on code_users (digest)
    """,
    # Attempts of ranks that have a successor.
    """
    create table attempts (
        uid text not null, rank integer not null, attempt integer not null, body blob not null,
        primary key (uid, rank, attempt)) without rowid
    """,
    # Webhooks, and what is still to be delivered to them.
    """
    create table webhooks (
        id text primary key, namespace text not null, url text not null, events text not null,
        created_at real not null, secret text not null, delivered integer not null default 0,
        dropped integer not null default 0, last_at real, last_error text not null default '');
    create table deliveries (
        id text primary key, webhook text not null, body blob not null, created_at real not null,
        attempts integer not null, due_at real not null);
    create index deliveries_by_webhook on deliveries (webhook);
    create index deliveries_by_due on deliveries (due_at)
    """,
)
SCHEMA_VERSION = len(MIGRATIONS)


def prepare(db: sqlite3.Connection, path: Path, *, is_owner: bool) -> None:
    """Creates or migrates the tables. Safe to run in several processes at once, and atomic."""
    version = _version(db)
    if version > SCHEMA_VERSION:
        raise Permanent(_too_new(db, path, version))
    db.execute("pragma journal_mode = wal")
    db.execute("pragma synchronous = full")
    if version == 0 or (is_owner and version < SCHEMA_VERSION):
        if version:
            _keep_copy(db, path, version)
        _migrate(db)
    if is_owner:
        _sign(db)


def check_readable(db: sqlite3.Connection, path: Path) -> None:
    """Raises Permanent unless the tables can be read as they are, without a migration."""
    version = _version(db)
    if version > SCHEMA_VERSION:
        raise Permanent(_too_new(db, path, version))
    if version == 0:
        raise Permanent(f"{path} holds nothing yet")


def is_current(db: sqlite3.Connection) -> bool:
    return _version(db) == SCHEMA_VERSION


def _migrate(db: sqlite3.Connection) -> None:
    with db:  # commits, or rolls back
        db.execute("begin immediate")
        version = _version(db)  # another process may have been faster
        if version < SCHEMA_VERSION:
            for migration in MIGRATIONS[version:]:
                for statement in migration.split(";"):
                    db.execute(statement)
            db.execute(f"pragma user_version = {SCHEMA_VERSION}")


def _keep_copy(db: sqlite3.Connection, path: Path, version: int) -> None:
    """Copies the file of the older release to a file beside it, to go back to."""
    copy = path.with_name(f"{path.name}.v{version}")
    draft = copy.with_name(copy.name + ".new")
    try:
        draft.unlink(missing_ok=True)
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        db.execute("vacuum into ?", (str(draft),))
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(copy)
    except OSError as error:
        raise Temporary(f"cannot keep a copy of {path}: {error.strerror}") from error
    except sqlite3.OperationalError:
        draft.unlink(missing_ok=True)
        raise


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


def _too_new(db: sqlite3.Connection, path: Path, version: int) -> str:
    try:
        writer = _written_by(db)
    except sqlite3.OperationalError:  # a later release may keep it elsewhere
        writer = None
    return (
        f"{path} was written by atoll {writer or 'of a later release'} (schema version {version}) "
        f"and cannot be used by atoll {atoll.__version__} (schema version {SCHEMA_VERSION}): "
        "use the later release, or another state directory"
    )


def _version(db: sqlite3.Connection) -> int:
    return int(db.execute("pragma user_version").fetchone()[0])
