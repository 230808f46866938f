"""The tables of a store. The store's owner and `tokens.py` make them, whoever comes first."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from atoll.core.errors import Permanent

SCHEMA_VERSION = 1
SCHEMA = """
create table trainings (
    namespace text not null, name text not null, uid text not null, version integer not null,
    phase text not null, idempotency_key text, body blob not null, primary key (namespace, name));
create unique index by_idempotency on trainings (namespace, idempotency_key);
create table changes (
    version integer primary key autoincrement, namespace text not null, name text not null,
    is_removed integer not null, body blob not null);
create table events (
    id integer primary key autoincrement, uid text not null, at real not null, type text not null,
    reason text not null, message text not null, count integer not null default 1);
create index events_by_training on events (uid, at);
create table tokens (
    hash text primary key, namespace text not null, label text not null, created_at real not null);
"""


def prepare(db: sqlite3.Connection, path: Path) -> None:
    """The tables are there. Two processes may do it at once."""
    db.execute("pragma journal_mode = wal")
    db.execute("pragma synchronous = full")
    if _schema_version(db) == 0:
        with db:  # commits, or rolls back
            db.execute("begin immediate")
            if _schema_version(db) == 0:
                for statement in SCHEMA.strip().rstrip(";").split(";"):
                    db.execute(statement)
                db.execute(f"pragma user_version = {SCHEMA_VERSION}")
    found = _schema_version(db)
    if found != SCHEMA_VERSION:
        raise Permanent(
            f"{path} has schema version {found}, this atoll knows {SCHEMA_VERSION}: "
            "use the atoll that wrote it, or another state directory"
        )
    db.execute("create table if not exists sources (uid text primary key, content blob not null)")


def _schema_version(db: sqlite3.Connection) -> int:
    return int(db.execute("pragma user_version").fetchone()[0])
