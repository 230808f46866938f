"""Each rule of the channel, taken away, is missed: by a random schedule or by a directed one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sim.weights.directed import DIRECTED
from tests.sim.weights.mutants import CAUGHT_BY, MUTANTS, Mutant, find_seed

SEEDS = 100  # tried if the one in the table does not catch it


def test_the_table_has_every_mutant() -> None:
    assert len(MUTANTS) == 26
    assert set(CAUGHT_BY) == {mutant.name for mutant in MUTANTS}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_caught(mutant: Mutant) -> None:
    _, text = find_seed(mutant, SEEDS)
    assert text, f"no schedule misses the rule: {mutant.name}"


@pytest.mark.parametrize("schedule", DIRECTED.values(), ids=DIRECTED)
def test_a_directed_schedule_keeps_the_promises(schedule: Callable[[], None]) -> None:
    schedule()
