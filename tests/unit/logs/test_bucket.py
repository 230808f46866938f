from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.core.errors import Temporary
from atoll.core.status import LogLine
from atoll.logs.bucket import LogPiece, ObjectLogs
from atoll.objectstore.bucket import Bucket

# A process whose output takes the way through the store.
WRITER = """
import os, sys
from atoll.logs.bucket import UploadedLog
from atoll.objectstore.bucket import Bucket
store = Bucket.open(sys.argv[1])
log = UploadedLog(store, int(sys.argv[2]), often_s=0.05)
print(sys.argv[3], flush=True, end="")
os.system("echo from a child >&2")
log.close()
print("after", flush=True)
"""


def write(uri: str, attempt: int, text: str) -> str:
    words = [sys.executable, "-c", WRITER, uri, str(attempt), text]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def lines(logs: ObjectLogs, offsets: dict[int, int] | None = None) -> list[LogLine]:
    async def read() -> list[LogLine]:
        return [line async for line in logs.lines(offsets or {}, None)]

    return asyncio.run(read())


@pytest.fixture
def uri(tmp_path: Path) -> str:
    (tmp_path / "0").mkdir()
    return f"file://{tmp_path}"


def test_what_a_process_writes_is_in_the_store_and_in_its_own_output(uri: str) -> None:
    assert write(f"{uri}/0", 0, "one\ntwo\n") == "one\ntwo\nfrom a child\nafter\n"
    logs = ObjectLogs(lambda rank: Bucket.open(f"{uri}/{rank}"), [0])
    assert [line.text for line in lines(logs)] == ["one", "two", "from a child"]


def test_attempts_follow_each_other_and_places_lead_back(uri: str) -> None:
    write(f"{uri}/0", 0, "half a line, then ")
    write(f"{uri}/0", 1, "a\n\nb\n")
    logs = ObjectLogs(lambda rank: Bucket.open(f"{uri}/{rank}"), [0])
    all_lines = lines(logs)
    texts = ["half a line, then from a child", "a", "", "b", "from a child"]
    assert [line.text for line in all_lines] == texts
    for at, line in enumerate(all_lines):
        position = line.at  # type: ignore[attr-defined]
        assert [each.text for each in lines(logs, {0: position})] == texts[at + 1 :]
    for tail in range(1, 6):
        offsets = asyncio.run(logs.offsets(tail))
        assert [each.text for each in lines(logs, offsets)] == texts[-tail:]


def test_a_piece_is_read_back_by_its_name() -> None:
    piece = LogPiece(3, 1 << 33)
    assert LogPiece.of(piece.name) == piece
    assert LogPiece.of("something else") is None
    assert LogPiece(1, 0).position > LogPiece(0, 1 << 35).position


def test_a_rank_without_a_log_has_no_lines(uri: str) -> None:
    logs = ObjectLogs(lambda rank: Bucket.open(f"{uri}/{rank}"), [0])
    assert asyncio.run(logs.offsets(3)) == {}
    assert lines(logs) == []


def test_a_store_that_fails_for_a_moment_is_asked_again(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(f"{uri}/0", 0, "one\n")
    store, failures = Bucket.open(f"{uri}/0"), iter([True, False, False])
    entries = store.entries

    def sometimes() -> dict[str, int]:
        if next(failures, False):
            raise Temporary("for a moment")
        return entries()

    monkeypatch.setattr(store, "entries", sometimes)
    assert [line.text for line in lines(ObjectLogs(lambda _: store, [0]))][:1] == ["one"]
