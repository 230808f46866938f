from __future__ import annotations

import asyncio
from pathlib import Path

from atoll.core.status import LogLine
from atoll.logs import segments as format
from atoll.logs.files import amerged, offsets_since, read_lines
from atoll.logs.segments import LogWriter, segments, times_path


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def read(folder: Path, offsets: dict[int, int] | None = None) -> list[LogLine]:
    async def all_lines() -> list[LogLine]:
        return [line async for line in read_lines(folder, offsets or {}, ranks=None, follow=None)]

    return asyncio.run(all_lines())


def written(folder: Path, parts: list[tuple[float, bytes]], **options: int) -> None:
    clock = Clock()
    log = LogWriter(folder, clock=clock, **options)
    for at, data in parts:
        clock.now = at
        log.write(data)
    log.close()


def test_a_line_has_the_time_at_which_its_end_was_copied(tmp_path: Path) -> None:
    written(tmp_path / "0", [(1.0, b"one\ntwo\nhal"), (2.0, b"f\nthree\n"), (3.5, b"\r10%\r20%")])
    assert [(line.text, line.time) for line in read(tmp_path)] == [
        ("one", 1.0),
        ("two", 1.0),
        ("half", 2.0),
        ("three", 2.0),
        ("\r10%\r20%", 3.5),
    ]


def test_bytes_that_are_no_text_are_dated_as_any(tmp_path: Path) -> None:
    written(tmp_path / "0", [(1.0, b"\x00\xff\xfe\n"), (2.0, b"\n\n"), (3.0, b"\r\n")])
    assert [line.time for line in read(tmp_path)] == [1.0, 2.0, 2.0, 3.0]


def test_ranks_are_merged_by_time(tmp_path: Path) -> None:
    written(tmp_path / "0", [(1.0, b"a\n"), (4.0, b"d\n")])
    written(tmp_path / "1", [(2.0, b"b\n"), (3.0, b"c\n"), (5.0, b"e\n")])
    assert [line.text for line in read(tmp_path)] == ["a", "b", "c", "d", "e"]


def test_a_log_without_times_is_read_rank_by_rank(tmp_path: Path) -> None:
    for rank in (0, 1):
        written(tmp_path / str(rank), [(1.0, b"x\ny\n")])
        times_path(tmp_path / str(rank), 0).unlink()
    assert [(line.rank, line.text, line.time) for line in read(tmp_path)] == [
        (0, "x", None),
        (0, "y", None),
        (1, "x", None),
        (1, "y", None),
    ]
    assert read(tmp_path, offsets_since(tmp_path, None, 0.0)) == []


def test_a_log_that_an_older_release_began_has_times_from_then_on(tmp_path: Path) -> None:
    written(tmp_path / "0", [(1.0, b"old\n")])
    times_path(tmp_path / "0", 0).unlink()
    written(tmp_path / "0", [(2.0, b"new\n")])
    assert [(line.text, line.time) for line in read(tmp_path)] == [("old", None), ("new", 2.0)]


def test_times_go_with_their_segments(tmp_path: Path) -> None:
    parts = [(float(n), b"line %04d\n" % n) for n in range(500)]
    written(tmp_path / "0", parts, max_bytes=1600)
    kept = segments(tmp_path / "0")
    assert sorted(path.name for path in (tmp_path / "0").iterdir()) == sorted(
        f"{start:020d}.{kind}" for start in kept for kind in ("log", "times")
    )
    lines = read(tmp_path)[1:]
    assert [(line.text, line.time) for line in lines] == [
        (f"line {n:04d}", float(n)) for n in range(500 - len(lines), 500)
    ]


def test_since_a_time_begins_at_the_line_that_ended_then(tmp_path: Path) -> None:
    written(
        tmp_path / "0", [(1.0, b"one\nhal"), (2.0, b"f\nthree\n"), (3.0, b"four\n")], max_bytes=80
    )
    for since, first in ((0.0, "one"), (1.5, "half"), (2.0, "half"), (2.5, "four")):
        assert read(tmp_path, offsets_since(tmp_path, None, since))[0].text == first
    assert read(tmp_path, offsets_since(tmp_path, None, 3.1)) == []


def test_few_files_are_open_however_many_ranks_there_are(tmp_path: Path) -> None:
    logs = [LogWriter(tmp_path / str(rank), clock=Clock()) for rank in range(40)]
    for log in logs:
        log.write(b"x\n")
    assert len(format._open) <= format.MAX_OPEN
    for log in logs:
        log.close()
    assert not [path for path in format._open if tmp_path in path.parents]
    assert {line.time for line in read(tmp_path)} == {1000.0}


def test_times_that_cannot_be_written_keep_no_line_back(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    times_path(tmp_path / "0", 0).mkdir()
    written(tmp_path / "0", [(1.0, b"one\n")])
    assert [(line.text, line.time) for line in read(tmp_path)] == [("one", None)]


def test_lines_that_are_waited_for_are_merged() -> None:
    async def of(rank: int, *times: float | None):  # type: ignore[no-untyped-def]
        for at in times:
            yield LogLine(rank=rank, text="", time=at)

    async def check() -> None:
        logs = [of(0, 1.0, None, 4.0), of(1), of(2, 2.0, 3.0)]
        found = [(line.rank, line.time) async for line in amerged(logs)]
        assert found == [(0, 1.0), (0, None), (2, 2.0), (2, 3.0), (0, 4.0)]

    asyncio.run(check())
