"""The work queue: one pass a key at a time, and no key forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from atoll.controller.loop import WorkQueue

A, B = ("n", "a"), ("n", "b")


def run(test: Callable[[WorkQueue], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with asyncio.timeout(60):
            await test(WorkQueue())

    asyncio.run(inside())


def test_repeats_are_merged() -> None:
    async def check(queue: WorkQueue) -> None:
        for key in (A, B, A, A):
            queue.add(key)
        assert [await queue.get(), await queue.get()] == [A, B]
        assert not queue._ready

    run(check)


def test_a_key_added_while_worked_on_is_worked_on_once_more_and_not_at_once() -> None:
    async def check(queue: WorkQueue) -> None:
        queue.add(A)
        assert await queue.get() == A
        queue.add(A)
        queue.add(A)
        assert not queue._ready
        queue.done(A)
        assert await queue.get() == A
        queue.done(A)
        assert not queue._ready

    run(check)


def test_the_earliest_of_several_times_counts() -> None:
    async def check(queue: WorkQueue) -> None:
        queue.add_after(A, 3600.0)
        queue.add_after(A, 0.01)
        queue.add_after(A, 1800.0)
        assert await queue.get() == A
        queue.done(A)
        assert not queue._ready

    run(check)


def test_being_worked_on_early_drops_the_later_time() -> None:
    async def check(queue: WorkQueue) -> None:
        queue.add_after(A, 0.02)
        queue.add(A)
        queue.add_after(B, 0.05)
        order = [await queue.get()]
        queue.done(A)
        order.append(await queue.get())
        assert order == [A, B]

    run(check)


def test_failures_wait_longer_and_longer_until_forgiven() -> None:
    async def check(queue: WorkQueue) -> None:
        waits = []
        for _ in range(3):
            queue.retry(A)
            waits.append(queue._due.pop(A) - asyncio.get_running_loop().time())
        assert waits == sorted(waits)
        assert waits[2] > 2 * waits[0]
        queue.forgive(A)
        queue.retry(A)
        assert queue._due[A] - asyncio.get_running_loop().time() < waits[1]

    run(check)


def test_a_key_may_fail_any_number_of_times() -> None:
    async def check(queue: WorkQueue) -> None:
        for _ in range(2000):
            queue.retry(A)
        assert queue._due

    run(check)
