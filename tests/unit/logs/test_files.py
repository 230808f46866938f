"""Following the logs of local ranks: what is seen while a line is not yet whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from atoll.core.status import LogLine, OffsetLine
from atoll.logs.files import read_lines, tail_offsets
from atoll.logs.segments import LogWriter


class Followed:
    def __init__(self, folder: Path, max_bytes: int | None = None) -> None:
        self.log = LogWriter(folder / "0", max_bytes=max_bytes)
        self.is_over = False
        self.lines: AsyncIterator[LogLine] = read_lines(
            folder, {}, ranks=None, follow=lambda: self.is_over
        )

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
