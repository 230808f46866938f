"""Pauses between tries."""

from __future__ import annotations

import pytest

from atoll.core.clock import Retry, grown_s


def test_pauses_grow_to_their_bound_and_begin_again_after_a_success() -> None:
    retry = Retry(0.1, 0.5)
    assert [retry.pause_s() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    retry.has_worked()
    assert retry.pause_s() == 0.1


def test_the_growth_can_be_chosen() -> None:
    retry = Retry(1.0, 10.0, growth=3.0)
    assert [retry.pause_s() for _ in range(4)] == [1.0, 3.0, 9.0, 10.0]


def test_a_pause_is_as_long_as_the_other_side_asks_for() -> None:
    retry = Retry(0.1, 0.5)
    assert retry.pause_s(retry_after_s=7.0) == 7.0
    assert retry.pause_s(retry_after_s=0.01) == 0.2


def test_jitter_shortens_a_pause_but_not_what_was_asked_for() -> None:
    retry = Retry(1.0, 8.0, jitter=iter([0.5, 0.75, 0.5]).__next__)
    assert [retry.pause_s(), retry.pause_s(), retry.pause_s(3.0)] == [0.5, 1.5, 3.0]


def test_the_last_pause_ends_at_the_deadline() -> None:
    now = 100.0
    retry = Retry(1.0, 8.0, patience_s=2.5, clock=lambda: now)
    pauses = []
    while (pause := retry.pause_s()) is not None:
        pauses.append(pause)
        now += pause
    assert pauses == [1.0, 1.5]
    assert retry.pause_s(retry_after_s=1.0) is None


def test_no_patience_is_no_pause() -> None:
    assert Retry(1.0, 8.0, patience_s=0.0, clock=lambda: 5.0).pause_s() is None


@pytest.mark.parametrize("growth", [1.5, 2.0])
def test_any_number_of_failures_has_a_pause(growth: float) -> None:
    assert grown_s(0.05, 30.0, 10**6, growth) == 30.0
