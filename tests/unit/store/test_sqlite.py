"""What is the SQLite store's own: its file, its owner, its bounds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from atoll.controller.informer import Informer
from atoll.core.errors import Gone, NotFound, Permanent, Temporary
from atoll.core.phase import Phase
from atoll.core.spec import Code
from atoll.core.status import Status, Training
from atoll.store import sqlite
from atoll.store.sqlite import SQLiteStore
from tests.contract.test_store import take, training


def test_a_second_owner_is_told_who_has_it(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "a.db")
    with pytest.raises(Permanent, match=f"in use by process {os.getpid()}"):
        SQLiteStore(tmp_path / "a.db")
    store.close()
    SQLiteStore(tmp_path / "a.db").close()


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    store = SQLiteStore(tmp_path / "a.db")
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["a.db", "a.db-shm", "a.db-wal", "a.db.lock"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    store.close()


def test_a_file_that_is_no_store_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    path.write_bytes(b"these are my notes, do not touch " * 100)
    before = path.read_bytes()
    with pytest.raises(Permanent, match="not a sound atoll store"):
        SQLiteStore(path)
    assert path.read_bytes() == before


def test_a_store_of_a_later_atoll_is_refused(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "a.db")
    store._db.execute("pragma user_version = 99")
    store.close()
    with pytest.raises(Permanent, match="schema version 99"):
        SQLiteStore(tmp_path / "a.db")


def test_a_full_disk_is_said_and_what_was_stored_stays(tmp_path: Path) -> None:
    async def check() -> None:
        store = SQLiteStore(tmp_path / "a.db")
        made = await store.create(training())
        pages = store._db.execute("pragma page_count").fetchone()[0]
        store._db.execute(f"pragma max_page_count = {pages}")
        refused = None
        while refused is None:
            try:
                made = await store.update_status(made, Status(message="x" * 10_000))
            except Temporary as error:
                refused = error
        assert "free some space" in str(refused)
        assert await store.get(made.key) == made
        store._db.execute("pragma max_page_count = 100000")
        await store.update_status(made, Status(message="room again"))
        store.close()

    asyncio.run(check())


def test_the_change_log_is_bounded_and_says_what_is_gone(tmp_path: Path) -> None:
    async def check() -> None:
        store = SQLiteStore(tmp_path / "a.db", log_bytes=100_000)
        made = await store.create(training())
        for _ in range(100):
            made = await store.update_status(made, Status(message=os.urandom(5_000).hex()))
        kept = store._db.execute("select total(length(body)) from changes").fetchone()[0]
        assert kept <= 120_000
        with pytest.raises(Gone) as caught:
            await take(store.watch(1), 1)
        oldest = caught.value.oldest
        assert (await take(store.watch(oldest), 1))[0].version == oldest + 1
        store.close()

    asyncio.run(check())


def test_a_watcher_that_falls_behind_still_misses_nothing(tmp_path: Path) -> None:
    async def check() -> None:
        store = SQLiteStore(tmp_path / "a.db")
        made = await store.create(training())
        first = made.resource_version
        watch = store.watch(first)
        made = await store.update_status(made, Status(message="start"))
        versions = [(await anext(watch)).version]
        for n in range(1500):
            made = await store.update_status(made, Status(message=str(n)))
        while versions[-1] < made.resource_version:
            versions.append((await anext(watch)).version)
        assert versions == list(range(first + 1, made.resource_version + 1))
        store.close()

    asyncio.run(check())


WRITER = """
import asyncio, sys
from atoll.store.sqlite import SQLiteStore
from tests.contract.test_store import training
async def main():
    store = SQLiteStore(sys.argv[1])
    for n in range(10**6):
        await store.create(training(f"t{n}"))
        print(n, flush=True)
asyncio.run(main())
"""


def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    command = [sys.executable, "-c", WRITER, str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as writer:
        assert writer.stdout is not None
        acknowledged = [int(writer.stdout.readline()) for _ in range(50)]
        writer.send_signal(signal.SIGKILL)
        acknowledged += [int(line) for line in writer.stdout.read().split()]

    async def check() -> None:
        store = SQLiteStore(path)
        names = {t.name for t in await store.list()}
        assert {f"t{n}" for n in acknowledged} <= names
        store.close()

    asyncio.run(check())


def test_removing_what_is_not_there_changes_nothing(tmp_path: Path) -> None:
    async def check() -> None:
        store = SQLiteStore(tmp_path / "a.db")
        before = await store.version()
        await store.remove(training())
        assert await store.version() == before
        with pytest.raises(NotFound):
            await store.get(("default", "a"))
        store.close()

    asyncio.run(check())


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_write_ahead_log_that_was_deleted_is_told_and_nothing_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_replaced: bool
) -> None:
    store = SQLiteStore(tmp_path / "a.db")
    for name in ("one", "two"):
        asyncio.run(store.create(training(name)))
    (tmp_path / "a.db-wal").unlink()
    if is_replaced:
        (tmp_path / "a.db-wal").touch()
    store.check_files()
    for _ in range(2):
        with pytest.raises(Permanent, match="a.db-wal .*is gone or was replaced"):
            asyncio.run(store.create(training("three")))
    assert len([r for r in caplog.records if "is gone or was replaced" in r.message]) == 1
    store.close()
    again = SQLiteStore(tmp_path / "a.db")
    assert [t.name for t in asyncio.run(again.list())] == ["one", "two"]
    again.close()


def test_an_archive_is_stored_once_and_goes_with_the_last_training(tmp_path: Path) -> None:
    async def check() -> None:
        store = SQLiteStore(tmp_path / "a.db")
        code = Code(content=b"an archive", size=10, unpacked=30, files=2)
        made = [training(name) for name in ("one", "two")]
        made = [replace(t, spec=replace(t.spec, code=code)) for t in made]
        one, two = [await store.create(t) for t in made]
        assert one.spec.code == code.by_digest()
        assert archives(tmp_path / "a.db") == [(code.digest, b"an archive")]
        await store.remove(one)
        assert await store.code(two) == b"an archive"
        await store.remove(two)
        assert archives(tmp_path / "a.db") == []
        with pytest.raises(NotFound, match="code of training"):
            await store.code(two)
        store.close()

    asyncio.run(check())


def archives(path: Path) -> list[tuple[str, bytes]]:
    with contextlib.closing(sqlite3.connect(path)) as db:
        return db.execute("select digest, content from codes").fetchall()


def test_a_write_is_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row and the log of changes share the bytes: a world of 10,000 ranks has megabytes."""
    encoded: list[str] = []
    real = sqlite.encode_training

    def count(one: Training) -> bytes:
        encoded.append(one.name)
        return real(one)

    async def check() -> None:
        store = SQLiteStore(tmp_path / "a.db")
        made = await store.create(training())
        made = await store.update_status(made, Status(message="m"))
        await store.update_spec(replace(made, deletion_requested_at=1.0))
        store.close()

    monkeypatch.setattr(sqlite, "encode_training", count)
    asyncio.run(check())
    assert len(encoded) == 3


def test_a_start_decodes_only_what_is_not_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a start with thousands of stored trainings costs about what one with none does."""
    decoded: list[int] = []
    real = sqlite.decode_training

    def count(version: int, body: bytes) -> Training:
        decoded.append(version)
        return real(version, body)

    async def check() -> None:
        store = SQLiteStore(tmp_path / "a.db")
        ended = Status(phase=Phase.SUCCEEDED, is_released=True)
        for number in range(20):
            made = await store.create(training(f"over-{number}"))
            await store.update_status(made, ended)
        runs = await store.create(training("runs"))
        decoded.clear()
        informer = Informer(store)
        following = asyncio.create_task(informer.run())
        assert len(await informer.uids()) == 21
        assert decoded == [runs.resource_version]
        following.cancel()
        store.close()

    monkeypatch.setattr(sqlite, "decode_training", count)
    asyncio.run(check())
