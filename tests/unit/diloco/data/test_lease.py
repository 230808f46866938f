"""What a replica claims, keeps and throws away."""

from __future__ import annotations

from atoll.diloco.data import ranges
from atoll.diloco.data.lease import DataLease
from atoll.diloco.data.ledger import Claim, begin, commit, make_terms

R = ranges.of


def lease(fragments: int = 1) -> DataLease:
    return DataLease(begin(make_terms(100, period=1, world=2, fragments=fragments)), 0, fragments)


def test_what_was_trained_on_is_claimed_and_not_trained_on_again() -> None:
    one = lease()
    one.train(R(range(4)), 1)
    assert one.claim(0) == R(range(4))
    assert one.free == R(range(4, 25))
    one.ledger = commit(one.ledger, [Claim(0, one.claim(0), 30)], 2)
    one.was_member(0, R(range(4)))
    one.empty(0, 1)
    assert one.fresh == ()
    assert ranges.common(one.hold, R(range(4))) == ()
    assert one.in_vain == 0


def test_late_work_that_is_carried_is_claimed_with_the_next_round() -> None:
    one = lease()
    one.train(R(range(4)), 1)
    one.ledger = commit(one.ledger, [Claim(1, R([25]), 10)], 2)
    one.was_late(0, R(range(4)))
    one.empty(0, 1)
    one.train(R([4]), 2)
    assert one.claim(0) == R(range(5))


def test_late_work_of_one_fragment_stays_in_the_claims_of_all() -> None:
    one = lease(fragments=2)
    one.train(R(range(4)), 1)
    one.was_late(0, R(range(4)))
    one.empty(0, 1)
    assert one.claim(0) == one.claim(1) == R(range(4))
    one.was_member(1, R(range(4)))
    one.empty(1, 1)
    assert one.fresh == ()
    assert one.in_vain == 0


def test_what_overlaps_a_round_and_is_overwritten_is_trained_on_again() -> None:
    one = lease()
    one.train(R(range(4)), 1)
    claim = one.claim(0)
    one.train(R([4]), 2)  # while the round is on its way
    one.was_member(0, claim)
    one.empty(0, 2)
    assert one.fresh == ()
    assert one.in_vain == 1
    assert ranges.is_inside(R([4]), one.free)


def test_data_that_is_not_finite_twice_is_claimed() -> None:
    one = lease()
    for times in range(2):
        one.train(R(range(4)), times)
        assert one.claim(0, is_finite=False) == (R(range(4)) if times else ())
        if not times:
            one.discard(times)
    assert one.dropped == 4


def test_what_another_process_of_the_rank_brought_is_not_brought_again() -> None:
    one = lease()
    one.train(R(range(4)), 1)
    one.ledger = commit(one.ledger, [Claim(0, R(range(6)), 30)], 2)
    assert not one.is_honest
    one.discard(1)
    assert one.is_honest
    assert one.claim(0) == ()
    assert one.in_vain == 4
