"""Each rule of the round, taken away, is missed: by a random schedule or by a directed one."""

from __future__ import annotations

import pytest

from tests.sim.round.mutants import MUTANTS, Mutant, find_seed

SEEDS = 100  # tried if the one in the table does not catch it: three seconds


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_caught(mutant: Mutant) -> None:
    _, found = find_seed(mutant, SEEDS)
    assert found, f"no schedule misses the rule: {mutant.name}"
