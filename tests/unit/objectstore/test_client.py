"""Objects in a store: what is put stays as it was."""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path

import obstore
import pytest
from obstore.store import LocalStore

from atoll.core.errors import NotFound, Permanent
from atoll.objectstore import ObjectStore, files
from atoll.objectstore.errors import is_final


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("is_list", [False, True])
def test_an_object_does_not_change_with_the_memory_it_was_made_from(
    tmp_path: Path, kind: str, is_list: bool
) -> None:
    store = ObjectStore.open(f"memory:///{uuid.uuid4()}" if kind == "memory" else tmp_path)
    data = bytearray(b"good")
    sent = [memoryview(data)] if is_list else memoryview(data)
    store.put("a", sent)
    assert store.create("b", sent)
    data[:] = b"lost"
    assert bytes(store.get("a")) == b"good"
    assert bytes(store.get("b")) == b"good"


ODD = "run/up/00000001/00002.ab.0x1_0p+0.cd"  # as the names of uploads are


def test_files_are_those_that_the_client_of_the_store_would_make(tmp_path: Path) -> None:
    store, client = ObjectStore.open(tmp_path), LocalStore(tmp_path)
    store.put(ODD, [b"a" * 5000, b"", memoryview(b"b")])
    assert bytes(obstore.get(client, ODD).bytes()) == b"a" * 5000 + b"b"
    obstore.put(client, "run/x", b"first")
    assert not store.create("run/x", b"second")
    assert bytes(store.get("run/x")) == b"first"
    assert store.create("run/y", b"ours")
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        obstore.put(client, "run/y", b"theirs", mode="create")
    store.put("run/x", b"third")
    assert bytes(store.get("run/x")) == b"third"
    assert [info.key for info in store.list("run")] == sorted([ODD, "run/x", "run/y"])
    assert not [name for _, _, names in os.walk(tmp_path) for name in names if "#" in name]


def test_what_a_killed_writer_leaves_is_no_object_and_in_nobodys_way(tmp_path: Path) -> None:
    store = ObjectStore.open(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b#1").write_bytes(b"hal")
    assert store.list("a") == []
    with pytest.raises(NotFound):
        store.get("a/b")
    assert store.create("a/b", b"half and half")
    assert bytes(store.get("a/b")) == b"half and half"


def test_an_object_of_many_pieces_is_written_whole(tmp_path: Path) -> None:
    pieces = [bytes([number % 251]) * (number % 7) for number in range(5000)]
    ObjectStore.open(tmp_path).put("a", pieces)
    assert (tmp_path / "a").read_bytes() == b"".join(pieces)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_range_is_as_long_as_the_object_allows(tmp_path: Path, kind: str) -> None:
    store = ObjectStore.open(f"memory:///{uuid.uuid4()}" if kind == "memory" else tmp_path)
    store.put("a", b"0123456789")
    assert bytes(store.get("a", 3, 5)) == b"34"
    assert bytes(store.get("a", 8, 50)) == b"89"
    assert bytes(store.get("a", 20, 50)) == b""
    assert store.traffic.bytes_down == 2 + 2


def test_a_folder_is_listed_as_the_client_of_the_store_lists_it(tmp_path: Path) -> None:
    store, client = ObjectStore.open(tmp_path), LocalStore(tmp_path)
    keys = [ODD, "run/up/00000001.x", "run/up/00000002/a", "run/up/left/x/1", "run/roster/1", "b/c"]
    for size, key in enumerate(keys):
        store.put(key, b"x" * size)
    (tmp_path / "run" / "up" / "00000002" / "b#1").write_bytes(b"half")
    for prefix in ("run", "run/up", "run/up/00000001", "b", "nowhere"):
        for after in (None, *keys, "run/up/00000001", "run/up/00000001.", "run/up/9", "a", "z"):
            found = [m for page in obstore.list(client, prefix, offset=after) for m in page]
            mine = store.list(prefix, after)
            assert [(i.key, i.size) for i in mine] == sorted((m["path"], m["size"]) for m in found)
            times = {m["path"]: m["last_modified"] for m in found}
            for info in mine:
                assert abs((info.modified - times[info.key]).total_seconds()) < 1e-3


def test_names_that_are_not_those_of_their_files_are_listed_as_they_are(tmp_path: Path) -> None:
    store = ObjectStore.open(tmp_path)
    for key in ("run/a b", "run/%", "run/plain"):
        store.put(key, b"")
    assert [info.key for info in store.list("run")] == ["run/%", "run/a b", "run/plain"]


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_size_is_checked_before_memory_is_taken(tmp_path: Path, kind: str) -> None:
    store = ObjectStore.open(f"memory:///{uuid.uuid4()}" if kind == "memory" else tmp_path)
    store.put("a", b"0123456789")
    with pytest.raises(Permanent, match="10 bytes, expected at most 9"):
        store.get("a", max_bytes=9)
    assert bytes(store.get("a", 2, 11, max_bytes=8)) == b"23456789"


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_reader_knows_how_much_is_left(tmp_path: Path, kind: str) -> None:
    store = ObjectStore.open(f"memory:///{uuid.uuid4()}" if kind == "memory" else tmp_path)
    store.put("a", b"0123456789")
    with store.reader("a", 2, 50) as reader:
        assert reader.remaining() == 8
        buffer = bytearray(5)
        assert reader.fill(memoryview(buffer)) == 5
        assert (bytes(buffer), reader.remaining()) == (b"23456", 3)
        assert reader.fill(memoryview(buffer)) == 3
        assert bytes(buffer) == b"78956"
    with pytest.raises(NotFound), store.reader("b") as reader:
        reader.fill(memoryview(bytearray(1)))


def test_what_is_created_is_synced_with_its_folders_before_it_can_be_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []

    def sync(handle: int) -> None:
        steps.append("sync " + os.readlink(f"/proc/self/fd/{handle}").removeprefix(str(tmp_path)))

    def link(old: str, new: str) -> None:
        steps.append("link")
        os.rename(old, new)
        Path(old).touch()

    monkeypatch.setattr(files.os, "fsync", sync)
    monkeypatch.setattr(files.os, "link", link)
    store = ObjectStore.open(tmp_path)
    assert store.create("a/b/c", b"1")
    assert steps == ["sync ", "sync /a", "sync /a/b/c#1", "link", "sync /a/b"]
    steps.clear()
    store.put("a/b/d", b"1")
    assert steps == []
    store.put("a/b/e", b"1", is_durable=True)
    assert steps == ["sync /a/b/e#1", "sync /a/b"]


def test_a_folder_without_hard_links_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(old: str, new: str) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(files.os, "link", link)
    with pytest.raises(Permanent, match="no hard links"):
        ObjectStore.open(tmp_path).create("a", b"")
    assert list(tmp_path.iterdir()) == []


def test_a_store_without_conditional_writes_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = ObjectStore.open(f"memory:///{uuid.uuid4()}")
    store.require_conditional_writes("run")
    assert store.list("run") == []
    monkeypatch.setattr(store, "create", lambda key, data: True)
    with pytest.raises(Permanent, match="ignores conditional writes"):
        store.require_conditional_writes("run")


def test_a_folder_that_became_a_file_is_a_final_error(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store = ObjectStore.open(f"file://{folder}")
    folder.rmdir()
    folder.write_text("a file")
    with pytest.raises(Permanent, match="Not a directory"):
        store.put("a/b", b"x")


@pytest.mark.parametrize(
    ("code", "is_over"),
    [(errno.EROFS, True), (errno.EACCES, True), (errno.ENOSPC, False), (errno.EIO, False)],
)
def test_a_folder_that_nobody_may_write_to_is_final_and_a_full_one_is_not(
    code: int, is_over: bool
) -> None:
    assert is_final(OSError(code, os.strerror(code))) == is_over
