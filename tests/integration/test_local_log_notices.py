"""The supervisor tells followers which logs grew: they look at no file before that."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.in_process import Plane
from tests.support.in_process import plane as in_process

from atoll.backends.local.liveness import pair_of
from atoll.core.spec import WorldSize
from atoll.core.status import LogLine, Training
from atoll.logs import files

# Each rank says what the file of its turn holds, when that is there.
SCRIPT = """
echo rank $RANK began
for turn in 1 2 3; do
    while [ ! -e {folder}/$RANK.$turn ]; do sleep 0.02; done
    cat {folder}/$RANK.$turn
done
"""


@pytest.fixture(autouse=True)
def only_by_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "READ_ALL_EVERY_S", math.inf)


def say(folder: Path, rank: int, turn: int, text: str) -> None:
    draft = folder / f"{rank}.{turn}.new"
    draft.write_text(text)
    draft.rename(folder / f"{rank}.{turn}")


async def begin(plane: Plane, folder: Path, ranks: int) -> Training:
    script = SCRIPT.format(folder=folder)
    return await plane.create(
        name="a",
        command=["sh", "-c", script],
        world_size=WorldSize(min=ranks, target=ranks, max=ranks),
        max_restarts=0,
    )


class Follower:
    def __init__(self, plane: Plane, training: Training) -> None:
        self.is_over = False
        self._lines: AsyncIterator[LogLine] = plane.executor.logs(
            training, follow=lambda: self.is_over
        )

    async def take(self, count: int) -> set[str]:
        async with asyncio.timeout(60):
            return {(await anext(self._lines)).text for _ in range(count)}

    async def rest(self) -> list[str]:
        self.is_over = True
        return [line.text async for line in self._lines]


def test_followers_get_each_line_by_the_notice_of_the_supervisor(tmp_path: Path) -> None:
    async def check() -> None:
        async with in_process(tmp_path) as plane:
            training = await begin(plane, tmp_path, 2)
            first = Follower(plane, training)  # from before there was a supervisor
            assert await first.take(2) == {"rank 0 began", "rank 1 began"}
            second = Follower(plane, training)
            assert await second.take(2) == {"rank 0 began", "rank 1 began"}
            say(tmp_path, 1, 1, "one\n")
            assert [await first.take(1), await second.take(1)] == [{"one"}] * 2
            assert await second.rest() == []
            say(tmp_path, 0, 1, "two\n")
            assert await first.take(1) == {"two"}
            assert await first.rest() == []
            third = Follower(plane, training)  # after nobody followed any more
            assert await third.take(4) == {"rank 0 began", "rank 1 began", "one", "two"}
            say(tmp_path, 1, 2, "three\n")
            assert await third.take(1) == {"three"}
            await plane.delete(training)
            assert await third.rest() == []

    asyncio.run(check())


def test_a_follower_hears_of_the_next_supervisor_too(tmp_path: Path) -> None:
    async def check() -> None:
        async with in_process(tmp_path) as plane:
            training = await plane.create(
                name="a",
                command=["sh", "-c", "echo attempt $ATOLL_ATTEMPT; sleep 1000"],
                world_size=WorldSize(min=1, target=1, max=1),
                max_restarts=5,
            )
            follower = Follower(plane, training)
            assert await follower.take(1) == {"attempt 0"}
            supervisor = pair_of(plane.root / training.uid).supervisor
            assert supervisor is not None
            os.kill(supervisor.pid, signal.SIGKILL)
            assert await follower.take(1) == {"attempt 1"}
            await plane.delete(training)
            assert await follower.rest() == []

    asyncio.run(check())


def test_nobody_is_told_of_logs_who_does_not_follow_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atoll.backends.local.supervisor_client import SupervisorClient

    told: list[object] = []
    wake = SupervisorClient._wake_followers
    monkeypatch.setattr(
        SupervisorClient,
        "_wake_followers",
        lambda self, ranks: told.append(ranks) or wake(self, ranks),
    )

    async def check() -> None:
        async with in_process(tmp_path) as plane:
            training = await begin(plane, tmp_path, 1)
            follower = Follower(plane, training)
            assert await follower.take(1) == {"rank 0 began"}
            assert await follower.rest() == []
            told.clear()
            for turn in (1, 2):
                say(tmp_path, 0, turn, f"turn {turn}\n")
            await plane.lines(training, 3)
            assert [0] not in told
            await plane.delete(training)

    asyncio.run(check())
