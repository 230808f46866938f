"""Tables are made once, whatever happens meanwhile; those of another version are refused."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import atoll
from atoll.core.errors import Permanent
from atoll.store.database import SCHEMA_VERSION, SQLiteTokens
from atoll.store.sqlite import SQLiteStore

# Opens the store and dies before the statement of that number.
DIES = """
import os, signal, sqlite3, sys
from pathlib import Path
from atoll.store.database import prepare
db = sqlite3.connect(sys.argv[1], isolation_level=None)
left = int(sys.argv[2])
def count(statement):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
db.set_trace_callback(count)
prepare(db, Path(sys.argv[1]), is_owner=True)
"""


def version(path: Path) -> int:
    db = sqlite3.connect(path)
    try:
        return int(db.execute("pragma user_version").fetchone()[0])
    finally:
        db.close()


def test_opening_leaves_nothing_beside_the_file_and_its_lock(tmp_path: Path) -> None:
    for _ in range(2):
        SQLiteStore(tmp_path / "atoll.db").close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["atoll.db", "atoll.db.lock"]


def test_killed_before_any_statement_it_has_no_tables_or_all_of_them(tmp_path: Path) -> None:
    versions = []
    for number in range(100):
        path = tmp_path / f"{number}.db"
        done = subprocess.run([sys.executable, "-c", DIES, path, str(number)], check=False)
        versions.append(version(path))
        store = SQLiteStore(path)
        assert asyncio.run(store.list()) == []
        store.close()
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
    assert versions == sorted(versions)
    assert set(versions) == {0, SCHEMA_VERSION}


def test_an_owner_and_others_may_open_it_at_once(tmp_path: Path) -> None:
    path = tmp_path / "atoll.db"
    codes = [DIES.replace("is_owner=True", f"is_owner={is_owner}") for is_owner in (1, 0, 0)]
    racing = [subprocess.Popen([sys.executable, "-c", c, path, "1000000"]) for c in codes]
    assert [process.wait() for process in racing] == [0, 0, 0]
    assert version(path) == SCHEMA_VERSION


@pytest.mark.parametrize("other", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_a_file_of_another_version_is_refused_in_one_sentence_and_left_alone(
    tmp_path: Path, other: int
) -> None:
    path = tmp_path / "atoll.db"
    SQLiteStore(path).close()
    db = sqlite3.connect(path)
    db.executescript(f"pragma user_version = {other}; update written_by set release = '7.1.0'")
    db.close()
    before = path.read_bytes()
    says = f"{path} has schema version {other}, written by atoll 7.1.0; .*another state directory"
    for use in (lambda: SQLiteStore(path), lambda: asyncio.run(SQLiteTokens(path).all())):
        with pytest.raises(Permanent, match=says) as refused:
            use()
        assert "\n" not in str(refused.value)
    assert path.read_bytes() == before


def test_the_version_that_has_the_file_is_written_into_it(tmp_path: Path) -> None:
    path = tmp_path / "atoll.db"
    for _ in range(2):
        SQLiteStore(path).close()
    db = sqlite3.connect(path)
    assert db.execute("select * from written_by").fetchall() == [(atoll.__version__,)]
    db.close()
