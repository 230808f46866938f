"""Random lives of outer rounds under faults. `make soak` runs ten times as many.

`ATOLL_SIM_SEED=n` replays one schedule, `ATOLL_SIM_COUNT=n` sets how many there are.
"""

from __future__ import annotations

import os

import pytest

from tests.sim.round.schedule import run_schedules

CHUNK = 125  # three seconds, so that the workers of a test run share them
MOST = 10_000  # a schedule is long: `make soak` asks for more of others
COUNT = min(int(os.environ.get("ATOLL_SIM_COUNT", "1000")), MOST)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, COUNT, CHUNK))
def test_every_schedule_keeps_the_promises(first: int) -> None:
    replay = os.environ.get("ATOLL_SIM_SEED")
    if replay is not None:
        run_schedules(int(replay), 1 if first == 0 else 0)
        return
    happened = run_schedules(first, CHUNK)
    # A schedule in which nothing goes wrong proves nothing.
    for fault in ("kills", "freezes", "failed requests", "stand-ins", "late"):
        assert happened[fault], f"no {fault} in {CHUNK} schedules"
    assert happened["rounds"] > 5 * CHUNK
