"""What a replica claims, keeps and throws away."""

from __future__ import annotations

from atoll.diloco.data import ranges
from atoll.diloco.data.book import Book
from atoll.diloco.data.ledger import Claim, begin, make_terms

R = ranges.of


def book(fragments: int = 1) -> Book:
    return Book(begin(make_terms(100, period=1, world=2, fragments=fragments)), 0, fragments)


def test_what_was_trained_on_is_claimed_and_not_trained_on_again() -> None:
    one = book()
    one.train(R(range(4)), 1)
    assert one.claim(0) == R(range(4))
    assert one.free == R(range(4, 25))
    one.commit([Claim(0, one.claim(0), 30)], 2)
    one.was_member(0, R(range(4)))
    one.empty(0, 1)
    assert one.fresh == ()
    assert ranges.common(one.hold, R(range(4))) == ()
    assert one.in_vain == 0


def test_work_of_a_round_that_went_on_without_it_is_done_again() -> None:
    one = book()
    one.train(R(range(4)), 1)
    one.commit([Claim(1, R([25]), 10)], 2)
    one.was_left_out(0, R(range(4)), is_carried=False)
    one.empty(0, 1)
    assert one.fresh == ()
    assert one.in_vain == 4
    assert ranges.is_inside(R(range(4)), one.free)


def test_late_work_that_is_carried_is_claimed_with_the_next_round() -> None:
    one = book()
    one.train(R(range(4)), 1)
    one.commit([Claim(1, R([25]), 10)], 2)
    one.was_left_out(0, R(range(4)), is_carried=True)
    one.empty(0, 1)
    one.train(R([4]), 2)
    assert one.claim(0) == R(range(5))


def test_other_fragments_still_bring_what_one_was_left_out_with() -> None:
    one = book(fragments=2)
    one.train(R(range(4)), 1)
    one.commit([Claim(1, R([25]), 10)], 2)
    one.was_left_out(0, R(range(4)), is_carried=False)
    one.empty(0, 1)
    assert one.claim(1) == R(range(4))
    assert one.claim(0) == ()
    one.commit([Claim(1, R([26]), 10)], 2)
    one.was_left_out(1, R(range(4)), is_carried=False)
    one.empty(1, 1)
    assert one.fresh == ()


def test_what_another_process_of_the_rank_brought_is_not_brought_again() -> None:
    one = book()
    one.train(R(range(4)), 1)
    one.commit([Claim(0, R(range(6)), 30)], 2)
    assert not one.is_honest
    one.discard(1)
    assert one.is_honest
    assert one.claim(0) == ()
    assert one.in_vain == 4


def test_saved_late_work_is_brought_only_if_all_of_it_is_still_held() -> None:
    one = book()
    assert one.restore(0, R(range(3)), 7)
    assert one.claim(0) == R(range(3))
    one.train(R([3]), 8)
    assert one.claim(0) == R(range(4))
    assert not book().restore(0, R([24, 25]), 7)
