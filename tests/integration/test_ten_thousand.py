"""10,000 ranks in one file: created, run, failed, told of and deleted. No process is started."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest
from tests.support.crowd import live_and_die

from atoll.core.spec import MAX_WORLD
from atoll.store.sqlite import SQLiteStore


@pytest.mark.parametrize("is_each_different", [False, True])
def test_they_are_created_run_fail_are_told_of_and_deleted(
    tmp_path: Path, is_each_different: bool
) -> None:
    path = tmp_path / "atoll.db"

    async def stored_bytes() -> int:
        with sqlite3.connect(path) as db:
            return int(db.execute("select length(body) from trainings").fetchone()[0])

    store = SQLiteStore(path)
    life = live_and_die(
        store, "n", stored_bytes, executor="local", is_each_different=is_each_different
    )
    running, ended = asyncio.run(life)
    store.close()
    assert running < 40 * MAX_WORLD
    assert ended < 60 * MAX_WORLD
