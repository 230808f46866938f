"""Sets of ranks as ranges and back."""

from __future__ import annotations

import random

import pytest

from atoll.core.spans import in_spans, some_spans, spans


@pytest.mark.parametrize("seed", range(20))
def test_ranges_are_the_ranks_that_were_written(seed: int) -> None:
    dice = random.Random(seed)
    ranks = {rank for rank in range(50) if dice.random() < seed / 20} | {9_999}
    assert in_spans(spans(ranks)) == sorted(ranks)


def test_neighbours_are_one_range() -> None:
    assert spans([195, *range(193)]) == "0-192, 195"
    assert spans([]) == ""


def test_a_sentence_counts_what_it_does_not_name() -> None:
    assert some_spans(range(0, 9_999, 2), most=3) == "0, 2, 4 and 4997 more"
    assert some_spans(range(10_000)) == "0-9999"


@pytest.mark.parametrize("text", ["5-3", "1, 1", "0-99999999999", "x", "-3", "3-", "1,2", ", "])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        in_spans(text)
