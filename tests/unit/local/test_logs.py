"""Following the logs of local ranks: what is seen while a line is not yet whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from atoll.core.status import LogLine, PlacedLine
from atoll.local.logs import read_lines
from atoll.local.ranklog import LogWriter


class Followed:
    def __init__(self, folder: Path) -> None:
        self.log = LogWriter(folder / "0")
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
        assert isinstance(seen, PlacedLine)
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
