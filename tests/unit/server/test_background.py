"""Background tasks: one that dies is started again, and shown until it works."""

from __future__ import annotations

import asyncio
import logging

import pytest

from atoll.core.errors import Temporary
from atoll.server.background import BackgroundTasks


def test_a_task_that_dies_is_logged_shown_and_started_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        tasks = BackgroundTasks(first_pause_s=0.01, steady_s=0.05)
        tries: list[str] = []
        works = asyncio.Event()

        async def work() -> None:
            tries.append(str([failure.error for failure in tasks.failures]))
            if len(tries) < 3:
                raise RuntimeError(f"try {len(tries)}")
            works.set()
            await asyncio.Event().wait()

        async with tasks.running("metrics", work):
            await works.wait()
            (failure,) = tasks.failures
            assert (failure.name, failure.error) == ("metrics", "RuntimeError: try 2")
            async with asyncio.timeout(30):
                while tasks.failures:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert tries == ["[]", "['RuntimeError: try 1']", "['RuntimeError: try 2']"]
        assert len(asyncio.all_tasks()) == 1

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert "'metrics' died of RuntimeError: try 1" in caplog.text
    assert "Traceback" in caplog.text


def test_what_failed_in_a_group_of_tasks_is_named_by_its_first_error() -> None:
    async def main() -> None:
        tasks = BackgroundTasks(first_pause_s=60)

        async def fail() -> None:
            raise Temporary("the disk is full")

        async def work() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())

        async with tasks.running("rounds", work), asyncio.timeout(30):
            while not tasks.failures:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert [failure.error for failure in tasks.failures] == ["Temporary: the disk is full"]
        assert tasks.failures == []

    asyncio.run(main())


def test_work_that_returns_is_over() -> None:
    async def main() -> int:
        done = 0

        async def work() -> None:
            nonlocal done
            done += 1

        await BackgroundTasks().keep_running("once", work)
        return done

    assert asyncio.run(main()) == 1
