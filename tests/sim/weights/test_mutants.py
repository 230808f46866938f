"""Each rule of the channel, taken away, is missed: by a random schedule or by a directed one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from atoll.weights.group import GroupMachine
from tests.sim.weights import groups, replicas_directed, replicas_mutants
from tests.sim.weights.directed import DIRECTED
from tests.sim.weights.mutants import CAUGHT_BY, MUTANTS, Mutant, find_seed
from tests.sim.weights.world import Violation

SEEDS = 100  # tried if the one in the table does not catch it


def test_the_table_has_every_mutant() -> None:
    assert len(MUTANTS) == 31
    assert set(CAUGHT_BY) == {mutant.name for mutant in MUTANTS}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_caught(mutant: Mutant) -> None:
    _, text = find_seed(mutant, SEEDS)
    assert text, f"no schedule misses the rule: {mutant.name}"


@pytest.mark.parametrize("mutant", replicas_mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_of_replicas_is_caught(mutant: replicas_mutants.ReplicaMutant) -> None:
    assert mutant.is_caught(replicas_mutants.CAUGHT_BY[mutant.name])


@pytest.mark.parametrize(("group", "seed"), groups.MUTANTS.values(), ids=groups.MUTANTS)
def test_the_mutant_of_groups_is_caught(group: type[GroupMachine], seed: int) -> None:
    with pytest.raises(Violation):
        groups.run_group_schedule(seed, group=group)


ALL_DIRECTED = DIRECTED | replicas_directed.DIRECTED


@pytest.mark.parametrize("schedule", ALL_DIRECTED.values(), ids=ALL_DIRECTED)
def test_a_directed_schedule_keeps_the_promises(schedule: Callable[[], None]) -> None:
    schedule()
