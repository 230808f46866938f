"""The phase machine: five properties, over every world that can be counted."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import find, given
from hypothesis import strategies as st

from atoll.core.phase import EDGES, RULES, TERMINAL, Phase, Tally, advance

tallies = st.builds(
    Tally,
    min=st.integers(1, 4),
    wanted=st.integers(0, 6),
    ready=st.integers(0, 6),
    succeeded=st.integers(0, 6),
    alive=st.integers(0, 6),
    is_failing=st.booleans(),
    is_cancelling=st.booleans(),
    is_gate_open=st.booleans(),
)
phases = st.sampled_from(list(Phase))
open_phases = st.sampled_from([p for p in Phase if not p.is_terminal])


@given(st.sampled_from(sorted(TERMINAL)), tallies)
def test_terminal_is_final(phase: Phase, tally: Tally) -> None:
    assert advance(phase, tally) is None


@given(open_phases, tallies)
def test_every_move_is_an_edge(phase: Phase, tally: Tally) -> None:
    verdict = advance(phase, tally)
    assert verdict is not None
    assert verdict.phase == phase or verdict.phase in EDGES[phase]


@given(open_phases, tallies)
def test_seeing_the_same_twice_changes_nothing(phase: Phase, tally: Tally) -> None:
    once = advance(phase, tally)
    assert once is not None
    twice = advance(once.phase, tally)
    assert twice is None if once.phase.is_terminal else twice == once


@given(open_phases, open_phases, tallies)
def test_only_the_latest_look_matters_until_the_end(a: Phase, b: Phase, tally: Tally) -> None:
    assert advance(a, tally) == advance(b, tally)


@given(open_phases, tallies)
def test_nothing_ends_while_something_lives(phase: Phase, tally: Tally) -> None:
    verdict = advance(phase, tally)
    assert verdict is not None
    assert not (verdict.phase.is_terminal and tally.alive > 0)


SMALL = [
    Tally(*counts, *flags)
    for counts in product((1, 2), range(3), range(3), range(3), range(2))
    for flags in product((False, True), repeat=3)
]


def test_each_phase_is_that_of_exactly_the_worlds_it_is_promised_for() -> None:
    """Every small world, and not some: most rules hold of few."""
    for tally in SMALL:
        is_gone = tally.alive == 0
        is_failed = tally.is_failing and is_gone
        is_complete = tally.succeeded == tally.wanted >= tally.min and tally.is_gate_open
        is_succeeded = is_complete and is_gone and not tally.is_failing
        is_cancelled = tally.is_cancelling and is_gone and not is_failed and not is_succeeded
        is_left_alone = not tally.is_failing and not tally.is_cancelling
        is_ready = is_left_alone and not is_succeeded and tally.ready >= tally.min
        promised = {
            Phase.FAILED: is_failed,
            Phase.SUCCEEDED: is_succeeded,
            Phase.CANCELLED: is_cancelled,
            Phase.READY: is_ready,
            Phase.PENDING: not (is_failed or is_succeeded or is_cancelled or is_ready),
        }
        verdict = advance(Phase.PENDING, tally)
        assert verdict is not None
        assert [phase for phase, holds in promised.items() if holds] == [verdict.phase], tally
        if verdict.reason in ("WaitingForCapacity", "BelowMinimum"):
            assert tally.is_gate_open == (verdict.reason == "BelowMinimum"), tally


@pytest.mark.parametrize("row", range(len(RULES)))
def test_no_row_is_dead(row: int) -> None:
    def decides(tally: Tally) -> bool:
        return next(i for i, rule in enumerate(RULES) if rule.when(tally)) == row

    find(tallies, decides)
