"""Tables of an older release become those of this one, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import atoll
from atoll.core.errors import Permanent, Temporary
from atoll.core.model import encode
from atoll.core.phase import Phase
from atoll.core.ranks import final_exits
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Exit, RankStatus, Status, Training
from atoll.store.schema import MIGRATIONS, SCHEMA_VERSION
from atoll.store.sqlite import SQLiteStore
from atoll.store.tokens import SQLiteTokens

SAVED = Path(__file__).parents[2] / "releases" / "state-0.1" / "atoll.db"

# Opens the store and dies before the statement of that number.
DIES = """
import os, signal, sqlite3, sys
from pathlib import Path
from atoll.store.schema import prepare
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


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The file of a control plane of release 0.1."""
    shutil.copy(SAVED, tmp_path / "atoll.db")
    return tmp_path / "atoll.db"


def content(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """Every row of every table but the one that says who wrote it."""
    db = sqlite3.connect(path)
    try:
        names = [name for (name,) in db.execute("select name from sqlite_master where sql != ''")]
        tables = {"trainings", "changes", "events", "tokens", "sources"} & set(names)
        return {name: db.execute(f"select * from {name}").fetchall() for name in sorted(tables)}
    finally:
        db.close()


def version(path: Path) -> int:
    db = sqlite3.connect(path)
    try:
        return int(db.execute("pragma user_version").fetchone()[0])
    finally:
        db.close()


def test_a_file_of_an_older_release_is_brought_forward_and_a_copy_stays(path: Path) -> None:
    before = content(path)
    SQLiteStore(path).close()
    copy = path.with_name("atoll.db.v1")
    assert (version(path), version(copy)) == (SCHEMA_VERSION, 1)
    assert content(path) == content(copy) == before
    assert copy.stat().st_mode & 0o777 == 0o600


def test_a_new_file_has_no_older_copy(tmp_path: Path) -> None:
    SQLiteStore(tmp_path / "atoll.db").close()
    SQLiteStore(tmp_path / "atoll.db").close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["atoll.db", "atoll.db.lock"]


def test_killed_before_any_statement_it_is_as_before_or_as_after(tmp_path: Path) -> None:
    before = content(shutil.copy(SAVED, tmp_path / "atoll.db"))
    versions = []
    for number in range(100):
        path = tmp_path / f"{number}.db"
        shutil.copy(SAVED, path)
        done = subprocess.run([sys.executable, "-c", DIES, path, str(number)], check=False)
        versions.append(version(path))
        assert content(path) == before
        store = SQLiteStore(path)
        assert len(asyncio.run(store.list())) == 5
        store.close()
        assert (version(path), content(path)) == (SCHEMA_VERSION, before)
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
    assert versions == sorted(versions)
    assert set(versions) == {1, SCHEMA_VERSION}


@pytest.mark.parametrize("is_new", [True, False])
def test_an_owner_and_others_may_open_it_at_once(is_new: bool, path: Path) -> None:
    before = {name: [] for name in content(path)} if is_new else content(path)
    if is_new:
        path.unlink()
    codes = [DIES.replace("is_owner=True", f"is_owner={is_owner}") for is_owner in (1, 0, 0)]
    racing = [subprocess.Popen([sys.executable, "-c", c, path, "1000000"]) for c in codes]
    assert [process.wait() for process in racing] == [0, 0, 0]
    assert (version(path), content(path)) == (SCHEMA_VERSION, before)


def test_who_only_adds_a_token_leaves_the_tables_of_a_running_older_release(path: Path) -> None:
    tokens = SQLiteTokens(path)
    asyncio.run(tokens.add("a" * 64, "default", "", 0.0))
    assert len(asyncio.run(tokens.all())) == len(content(SAVED)["tokens"]) + 1
    tokens.close()
    assert version(path) == 1
    assert not path.with_name("atoll.db.v1").exists()


def test_a_file_of_a_later_release_is_refused_in_one_sentence_and_left_alone(
    path: Path,
) -> None:
    SQLiteStore(path).close()
    db = sqlite3.connect(path)
    db.executescript("pragma user_version = 99; update written_by set release = '7.1.0'")
    db.close()
    before = path.read_bytes()
    says = f"{path} was written by atoll 7.1.0 .* by atoll {atoll.__version__} "
    for use in (lambda: SQLiteStore(path), lambda: asyncio.run(SQLiteTokens(path).all())):
        with pytest.raises(Permanent, match=says) as refused:
            use()
        assert "\n" not in str(refused.value)
    assert path.read_bytes() == before


def test_the_release_that_has_the_file_is_written_into_it(path: Path) -> None:
    for _ in range(2):
        SQLiteStore(path).close()
    db = sqlite3.connect(path)
    assert db.execute("select * from written_by").fetchall() == [(atoll.__version__,)]
    db.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={SAVED.stat().st_size + 70_000}", "tmpfs"]
    done = subprocess.run(["mount", *options, folder], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"only root can make a disk that is full: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_said_and_nothing_is_changed(small_disk: Path) -> None:
    path = Path(shutil.copy(SAVED, small_disk / "atoll.db"))
    before = content(path)
    with pytest.raises(Temporary, match="free some space"):
        SQLiteStore(path)
    assert (version(path), content(path)) == (1, before)
    assert not [p for p in small_disk.iterdir() if ".v1" in p.name]


def test_lists_of_ranks_written_under_version_2_are_read_and_folded_when_written(
    tmp_path: Path,
) -> None:
    ended = Exit(code=127, at=5.0, reason="CommandNotFound")
    ranks = [RankStatus(rank=n, phase="Failed", attempt=0, exit=ended) for n in range(100)]
    status = Status(phase=Phase.FAILED, ranks=ranks)
    status = msgspec.structs.replace(status, rank_exits=final_exits(status, ranks[0]))
    spec = TrainingSpec(name="old", command=["x"], world_size=WorldSize(min=1, target=2, max=3))
    old = Training(namespace="n", uid="u", spec=spec, status=status, resource_version=1)
    path = tmp_path / "atoll.db"
    db = sqlite3.connect(path)
    for step in MIGRATIONS[:2]:
        db.executescript(step)
    row = ("n", "old", "u", 1, "failed", None, encode(old))
    db.execute("insert into trainings values (?, ?, ?, ?, ?, ?, ?)", row)
    db.execute("insert into changes values (1, 'n', 'old', 0, ?)", (encode(old),))
    db.execute("pragma user_version = 2")
    db.commit()
    db.close()

    store = SQLiteStore(path)
    assert asyncio.run(store.get(("n", "old"))) == old
    assert [change.training for change in store.logged(0, None)] == [old]
    asyncio.run(store.update_status(old, msgspec.structs.replace(status, is_released=True)))
    read = asyncio.run(store.get(("n", "old"))).status
    assert (read.ranks, read.rank_exits, read.is_released) == (ranks, status.rank_exits, True)
    store.close()
    assert version(path) == SCHEMA_VERSION
    assert version(path.with_name("atoll.db.v2")) == 2
    db = sqlite3.connect(path)
    (body,) = db.execute("select body from trainings").fetchone()
    db.close()
    assert len(body) < len(encode(old)) / 10


def test_versions_that_were_released_are_not_edited() -> None:
    """A file that 0.1 has made, and one made now and stopped at its version, have equal tables."""
    db = sqlite3.connect(":memory:")
    db.executescript(MIGRATIONS[0])
    saved = sqlite3.connect(f"file:{SAVED}?immutable=1", uri=True)
    query = "select name, sql from sqlite_master where name not in ('sources') and sql != ''"
    try:
        made, kept = (
            {name: "".join(sql.split()) for name, sql in d.execute(query)} for d in (db, saved)
        )
        assert made == kept
    finally:
        db.close()
        saved.close()
