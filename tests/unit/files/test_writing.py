"""A file is whole or not there, and one function writes it."""

from __future__ import annotations

import errno
import os
import re
import threading
from pathlib import Path

import pytest

import atoll
from atoll.files import writing
from atoll.files.writing import write_file

SOURCES = Path(atoll.__file__).parent
# Who else gives a file its name, and why.
OTHERS = {
    "agent/process.py": "travels to hosts without atoll",
    "agent/wrapper.py": "travels with it: a record is created by a link to such a file",
    "agent/stacks.py": "runs in ranks, whose Python may have no atoll",
    "agent/unpack.py": "a folder, not a file",
    "backends/local/adoption.py": "blocks that were set aside for a full disk",
    "backends/local/journal.py": "a damaged journal is put aside",
    "metrics/file.py": "a damaged database is put aside",
}


def test_one_function_writes_files_and_moves_them_into_place() -> None:
    moves = re.compile(
        r"os\.(rename|replace|link)\b|\bNamedTemporaryFile|\bmkstemp|\bdraft\.replace"
    )
    movers = {
        str(path.relative_to(SOURCES))
        for path in SOURCES.rglob("*.py")
        if moves.search(path.read_text())
        or re.search(r"path\.(rename|replace)\(", path.read_text())
    }
    assert movers == {"files/writing.py", *OTHERS}


def test_content_is_replaced_and_is_nobody_elses_business(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_file(path, b"first")
    write_file(path, [b"sec", memoryview(b"ond"), b"", bytearray(b"!")])
    assert path.read_bytes() == b"second!"
    assert path.stat().st_mode & 0o777 == 0o600
    write_file(path, [b"x"] * 5000, is_durable=False)  # more than one call of the kernel takes
    assert path.read_bytes() == b"x" * 5000
    assert os.listdir(tmp_path) == ["a"]


def test_a_new_file_never_replaces_another(tmp_path: Path) -> None:
    write_file(tmp_path / "a", b"mine", is_new=True)
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "a", b"theirs", is_new=True)
    assert (tmp_path / "a").read_bytes() == b"mine"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("step", ["writev", "fsync", "rename"])
def test_what_cannot_be_written_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_file(tmp_path / "a", b"old")
    monkeypatch.setattr(writing.os, step, fail)
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_writers_at_the_same_time_do_not_mix(tmp_path: Path) -> None:
    path, size = tmp_path / "a", 100_000
    write_file(path, b"0" * size)
    is_over = threading.Event()

    def write(letter: bytes) -> None:
        while not is_over.is_set():
            write_file(path, letter * size, is_durable=False)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b", b"c")]
    for thread in threads:
        thread.start()
    try:
        for _ in range(300):
            data = path.read_bytes()
            assert data == data[:1] * size
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert os.listdir(tmp_path) == ["a"]
