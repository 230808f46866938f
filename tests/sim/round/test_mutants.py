"""Each rule of the round, taken away, is missed: by a random schedule or by a directed one."""

from __future__ import annotations

import pytest

from tests.sim.round.mutants import CAUGHT_BY, MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_mutant_is_caught(mutant: Mutant) -> None:
    assert mutant.is_caught(CAUGHT_BY[mutant.name]), (
        f"{mutant.name}: not caught by {CAUGHT_BY[mutant.name]}; if schedules have changed, "
        "find another seed with python -m tests.sim.round.mutants"
    )
