"""Random lives of trainings under faults. `make soak` runs many more.

`ATOLL_SIM_SEED=n` replays one schedule, `ATOLL_SIM_COUNT=n` sets how many there are.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.sim.schedule import run_schedules

CHUNK = 500
COUNT = int(os.environ.get("ATOLL_SIM_COUNT", "10000"))


@pytest.fixture
def memory_folder() -> object:
    """A folder in memory: the simulation is about order, not about the disk."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=base) as name:
        yield Path(name)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, COUNT, CHUNK))
def test_every_schedule_keeps_the_promises(first: int, memory_folder: Path) -> None:
    replay = os.environ.get("ATOLL_SIM_SEED")
    if replay is not None:
        run_schedules(int(replay), 1 if first == 0 else 0, memory_folder)
        return
    run_schedules(first, CHUNK, memory_folder)
