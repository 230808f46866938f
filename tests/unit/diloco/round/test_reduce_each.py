"""Work on a pool is over when the call is."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from atoll.diloco.round.reduce import each


@pytest.mark.parametrize("lanes", [None, 1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_results_are_in_the_order_of_the_items(lanes: int | None, count: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        squares = each(pool, lambda number: number**2, range(count), lanes)
    assert squares == [number**2 for number in range(count)]


@pytest.mark.parametrize("lanes", [None, 2, 3])
def test_when_one_fails_nobody_is_at_work_any_more(lanes: int | None) -> None:
    began, is_over, ended = threading.Event(), threading.Event(), list[int]()

    def work(number: int) -> None:
        if number == 0:
            assert began.wait(60)
            threading.Timer(0.05, is_over.set).start()
            raise ValueError("zero")
        began.set()
        assert is_over.wait(60)
        ended.append(number)

    with ThreadPoolExecutor(2) as pool:
        with pytest.raises(ValueError, match="zero"):
            each(pool, work, [0, 1], lanes)
        assert ended == [1]
