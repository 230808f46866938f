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

# Rank 0 counts all the time, so it does not matter when the following begins. Rank 1 is silent
# while it does, and its lines look the same: only their place tells them apart.
SCRIPT = """
say() {{ i=0; while [ $i -lt $1 ]; do echo same; i=$((i+1)); done; }}
say 5
n=0
while [ ! -e {end} ]; do [ $RANK = 0 ] && echo $n; n=$((n+1)); sleep 0.05; done
say 4
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

    def of(rank: int) -> list[str]:
        return [line.text for line in found if line.rank == rank]

    with atoll.Client() as client:
        end = tmp_path / "end"
        command = ["sh", "-c", SCRIPT.format(end=end)]
        training = client.deploy_distributed("a", command=command, world_size=2)
        until(lambda: len(training.logs(rank=1)) == 5)

        async def follow() -> None:
            async for line in await training.logs_async(tail=tail, follow=True):
                found.append(line)

        def read() -> None:
            for line in training.logs(tail=tail, follow=True):
                found.append(line)

        reader = threading.Thread(target=(lambda: asyncio.run(follow())) if is_async else read)
        reader.start()
        # With a tail of 0, nothing of rank 1 is told before the server dies.
        until(lambda: len(of(0)) > old and len(of(1)) == old)
        stop(where, how)
        end.touch()
        reader.join(60)
        whole = [line.text for line in training.logs(rank=0)]
    assert of(1) == ["same"] * (old + 4) + ["end"]
    assert of(0) == whole[len(whole) - len(of(0)) :]
