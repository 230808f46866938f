"""Followed logs over the death of the server: nothing is lost and nothing is told twice."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path

import pytest

import atoll
from atoll.core.status import LogLine

from .conftest import stop, until

# Lines that look the same, so that only their place tells them apart.
SCRIPT = """
say() {{ i=0; while [ $i -lt $1 ]; do echo same; i=$((i+1)); done; }}
when() {{ while [ ! -e {there}/$1 ]; do sleep 0.02; done; }}
say 5
if [ $RANK = 0 ]; then when talk; say 3; when end; else when end; say 4; fi
echo end
"""


@pytest.mark.parametrize(
    ("tail", "how", "is_async"),
    [
        (0, signal.SIGKILL, False),
        (2, signal.SIGKILL, True),
        (2, signal.SIGTERM, False),
        (None, signal.SIGKILL, False),
    ],
)
def test_a_followed_tail_goes_on_where_it_was_cut(
    where: Path,
    tmp_path: Path,
    tail: int | None,
    how: signal.Signals,
    is_async: bool,
) -> None:
    old = 5 if tail is None else tail
    found: list[LogLine] = []
    with atoll.Client() as client:
        command = ["sh", "-c", SCRIPT.format(there=tmp_path)]
        training = client.deploy_distributed("a", command=command, world_size=2)
        until(lambda: len(training.logs()) == 10)

        async def follow() -> None:
            async for line in await training.logs_async(tail=tail, follow=True):
                found.append(line)

        def read() -> None:
            for line in training.logs(tail=tail, follow=True):
                found.append(line)

        reader = threading.Thread(target=(lambda: asyncio.run(follow())) if is_async else read)
        reader.start()
        (tmp_path / "talk").touch()
        # Of the other rank, with a tail of 0, nothing was told yet.
        until(lambda: len(found) == 2 * old + 3)
        stop(where, how)
        (tmp_path / "end").touch()
        reader.join(60)
    told = [[line.text for line in found if line.rank == rank] for rank in (0, 1)]
    assert told == [["same"] * (old + 3) + ["end"], ["same"] * (old + 4) + ["end"]]
