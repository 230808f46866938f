"""Random lives of trainings under faults. `make soak` runs many more.

`ATOLL_SIM_SEED=n` replays one schedule, `ATOLL_SIM_COUNT=n` sets how many there are.
"""

from __future__ import annotations

import os

import pytest

from tests.sim.schedule import run_schedules

CHUNK = 250
COUNT = int(os.environ.get("ATOLL_SIM_COUNT", "1000"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, COUNT, CHUNK))
def test_every_schedule_keeps_the_promises(first: int) -> None:
    replay = os.environ.get("ATOLL_SIM_SEED")
    if replay is not None:
        run_schedules(int(replay), 1 if first == 0 else 0)
        return
    run_schedules(first, CHUNK)
