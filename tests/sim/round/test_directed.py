"""Schedules written down request by request: the traps of the design, and defects of the past."""

from __future__ import annotations

import pytest

from tests.sim.round.directed import DIRECTED
from tests.sim.round.stage import Stage


@pytest.mark.parametrize("name", DIRECTED)
def test_the_schedule_keeps_the_promises(name: str) -> None:
    DIRECTED[name]()


# So many requests a rank and round, with what a quiet round reads, makes and sweeps in all.
MOST_REQUESTS = {2: 8, 4: 12, 8: 20, 16: 36, 64: 135}


@pytest.mark.parametrize("world", MOST_REQUESTS)
def test_a_quiet_round_takes_few_requests(world: int) -> None:
    stage = Stage(
        world=world,
        quorum=world // 2 + 1,
        together=tuple(range(world)),
        cells=(world,),
        every=5,
        block=1000,
        has_direct=True,
        is_parallel=True,
    )
    stage.start_all()
    stage.run_to(12)
    before, rounds = sum(stage.world.requests.values()), stage.rounds
    stage.run_to(rounds + 20)
    spent = sum(stage.world.requests.values()) - before
    assert spent / world / 20 <= MOST_REQUESTS[world]
