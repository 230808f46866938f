"""A store that cannot be written is read, with what is only in its write-ahead log."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from atoll.core.errors import Permanent, Temporary
from atoll.core.status import Event, Training
from atoll.store.readonly import ReadOnlyStore, ReadOnlyTokens
from atoll.store.sqlite import SQLiteStore
from atoll.store.tokens import SQLiteTokens
from tests.contract.test_store import training as make_training

EVENT = Event(type="Normal", reason="Tested", message="said", at=1.0)


def left_behind(folder: Path, *, is_closed: bool) -> tuple[Path, Training]:
    """A store with one training, an event and a token, as its control plane left it: closed, or
    killed, with everything in the write-ahead log."""
    (folder / "live").mkdir()
    store = SQLiteStore(folder / "live" / "atoll.db")
    tokens = SQLiteTokens(folder / "live" / "atoll.db")
    training = asyncio.run(store.create(make_training("one")))
    asyncio.run(store.record(training.key, EVENT))
    asyncio.run(tokens.add("hash", "default", "mine", 1.0))
    if is_closed:
        tokens.close()
        store.close()
    shutil.copytree(folder / "live", folder / "left")
    if not is_closed:
        tokens.close()
        store.close()
    return folder / "left" / "atoll.db", training


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".lock"}


@pytest.mark.parametrize("is_closed", [False, True])
def test_everything_is_read_and_nothing_is_written(tmp_path: Path, is_closed: bool) -> None:
    path, training = left_behind(tmp_path, is_closed=is_closed)
    assert Path(f"{path}-wal").exists() != is_closed
    before = contents(path.parent)
    store, tokens = ReadOnlyStore(path, "it is full"), ReadOnlyTokens(path, "it is full")
    assert asyncio.run(store.list()) == [training]
    assert asyncio.run(store.get(training.key)) == training
    assert [event.message for event in asyncio.run(store.events(training.key))] == ["said"]
    assert asyncio.run(store.version()) == training.resource_version
    assert asyncio.run(tokens.namespace_of("hash")) == "default"
    assert [token.label for token in asyncio.run(tokens.all())] == ["mine"]
    for write in (
        store.create(make_training("two")),
        store.update_spec(training),
        store.update_status(training, training.status),
        store.remove(training),
        store.record(training.key, EVENT),
        tokens.add("other", "default", "", 2.0),
        tokens.remove("hash"),
    ):
        with pytest.raises(Temporary, match="it is full"):
            asyncio.run(write)
    tokens.close()
    store.close()
    assert contents(path.parent) == before
    SQLiteStore(path).close()  # and it can go on


def test_changes_are_replayed_to_a_watcher(tmp_path: Path) -> None:
    path, training = left_behind(tmp_path, is_closed=False)
    store = ReadOnlyStore(path, "it is full")

    async def first() -> Training:
        async for change in store.watch(0):
            return change.training
        raise AssertionError

    assert asyncio.run(first()) == training
    store.close()


def test_it_holds_the_lock(tmp_path: Path) -> None:
    path, _ = left_behind(tmp_path, is_closed=True)
    store = ReadOnlyStore(path, "it is full")
    for another in (lambda: ReadOnlyStore(path, ""), lambda: SQLiteStore(path)):
        with pytest.raises(Permanent, match=f"in use by process {os.getpid()}"):
            another()
    store.close()


@pytest.mark.parametrize(
    ("version", "reason"), [(0, "holds nothing yet"), (999, "of another version")]
)
def test_what_cannot_be_read_is_refused(tmp_path: Path, version: int, reason: str) -> None:
    path, _ = left_behind(tmp_path, is_closed=True)
    db = sqlite3.connect(path)
    db.execute(f"pragma user_version = {version}")
    db.execute("drop table written_by")
    db.commit()
    db.close()
    with pytest.raises(Permanent, match=reason):
        ReadOnlyStore(path, "it is full")
