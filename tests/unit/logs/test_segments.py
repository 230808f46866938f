"""Log segments: bounded, followed by offset across rotations."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.logs.segments import (
    MAX_SEGMENTS,
    LogWriter,
    last_lines,
    log_end,
    read_log,
    segments,
    tail_offset,
)


def test_a_reader_follows_across_rotations_without_a_gap(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "0", max_bytes=800)
    written, got, offset = b"", b"", 0
    for n in range(40):
        line = f"line {n}\n".encode()
        writer.write(line)
        written += line
        data, offset = read_log(tmp_path / "0", offset, limit=7)
        got += data
    while data := read_log(tmp_path / "0", offset)[0]:
        got += data
        offset += len(data)
    assert got == written
    assert log_end(tmp_path / "0") == len(written)


def test_the_log_is_bounded_and_the_newest_is_kept(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "0", max_bytes=8000)
    for n in range(10_000):
        writer.write(f"{n:08d}\n".encode())
    size = sum(p.stat().st_size for p in (tmp_path / "0").iterdir())
    assert size <= (MAX_SEGMENTS + 1) * 1010
    assert last_lines(tmp_path / "0", 2) == ["00009998", "00009999"]
    data, _ = read_log(tmp_path / "0", 0)
    assert int(data.split(b"\n")[0]) > 0


def test_a_writer_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    first = LogWriter(tmp_path / "0")
    first.write(b"one\n")
    first.close()
    LogWriter(tmp_path / "0").write(b"two\n")
    assert last_lines(tmp_path / "0", 9) == ["one", "two"]


@pytest.mark.parametrize("before", [b"one\n", b"one\ntw", b""])
def test_a_log_that_is_deleted_goes_on_with_the_next_line(tmp_path: Path, before: bytes) -> None:
    writer = LogWriter(tmp_path / "logs" / "0")
    writer.write(before)
    offset = log_end(tmp_path / "logs" / "0")
    shutil.rmtree(tmp_path / "logs")
    writer.write(b"three\n")
    writer.write(b"four\n")
    data, _ = read_log(tmp_path / "logs" / "0", offset)
    assert data == b"three\nfour\n"  # to whom followed it, nothing was lost
    cut = not before.endswith(b"\n") and before != b""
    assert last_lines(tmp_path / "logs" / "0", 9) == ["three", "four"][cut:]
    assert log_end(tmp_path / "logs" / "0") == len(before) + 11


def test_nothing_written_reads_as_nothing(tmp_path: Path) -> None:
    assert read_log(tmp_path / "none", 0) == (b"", 0)
    assert last_lines(tmp_path / "none", 5) == []
    assert segments(tmp_path / "none") == []


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.text(alphabet="abc", max_size=30), max_size=30),
    has_end=st.booleans(),
    wanted=st.integers(0, 12),
    segment=st.integers(1, 60),
)
def test_a_tail_is_the_last_lines(
    tmp_path_factory: object, lines: list[str], has_end: bool, wanted: int, segment: int
) -> None:
    folder = tmp_path_factory.mktemp("log") / "0"  # type: ignore[attr-defined]
    writer = LogWriter(folder, max_bytes=80_000)
    text = "\n".join(lines) + ("\n" if has_end else "")
    for at in range(0, len(text), segment):
        writer.write(text[at : at + segment].encode())
    expected = text.splitlines()[-wanted:] if wanted else []
    data, _ = read_log(folder, tail_offset(folder, wanted))
    assert data.decode().splitlines() == expected


def test_what_a_full_disk_did_not_take_is_told_where_it_is_missing(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "0")
    writer.write(b"first\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))  # this write ends within a line
    try:
        writer.write(b"x" * 100 + b"\n")
        writer.write(b"lost\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.write(b"last\n")
    first, cut, told, last = read_log(tmp_path / "0", 0)[0].decode().splitlines()
    assert (first, cut, last) == ("first", "x" * 58, "last")
    assert told.startswith(f"[atoll: {100 + 1 - 58 + 5} bytes of this log were lost here:")
    assert log_end(tmp_path / "0") == sum(map(len, (first, cut, told, last))) + 4


def test_a_loss_at_the_end_is_told_as_the_log_is_closed(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "0")
    writer.write(b"first\n")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6, before[1]))
    try:
        writer.write(b"END\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.close()
    assert b"4 bytes of this log were lost" in read_log(tmp_path / "0", 0)[0]
