"""Tokens in the file that the control plane has open, too."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Training
from atoll.store.database import SQLiteTokens
from atoll.store.sqlite import SQLiteStore

# As `atoll token create` beside a control plane: the last to close a file deletes its WAL.
ELSEWHERE = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1])
db.execute("select count(*) from tokens").fetchall()
db.close()
"""


@pytest.mark.parametrize("first", ["store", "tokens"])
def test_another_process_that_looks_at_the_file_takes_nothing_from_this_one(
    tmp_path: Path, first: str
) -> None:
    """A file that is opened and closed beside SQLite loses SQLite's locks of it."""
    path = tmp_path / "atoll.db"
    tokens = SQLiteTokens(path)
    if first == "tokens":
        asyncio.run(tokens.all())
    store = SQLiteStore(path)

    def create(name: str) -> None:
        world = WorldSize(min=1, target=1, max=1)
        spec = TrainingSpec(name=name, command=["x"], world_size=world)
        asyncio.run(store.create(Training(namespace="n", uid=name, spec=spec)))

    create("before")
    asyncio.run(tokens.add("hash", "n", "label", 1.0))
    subprocess.run([sys.executable, "-c", ELSEWHERE, str(path)], check=True, timeout=60)
    create("after")
    assert {t.name for t in asyncio.run(store.list())} == {"before", "after"}
    assert path.stat().st_mode & 0o777 == 0o600
    store.close()
    tokens.close()
