"""Sets of ranks as ranges."""

from __future__ import annotations

import random

import pytest

from atoll.core.text import limited_spans, spans


@pytest.mark.parametrize("seed", range(20))
def test_ranges_are_the_ranks_that_were_written(seed: int) -> None:
    dice = random.Random(seed)
    ranks = {rank for rank in range(50) if dice.random() < seed / 20} | {9_999}
    read = []
    for part in spans(ranks).split(", "):
        first, _, last = part.partition("-")
        read += range(int(first), int(last or first) + 1)
    assert read == sorted(ranks)


def test_neighbours_are_one_range() -> None:
    assert spans([195, *range(193)]) == "0-192, 195"
    assert spans([]) == ""


def test_a_sentence_counts_what_it_does_not_name() -> None:
    assert limited_spans(range(0, 9_999, 2), most=3) == "0, 2, 4 and 4997 more"
    assert limited_spans(range(10_000)) == "0-9999"
