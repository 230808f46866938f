"""The journal of a gang: batches are seen whole or not at all, and readers cannot go wrong."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.agent.records import AttemptFacts, desired_record, start_record
from atoll.backends.local import journal as journals
from atoll.backends.local.journal import (
    JournalDamaged,
    JournalReader,
    JournalWriter,
    encode_batch,
)
from atoll.backends.local.rank_process import lost_record


def start(rank: int, attempt: int = 0, at: float = 1.0) -> Any:
    return start_record(rank, attempt, at, pid=100 + rank, startTicks=7, up=0.0)


def ended(rank: int, attempt: int = 0, at: float = 2.0) -> Any:
    one = AttemptFacts(rank, attempt, None, start(rank, attempt), None)
    return lost_record(Path("/nowhere"), one, {}, at)


def accepted(version: int = 1, size: int = 2, at: float = 0.5) -> Any:
    return desired_record(version, size, {}, None, {}, at)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[JournalWriter]:
    writer = JournalWriter(tmp_path / "journal")
    yield writer
    writer.close()


@pytest.fixture
def reader(tmp_path: Path) -> JournalReader:
    return JournalReader(tmp_path / "journal")


def test_two_threads_on_one_reader_neither_skip_nor_repeat_a_record(
    writer: JournalWriter, reader: JournalReader
) -> None:
    trouble: list[BaseException] = []
    is_over = threading.Event()

    def read() -> None:
        try:
            while not is_over.is_set():
                reader.refresh()
        except BaseException as error:
            trouble.append(error)

    writer.append([accepted()])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=read) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        for attempt in range(300):
            writer.append([start(0, attempt), start(1, attempt)])
            writer.append([ended(0, attempt), ended(1, attempt)])
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    reader.refresh()
    assert not trouble
    assert reader.facts.ranks == writer.facts.ranks
    assert len(reader.facts.ranks[0]) == 300


def test_a_batch_over_the_size_limit_is_never_seen_in_part(
    writer: JournalWriter,
    reader: JournalReader,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a full disk: the file takes some of the bytes, and then no more."""
    writer.append([accepted()])
    reader.refresh()
    size = (tmp_path / "journal").stat().st_size
    batch = [start(rank) for rank in range(2)]
    half = len(encode_batch(2, batch)) // 2
    seen: list[dict[int, Any]] = []

    def truncate(file: int, length: int) -> None:
        reader.refresh()  # between the write that stopped short and its rollback
        seen.append(dict(reader.facts.ranks))
        os.truncate(file, length)

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + half, before[1]))
    try:
        monkeypatch.setattr(journals.os, "ftruncate", truncate)
        with pytest.raises(OSError, match="File too large"):
            writer.append(batch)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert seen == [{}]
    writer.append(batch)
    assert reader.refresh()
    assert reader.facts.ranks == writer.facts.ranks
    assert len(reader.facts.ranks) == 2


def test_a_writer_killed_inside_an_append_leaves_nothing_of_its_batch(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    batch = encode_batch(2, [start(0), start(1)])
    path.write_bytes(encode_batch(1, [accepted()]) + batch[: len(batch) // 2])
    reader = JournalReader(path)
    reader.refresh()
    assert reader.facts.ranks == {}
    writer = JournalWriter(path)
    writer.append([start(1)])
    writer.close()
    assert reader.refresh()
    assert list(reader.facts.ranks) == [1]


@pytest.mark.parametrize("is_longer", [True, False])
def test_a_new_file_in_place_of_the_journal_is_read_from_its_start(
    writer: JournalWriter, reader: JournalReader, tmp_path: Path, is_longer: bool
) -> None:
    writer.append([accepted()])
    writer.append([start(0)])
    reader.refresh()
    other = JournalWriter(tmp_path / "other")
    other.append([accepted()])
    other.append([start(1, 3)])
    if is_longer:
        other.append([ended(1, 3)])
    other.close()
    (tmp_path / "other").replace(tmp_path / "journal")
    reader.refresh()
    assert reader.facts.ranks == other.facts.ranks


def test_a_journal_that_went_back_or_is_gone_is_told_and_what_was_read_stays(
    writer: JournalWriter, reader: JournalReader, tmp_path: Path
) -> None:
    path = tmp_path / "journal"
    writer.append([accepted()])
    older = path.read_bytes()
    writer.append([start(0)])
    reader.refresh()
    for lose in (lambda: path.write_bytes(older), path.unlink):
        lose()
        with pytest.raises(JournalDamaged):
            reader.refresh()
        assert list(reader.facts.ranks) == [0]


DAMAGES = {
    "garbage": lambda data: b"garbage\n" + data,
    "no batch": lambda data: b"[]\n",
    "zeros": lambda data: bytes(len(data)) + b"\n",
    "a batch is missing": lambda data: b"".join(data.splitlines(keepends=True)[1:]),
    "a batch twice": lambda data: data + data.splitlines(keepends=True)[-1],
    "another format": lambda data: data.replace(b'"format":', b'"format":9', 1),
    "not text": lambda data: b"\xff\xfe\n",
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_told_and_a_later_writer_goes_on_from_what_is_whole(
    writer: JournalWriter, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "journal"
    writer.append([accepted()])
    writer.append([start(0)])
    path.write_bytes(DAMAGES[kind](path.read_bytes()))
    damaged = path.read_bytes()
    reader = JournalReader(path)
    with pytest.raises(JournalDamaged, match=str(path)):
        reader.refresh()
    after = JournalWriter(path)
    assert (tmp_path / "journal.damaged").read_bytes() == damaged
    after.append([accepted(2)])
    after.close()
    reader.refresh()
    assert reader.facts.version == 2
    assert reader.facts.ranks == after.facts.ranks


@pytest.mark.parametrize("kind", [*DAMAGES, "gone", "emptied", "older", "folder gone"])
def test_the_writer_puts_back_what_somebody_did_to_its_file(
    writer: JournalWriter, reader: JournalReader, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "journal"
    writer.append([accepted()])
    older = path.read_bytes()
    writer.append([start(0)])
    whole = path.read_bytes()
    reader.refresh()
    if kind == "gone":
        path.unlink()
    elif kind == "folder gone":
        path.unlink()
        path.mkdir()
    else:
        others = {"emptied": b"", "older": older}
        path.write_bytes(others[kind] if kind in others else DAMAGES[kind](whole))
    writer.append([ended(0)])
    writer.restore()
    reader.refresh()
    assert reader.facts.ranks == writer.facts.ranks
    again = JournalWriter(path)
    assert again.facts.ranks == writer.facts.ranks
    again.close()


def test_time_goes_on_in_another_boot_and_ends_are_dated_by_the_last_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal"
    writer = JournalWriter(path)
    writer.append([{**accepted(), **writer.stamp()}])
    writer.append([start(0, at=writer.now())])
    writer.heartbeat()
    lived_until = writer.now()
    writer.close()
    monkeypatch.setattr(journals, "boot_id", lambda: "another")
    monkeypatch.setattr(journals.time, "time", lambda: lived_until + 3600.0)
    later = JournalWriter(path)
    assert later.now() >= lived_until + 3600.0
    assert later.last_alive_at() == pytest.approx(lived_until, abs=1.0)
    assert not later.is_of_this_boot()
    later.append([{**accepted(2), **later.stamp()}])
    assert later.is_of_this_boot()
    assert journals.time_of(later.facts, "another", journals.time.monotonic()) == pytest.approx(
        later.now(), abs=1.0
    )
    later.close()
