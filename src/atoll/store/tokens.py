"""Tokens of a control plane, in the file of its store: whoever can write it can create them.

The control plane need not run. If it does, a new token works at once: it looks up every token.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from atoll.core.errors import Permanent, Temporary
from atoll.core.ports import Token, token_of, with_id
from atoll.files.ownership import make_private, make_private_file
from atoll.store.schema import prepare

BUSY_S = 10.0


class SQLiteTokens:
    """The Tokens of `core/ports.py` on one file, created if it is missing."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def close(self) -> None:
        if "_db" in self.__dict__:
            self._db.close()

    async def namespace_of(self, hashed: str) -> str | None:
        with self._explained():
            row = self._db.execute(
                "select namespace from tokens where hash = ?", (hashed,)
            ).fetchone()
        return str(row[0]) if row else None

    async def add(self, hashed: str, namespace: str, label: str, now: float) -> Token:
        row = (hashed, namespace, label, now)
        with self._explained(), self._db:
            self._db.execute("insert or replace into tokens values (?, ?, ?, ?)", row)
        return token_of(*row)

    async def all(self) -> Sequence[Token]:
        with self._explained():
            rows = self._db.execute("select * from tokens order by created_at").fetchall()
        return [token_of(*row) for row in rows]

    async def remove(self, id: str) -> bool:
        with self._explained(), self._db:
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
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            raise Temporary(f"cannot write {self._path}: {error}") from error
        except sqlite3.DatabaseError as error:
            raise Permanent(f"cannot use {self._path}: {error}") from error
        except OSError as error:
            raise Permanent(f"cannot open {self._path}: {error}") from error
