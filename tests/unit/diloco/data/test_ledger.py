"""The ledger against plain sets, and rule by rule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import ValidationError
from atoll.diloco.data import ledger as ledgers
from atoll.diloco.data import ranges
from atoll.diloco.data.ledger import Claim, InvalidClaim, Ledger, begin, commit, make_terms
from atoll.diloco.data.sampler import refuse_other_data

R = ranges.of


def terms(length: int | None = 100, *, world: int = 2, fragments: int = 1, period: int = 1):
    return make_terms(length, period=period, world=world, fragments=fragments)


def parts(ledger: Ledger) -> tuple[set[int], dict[int, set[int]]]:
    holds = {rank: set(ranges.positions(h.ranges)) for rank, h in ledger.holds.items()}
    return set(ranges.positions(ledger.back)), holds


class Model:
    """The same, with sets: what is used, what is back, who holds what."""

    def __init__(self, ledger: Ledger) -> None:
        self.used: set[int] = set()
        self.ledger = ledger

    def check(self) -> None:
        back, holds = parts(self.ledger)
        pieces = [self.used, back, *holds.values()]
        complete: set[int] = set().union(*pieces)
        assert sum(map(len, pieces)) == len(complete), "a position is in two places"
        assert complete == set(range(self.ledger.next)), "a position is nowhere"
        assert self.ledger.used == len(self.used)
        if self.ledger.total is not None:
            assert self.ledger.next <= self.ledger.total
        assert ledgers.unpack(ledgers.pack(self.ledger)) == self.ledger


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_nothing_is_lost_or_in_two_places_whatever_the_rounds_are(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 5))
    length = data.draw(st.none() | st.integers(1, 150))
    end = data.draw(st.integers(0, 150))
    model = Model(begin(terms(length, world=world, fragments=data.draw(st.integers(1, 3)))))
    model.check()
    for _ in range(data.draw(st.integers(1, 12))):
        world = data.draw(st.integers(max(1, world - 1), world + 1))
        claims = []
        for rank in sorted(data.draw(st.sets(st.integers(0, world - 1), min_size=1))):
            hold = ranges.positions(model.ledger.hold_of(rank))
            if length is None:
                hold = [at for at in hold if at < end]
            took = data.draw(st.sets(st.sampled_from(hold))) if hold else set()
            meets = length is None and data.draw(st.booleans())
            met = None
            if meets and end <= model.ledger.next:
                met = end
            claims.append(Claim(rank, R(took), data.draw(st.integers(0, 40)), met))
        model.ledger = commit(model.ledger, claims, world)
        for claim in claims:
            took = set(ranges.positions(claim.took))
            assert not took & model.used
            model.used |= took
        model.check()
        for claim in claims:
            if not claim.want:
                assert (
                    not model.ledger.hold_of(claim.rank)
                    or model.ledger.holds[claim.rank].firm is False
                )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_end_comes_whoever_is_there(data: st.DataObject) -> None:
    """Members train all they hold. Others come and go; nobody's data is lost with them."""
    world = data.draw(st.integers(1, 4))
    ledger = begin(terms(data.draw(st.integers(1, 200)), world=world))
    used: set[int] = set()
    for _ in range(300):
        if ledger.is_used_up:
            break
        ranks = sorted(data.draw(st.sets(st.integers(0, world - 1), min_size=1)))
        claims = [Claim(rank, ledger.hold_of(rank), 16) for rank in ranks]
        for claim in claims:
            used |= set(ranges.positions(claim.took))
        ledger = commit(ledger, claims, world)
    assert used == set(range(ledger.total or 0))
    assert ledger.is_used_up


def test_each_rank_has_a_lease_before_the_first_round() -> None:
    ledger = begin(terms(100, world=2))
    assert {rank: h.ranges for rank, h in ledger.holds.items()} == {0: ((0, 25),), 1: ((25, 50),)}


def test_what_was_not_held_cannot_be_taken() -> None:
    ledger = begin(terms())
    with pytest.raises(
        InvalidClaim, match=r"ranks \[0\] took data that they did not hold"
    ) as raised:
        commit(ledger, [Claim(0, R([30]), 5)], 2)
    assert raised.value.ranks == [0]
    after = commit(ledger, [Claim(0, R([3]), 5)], 2)
    with pytest.raises(InvalidClaim):
        commit(after, [Claim(0, R([3]), 5)], 2)


def test_ranks_are_in_the_world_and_once_in_a_round() -> None:
    ledger = begin(terms())
    with pytest.raises(InvalidClaim, match="not in a world of 2"):
        commit(ledger, [Claim(2, (), 5)], 2)
    with pytest.raises(InvalidClaim, match="twice"):
        commit(ledger, [Claim(1, R([25]), 5), Claim(1, R([26]), 5)], 2)


def test_a_rank_that_leaves_gives_back_in_that_very_round() -> None:
    ledger = commit(begin(terms()), [Claim(0, R(range(10)), 0), Claim(1, (), 30)], 2)
    assert ranges.common(ledger.hold_of(1), R(range(10, 25))) == R(range(10, 15))
    assert ledger.hold_of(0) == () or not ledger.holds[0].firm


def test_a_dead_rank_is_waited_for_and_then_gives_back() -> None:
    ledger = begin(terms(1000, world=2, fragments=2))
    ledger = commit(ledger, [Claim(0, R([0]), 5), Claim(1, R([250]), 5)], 2)
    dead = ledger.hold_of(1)
    for k in range(1, ledger.terms.patience + 1):
        ledger = commit(ledger, [Claim(0, R([k]), 5)], 2)
        assert ledger.hold_of(1) == dead
    ledger = commit(ledger, [Claim(0, R([40]), 5)], 2)
    assert ranges.common(ledger.hold_of(1), dead) != dead


def test_a_lease_that_nobody_came_for_comes_back_later() -> None:
    ledger = begin(terms(10_000, world=2))
    waiting = ledger.hold_of(1)
    for k in range(ledger.terms.shelf):
        ledger = commit(ledger, [Claim(0, R([k]), 5)], 2)
        assert ledger.hold_of(1) == waiting
    ledger = commit(ledger, [Claim(0, R([100]), 5)], 2)
    assert ledger.hold_of(1) != waiting


def test_a_round_in_which_nobody_took_anything_brings_back_what_the_absent_held() -> None:
    ledger = begin(terms(40, world=2))
    ledger = commit(ledger, [Claim(0, ledger.hold_of(0), 30), Claim(1, R([10]), 30)], 2)
    while ledger.hold_of(0):
        ledger = commit(ledger, [Claim(0, ledger.hold_of(0), 30)], 2)
    assert ledger.holds[1].firm
    stored = ledger.hold_of(1)
    assert stored
    ledger = commit(ledger, [Claim(0, (), 30)], 2)
    assert ledger.hold_of(0) == stored
    assert ledger.idle == 1


def test_a_smaller_world_gives_back_and_a_larger_one_gets_leases() -> None:
    ledger = begin(terms(10_000, world=3))
    small = commit(ledger, [Claim(0, R([0]), 5)], 1)
    assert set(small.holds) == {0}
    large = commit(small, [Claim(0, R([1]), 5)], 4)
    assert set(large.holds) == {0, 1, 2, 3}
    assert not large.holds[3].firm


def test_the_last_leases_are_shared_so_that_they_end_together() -> None:
    ledger = begin(terms(1000, world=2))
    claims = [Claim(r, ledger.hold_of(r), 400) for r in (0, 1)]
    ledger = commit(ledger, claims, 2)
    sizes = [ranges.size(ledger.hold_of(rank)) for rank in (0, 1)]
    assert sizes == [250, 250]
    assert ledgers.shared({0: 100, 1: 50}, {0: 0, 1: 0}, 30) == {0: 20, 1: 10}
    assert ledgers.shared({0: 100, 1: 100}, {0: 40, 1: 0}, 20) == {0: 0, 1: 20}


def test_data_that_ended_is_cut_everywhere() -> None:
    ledger = begin(terms(None, world=2))
    assert ledger.total is None
    after = commit(ledger, [Claim(0, R(range(10)), 5, end=10), Claim(1, (), 5)], 2)
    assert after.is_used_up
    assert after.next == 10


def test_two_ranks_that_disagree_on_the_end_are_both_named() -> None:
    ledger = begin(terms(None, world=2))
    with pytest.raises(InvalidClaim, match=r"rank 0 says .* ends at 10, but rank 1 .* position 64"):
        commit(ledger, [Claim(0, R(range(10)), 5, end=10), Claim(1, R([64]), 5)], 2)


def test_a_ledger_that_was_stored_goes_on_with_the_same_bytes() -> None:
    one = begin(terms())
    two = commit(one, [Claim(0, R([0]), 5)], 2)
    again = commit(ledgers.unpack(ledgers.pack(one)), [Claim(0, R([0]), 5)], 2)
    assert ledgers.pack(two) == ledgers.pack(again) != ledgers.pack(one)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"length": 101}, "data.length: 100 .* has 101"),
        ({"seed": 5}, "data.seed: 0 .* has 5"),
        ({"shuffle": False}, "data.shuffle: True .* has False"),
        ({"epochs": 2}, "data.epochs: 1 .* has 2"),
        ({"fingerprint": "b"}, "data.fingerprint: '' .* has 'b'"),
    ],
)
def test_the_first_difference_between_terms_is_named(change: dict, expected: str) -> None:
    ours = make_terms(100, period=10, world=2, fragments=1)
    theirs = make_terms(**{"length": 100, "period": 10, "world": 2, "fragments": 1, **change})
    refuse_other_data(ours, ours)
    with pytest.raises(ValidationError, match=expected):
        refuse_other_data(ours, theirs)


def test_a_ledger_of_a_long_run_stays_small() -> None:
    """10,000 rounds with ranks that come and go."""
    import random

    random.seed(3)
    ledger = begin(make_terms(10**9, period=100, world=8, fragments=1))
    for _ in range(1500):
        claims = []
        for rank in range(8):
            if random.random() < 0.02:
                continue
            took = ranges.take(ledger.hold_of(rank), random.choice([3200, 3200, 1600]))[0]
            claims.append(Claim(rank, took, 3200))
        ledger = commit(ledger, claims, 8)
    assert len(ledgers.pack(ledger)) < 3000
