"""Tokens of a control plane, made and removed beside it: who can write its file may do so.

The store's owner need not run, and need not be asked if it does: it looks every token up.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from atoll.core.errors import Permanent, Temporary
from atoll.core.model import Model
from atoll.store.schema import prepare

BUSY_S = 10.0


class Token(Model, frozen=True, omit_defaults=False):
    """What is known of a token: never the token itself."""

    id: str  # the beginning of its hash
    namespace: str
    label: str
    created_at: float


class Tokens:
    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, hashed: str, namespace: str, label: str, now: float) -> Token:
        with self._open() as db:
            db.execute("insert into tokens values (?, ?, ?, ?)", (hashed, namespace, label, now))
        return _token((hashed, namespace, label, now))

    def all(self) -> list[Token]:
        """The oldest first."""
        with self._open() as db:
            return [_token(row) for row in db.execute("select * from tokens order by created_at")]

    def remove(self, id: str) -> bool:
        """Whether it was there. Raises Permanent where more than one begins so."""
        with self._open() as db:
            where = "from tokens where substr(hash, 1, length(?1)) = ?1"
            (found,) = db.execute(f"select count(*) {where}", (id,)).fetchone()
            if found > 1:
                raise Permanent(f"{found} tokens begin with {id!r}: give more of it")
            db.execute(f"delete {where}", (id,))
        return bool(found)

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """One transaction on the file, made if it is not there."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            db = sqlite3.connect(self._path, isolation_level=None, timeout=BUSY_S)
        except (OSError, sqlite3.Error) as error:
            raise Permanent(f"cannot open {self._path}: {error}") from error
        with contextlib.closing(db):
            try:
                prepare(db, self._path, is_owner=False)
                db.execute("begin immediate")
                yield db
                db.execute("commit")
            except sqlite3.OperationalError as error:
                raise Temporary(f"cannot write {self._path}: {error}") from error
            except sqlite3.DatabaseError as error:
                raise Permanent(f"cannot use {self._path}: {error}") from error


def _token(row: tuple[str, str, str, float]) -> Token:
    hashed, namespace, label, created_at = row
    return Token(id=hashed[:12], namespace=namespace, label=label, created_at=created_at)
