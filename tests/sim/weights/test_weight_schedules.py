"""Random lives of a weight channel under faults. `make soak` runs many more.

`ATOLL_SIM_SEED=n` replays one schedule, `ATOLL_SIM_COUNT=n` sets how many there are.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

import pytest

from tests.sim.weights.groups import run_group_schedules
from tests.sim.weights.replicas import run_replica_schedules
from tests.sim.weights.schedule import run_schedules

KINDS = {
    "trainers": run_schedules,
    "replicas": run_replica_schedules,
    "groups": run_group_schedules,
}
CHUNK = 100  # four seconds, so that the workers of a test run share them
MOST = 20_000
COUNT = min(int(os.environ.get("ATOLL_SIM_COUNT", "300")), MOST)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(0, COUNT, CHUNK))
@pytest.mark.parametrize("run", KINDS.values(), ids=KINDS)
def test_every_schedule_keeps_the_promises(run: Callable[..., Counter[str]], first: int) -> None:
    replay = os.environ.get("ATOLL_SIM_SEED")
    if replay is not None:
        run(int(replay), 1 if first == 0 else 0)
        return
    happened = run(first, CHUNK)
    # A schedule in which nothing goes wrong proves nothing.
    for fault in ("kills", "naps", "failed requests", "late writes", "damage", "superseded"):
        assert happened[fault], f"no {fault} in {CHUNK} schedules"
    assert happened["committed"] > 10 * CHUNK
