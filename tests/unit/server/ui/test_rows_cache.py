"""What took long to make is used again, in proportion; what was cheap is made anew."""

from __future__ import annotations

import asyncio

from atoll.server.ui.rows import MAX_ENTRIES, TTLCache


class Work:
    """Its clock moves only while something is made."""

    def __init__(self) -> None:
        self.time = 100.0
        self.made = 0

    def now(self) -> float:
        return self.time

    def make(self, seconds: float = 1.0) -> bytes:
        self.made += 1
        self.time += seconds
        return str(self.made).encode()


def test_an_answer_is_used_for_ten_times_as_long_as_it_took() -> None:
    asyncio.run(_test_an_answer_is_used_for_ten_times_as_long_as_it_took())


async def _test_an_answer_is_used_for_ten_times_as_long_as_it_took() -> None:
    work = Work()
    reused = TTLCache(work.now)
    assert await reused.body("a", work.make) == b"1"
    work.time += 9.9
    assert await reused.body("a", work.make) == b"1"
    assert await reused.body("b", work.make) == b"2"
    work.time += 0.2
    assert await reused.body("a", work.make) == b"3"


def test_callers_at_once_share_one_answer_and_few_are_kept() -> None:
    asyncio.run(_test_callers_at_once_share_one_answer_and_few_are_kept())


async def _test_callers_at_once_share_one_answer_and_few_are_kept() -> None:
    work = Work()
    reused = TTLCache(work.now)
    answers = await asyncio.gather(*(reused.body("a", work.make) for _ in range(20)))
    assert set(answers) == {b"1"}
    for number in range(2 * MAX_ENTRIES):
        await reused.body(number, work.make)
    assert len(reused._entries) == MAX_ENTRIES
    assert not reused._locks


def test_one_that_fails_is_made_again() -> None:
    asyncio.run(_test_one_that_fails_is_made_again())


async def _test_one_that_fails_is_made_again() -> None:
    work = Work()
    reused = TTLCache(work.now)

    def fail() -> bytes:
        raise OSError("gone")

    for _ in range(2):
        try:
            await reused.body("a", fail)
        except OSError:
            continue
        raise AssertionError("it was not told")
    assert await reused.body("a", work.make) == b"1"
