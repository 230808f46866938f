"""Random lives of a weight channel under faults. `make soak` runs many more.

`ATOLL_SIM_SEED=n` replays one schedule, `ATOLL_SIM_COUNT=n` sets how many there are.
"""

from __future__ import annotations

import os

import pytest

from tests.sim.weights.schedule import run_schedules

CHUNK = 100  # four seconds, so that the workers of a test run share them
MOST = 20_000
COUNT = min(int(os.environ.get("ATOLL_SIM_COUNT", "300")), MOST)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, COUNT, CHUNK))
def test_every_schedule_keeps_the_promises(first: int) -> None:
    replay = os.environ.get("ATOLL_SIM_SEED")
    if replay is not None:
        run_schedules(int(replay), 1 if first == 0 else 0)
        return
    happened = run_schedules(first, CHUNK)
    # A schedule in which nothing goes wrong proves nothing.
    for fault in ("kills", "naps", "failed requests", "late writes", "damage", "superseded"):
        assert happened[fault], f"no {fault} in {CHUNK} schedules"
    assert happened["committed"] > 10 * CHUNK
