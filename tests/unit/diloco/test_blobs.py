"""Objects in a store: what is put stays as it was."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import obstore
import pytest
from obstore.store import LocalStore

from atoll.core.errors import NotFound
from atoll.diloco.blobs import Blobs


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("is_list", [False, True])
def test_an_object_does_not_change_with_the_memory_it_was_made_from(
    tmp_path: Path, kind: str, is_list: bool
) -> None:
    blobs = Blobs.open(f"memory:///{uuid.uuid4()}" if kind == "memory" else tmp_path)
    data = bytearray(b"good")
    sent = [memoryview(data)] if is_list else memoryview(data)
    blobs.put("a", sent)
    assert blobs.create("b", sent)
    data[:] = b"lost"
    assert bytes(blobs.get("a")) == b"good"
    assert bytes(blobs.get("b")) == b"good"


ODD = "run/up/00000001/00002.ab.0x1_0p+0.cd"  # as the names of uploads are


def test_files_are_those_that_the_client_of_the_store_would_make(tmp_path: Path) -> None:
    blobs, client = Blobs.open(tmp_path), LocalStore(tmp_path)
    blobs.put(ODD, [b"a" * 5000, b"", memoryview(b"b")])
    assert bytes(obstore.get(client, ODD).bytes()) == b"a" * 5000 + b"b"
    obstore.put(client, "run/x", b"first")
    assert not blobs.create("run/x", b"second")
    assert bytes(blobs.get("run/x")) == b"first"
    assert blobs.create("run/y", b"ours")
    with pytest.raises(obstore.exceptions.AlreadyExistsError):
        obstore.put(client, "run/y", b"theirs", mode="create")
    blobs.put("run/x", b"third")
    assert bytes(blobs.get("run/x")) == b"third"
    assert [blob.key for blob in blobs.find("run")] == sorted([ODD, "run/x", "run/y"])
    assert not [name for _, _, names in os.walk(tmp_path) for name in names if "#" in name]


def test_what_a_killed_writer_leaves_is_no_object_and_in_nobodys_way(tmp_path: Path) -> None:
    blobs = Blobs.open(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b#1").write_bytes(b"hal")
    assert blobs.find("a") == []
    with pytest.raises(NotFound):
        blobs.get("a/b")
    assert blobs.create("a/b", b"half and half")
    assert bytes(blobs.get("a/b")) == b"half and half"


def test_an_object_of_many_pieces_is_written_whole(tmp_path: Path) -> None:
    pieces = [bytes([number % 251]) * (number % 7) for number in range(5000)]
    Blobs.open(tmp_path).put("a", pieces)
    assert (tmp_path / "a").read_bytes() == b"".join(pieces)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_range_is_as_long_as_the_object_allows(tmp_path: Path, kind: str) -> None:
    blobs = Blobs.open(f"memory:///{uuid.uuid4()}" if kind == "memory" else tmp_path)
    blobs.put("a", b"0123456789")
    assert bytes(blobs.get("a", 3, 5)) == b"34"
    assert bytes(blobs.get("a", 8, 50)) == b"89"
    assert bytes(blobs.get("a", 20, 50)) == b""
    assert blobs.usage.bytes_down == 2 + 2


def test_a_folder_is_listed_as_the_client_of_the_store_lists_it(tmp_path: Path) -> None:
    blobs, client = Blobs.open(tmp_path), LocalStore(tmp_path)
    keys = [
        ODD,
        "run/up/00000001.x",
        "run/up/00000002/a",
        "run/up/left/x/1",
        "run/manifest/1",
        "b/c",
    ]
    for size, key in enumerate(keys):
        blobs.put(key, b"x" * size)
    (tmp_path / "run" / "up" / "00000002" / "b#1").write_bytes(b"half")
    for prefix in ("run", "run/up", "run/up/00000001", "b", "nowhere"):
        for after in (None, *keys, "run/up/00000001", "run/up/00000001.", "run/up/9", "a", "z"):
            matches = [m for page in obstore.list(client, prefix, offset=after) for m in page]
            mine = blobs.find(prefix, after)
            assert [(b.key, b.size) for b in mine] == sorted(
                (m["path"], m["size"]) for m in matches
            )
            times = {m["path"]: m["last_modified"] for m in matches}
            for blob in mine:
                assert abs((blob.modified - times[blob.key]).total_seconds()) < 1e-3


def test_names_that_are_not_those_of_their_files_are_listed_as_they_are(tmp_path: Path) -> None:
    blobs = Blobs.open(tmp_path)
    for key in ("run/a b", "run/%", "run/plain"):
        blobs.put(key, b"")
    assert [blob.key for blob in blobs.find("run")] == ["run/%", "run/a b", "run/plain"]
