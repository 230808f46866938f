"""Following the logs of local ranks: what is seen while a line is not yet whole."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from atoll.core.status import LogLine, OffsetLine
from atoll.logs import files
from atoll.logs.files import LogGrowth, read_lines, tail_offsets
from atoll.logs.segments import LogWriter


class Followed:
    def __init__(
        self, folder: Path, max_bytes: int | None = None, growth: LogGrowth | None = None
    ) -> None:
        self.log = LogWriter(folder / "0", max_bytes=max_bytes)
        self.is_over = False
        self.has_looked = asyncio.Event()  # whether the training is over
        told = None if growth is None else contextlib.nullcontext(growth)
        self.lines: AsyncIterator[LogLine] = read_lines(
            folder, {}, ranks=None, follow=self._follow, growth=told
        )

    def _follow(self) -> bool:
        self.has_looked.set()
        return self.is_over

    async def next(self) -> str:
        return (await asyncio.wait_for(anext(self.lines), 30)).text

    async def rest(self) -> list[str]:
        self.is_over = True
        return [line.text async for line in self.lines]


def test_a_progress_bar_is_seen_while_its_line_has_no_end(tmp_path: Path) -> None:
    async def follow() -> None:
        followed = Followed(tmp_path)
        followed.log.write(b"\r10%\r20%\r30%")
        assert await followed.next() == "\r10%\r20%\r"
        followed.log.write(b"\r40%\ndone\n")
        assert await followed.rest() == ["30%\r40%", "done"]
        followed.log.close()

    asyncio.run(follow())


def test_a_reader_that_comes_back_goes_on_inside_the_bar(tmp_path: Path) -> None:
    async def follow() -> None:
        followed = Followed(tmp_path)
        followed.log.write(b"\r10%\r20%\r30%")
        seen = await asyncio.wait_for(anext(followed.lines), 30)
        assert isinstance(seen, OffsetLine)
        followed.log.close()
        again = read_lines(tmp_path, {0: seen.at}, ranks=None, follow=None)
        assert [line.text async for line in again] == ["30%"]

    asyncio.run(follow())


def test_a_line_of_another_system_is_not_cut_before_its_end(tmp_path: Path) -> None:
    async def follow() -> None:
        followed = Followed(tmp_path)
        followed.log.write(b"one\r\ntwo\r")
        assert await followed.next() == "one\r"
        followed.log.write(b"\n\rthree\r\n")
        assert await followed.rest() == ["two\r", "\rthree\r"]
        followed.log.close()

    asyncio.run(follow())


def lines_of(folder: Path, offsets: dict[int, int]) -> list[str]:
    async def read() -> list[str]:
        return [line.text async for line in read_lines(folder, offsets, ranks=None, follow=None)]

    return asyncio.run(read())


def test_a_log_of_which_much_was_dropped_says_so_and_starts_at_a_line(tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "0", max_bytes=80_000)
    written = [f"line {n:06d} of the log" for n in range(20_000)]
    for line in written:
        log.write(line.encode() + b"\n")
    log.close()
    told, *rest = lines_of(tmp_path, {})
    assert rest == written[-len(rest) :]
    dropped = sum(len(line) + 1 for line in written[: -len(rest)])
    assert told.startswith(f"[atoll: {dropped:,} bytes of this log were dropped here")
    kept = sum(len(line) + 1 for line in rest)
    assert 60_000 <= kept <= 80_000
    assert lines_of(tmp_path, tail_offsets(tmp_path, None, 3)) == written[-3:]
    assert lines_of(tmp_path, tail_offsets(tmp_path, None, 10**6)) == [told, *rest]
    assert lines_of(tmp_path, tail_offsets(tmp_path, None, 0)) == []


def test_a_reader_that_fell_behind_is_told_what_it_missed(tmp_path: Path) -> None:
    async def follow() -> None:
        followed = Followed(tmp_path, max_bytes=8_000)
        followed.log.write(b"first\nhalf a li")
        assert await followed.next() == "first"
        for n in range(2000):
            followed.log.write(b"line %d\n" % n)
        told = await followed.next()
        assert told.startswith("[atoll: ")
        rest = await followed.rest()
        assert rest[-1] == "line 1999"
        assert [f"line {n}" for n in range(2000 - len(rest), 2000)] == rest
        followed.log.close()

    asyncio.run(follow())


def test_who_does_not_follow_a_rank_that_prints_faster_than_it_is_read_comes_to_an_end(
    tmp_path: Path,
) -> None:
    async def read() -> list[str]:
        log = LogWriter(tmp_path / "0")
        log.write(b"".join(b"line %d\n" % number for number in range(100)) + b"has be")
        texts: list[str] = []
        async for line in read_lines(tmp_path, {}, ranks=None, follow=None):
            texts.append(line.text)
            log.write(b"gun\n" if len(texts) == 1 else b"new\nnew\n")
            assert len(texts) <= 200, "what is there when it begins, not what comes meanwhile"
        log.close()
        return texts

    assert asyncio.run(read()) == [*(f"line {number}" for number in range(100)), "has begun"]


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that were listed, by followers that look at the training all the time."""
    listed: list[str] = []
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(str(path)) or listdir(path))
    monkeypatch.setattr(files, "OVER_EVERY_S", 0.001)
    monkeypatch.setattr(files, "TICK_NS", 0)  # the files are as old as if nobody had just made them
    return listed


async def looked(followed: Followed, times: int) -> None:
    for _ in range(times):
        followed.has_looked.clear()
        await followed.has_looked.wait()


def test_a_follower_that_is_told_of_growth_lists_nothing_while_nothing_is_printed(
    tmp_path: Path, listings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "READ_ALL_EVERY_S", 0.0)

    async def follow() -> None:
        growth = LogGrowth()
        followed = Followed(tmp_path, growth=growth)
        followed.log.write(b"first\n")
        assert await followed.next() == "first"
        line = asyncio.create_task(followed.next())
        await looked(followed, 3)
        listings.clear()
        await looked(followed, 50)
        assert listings == []
        followed.log.write(b"second\n")
        growth.add([0])
        assert await line == "second"
        assert listings
        assert await followed.rest() == []

    asyncio.run(follow())


def test_a_line_comes_by_its_notice_alone_and_others_are_not_read_for_it(
    tmp_path: Path, listings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "READ_ALL_EVERY_S", math.inf)

    async def follow() -> None:
        growth = LogGrowth()
        followed = Followed(tmp_path, growth=growth)
        other, late = LogWriter(tmp_path / "1"), tmp_path / "2"
        other.write(b"of rank 1\n")
        assert await followed.next() == "of rank 1"
        line = asyncio.create_task(followed.next())
        await looked(followed, 3)
        listings.clear()
        followed.log.write(b"of rank 0\n")
        LogWriter(late).write(b"of a rank that was not there before\n")
        growth.add([2])
        assert await line == "of a rank that was not there before"
        assert set(listings) == {str(late)}
        growth.add(None)
        assert await followed.next() == "of rank 0"
        assert await followed.rest() == []

    asyncio.run(follow())


def test_a_line_whose_notice_was_lost_comes_by_the_next_look_at_all_files(
    tmp_path: Path, listings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "READ_ALL_EVERY_S", 0.0)

    async def follow() -> None:
        followed = Followed(tmp_path, max_bytes=800, growth=LogGrowth())
        followed.log.write(b"x" * 100 + b"\n")
        assert await followed.next() == "x" * 100
        line = asyncio.create_task(followed.next())
        await looked(followed, 3)
        followed.log.write(b"in the next segment\n")
        assert await line == "in the next segment"
        line = asyncio.create_task(followed.next())
        await looked(followed, 3)
        LogWriter(tmp_path / "1").write(b"of a rank that was not there before\n")
        assert await line == "of a rank that was not there before"
        assert await followed.rest() == []

    asyncio.run(follow())


def test_a_long_line_comes_whole_while_it_is_followed_and_afterwards(tmp_path: Path) -> None:
    """10 MB, which takes many reads and more than one segment."""
    long = "".join(f"{number:07d}," for number in range(1_250_000))

    async def follow() -> None:
        followed = Followed(tmp_path)
        for at in range(0, len(long), 1_000_003):
            followed.log.write(long[at : at + 1_000_003].encode())
        followed.log.write(b"\nnext\n")
        assert await followed.next() == long
        assert await followed.next() == "next"
        followed.log.close()

    asyncio.run(follow())
    assert lines_of(tmp_path, {}) == [long, "next"]
    assert lines_of(tmp_path, tail_offsets(tmp_path, None, 2)) == [long, "next"]
