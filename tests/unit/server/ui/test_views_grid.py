"""The grid of rounds: a letter a cell, the worst where there are many, and the open round."""

from __future__ import annotations

from typing import Any

from atoll.core.rounds import OpenRound, RoundFacts, StoredRound, items_of, summary_of
from atoll.server.ui.views import MAX_ROWS, grid_of


def kept(number: int, members: list[int], **more: Any) -> StoredRound:
    weights = [1.0] * len(members)
    facts = RoundFacts(run="r", round=number, members=members, weights=weights, **more)
    return StoredRound(observed=facts)


def test_each_cell_has_the_letter_of_its_rank_in_its_round() -> None:
    rounds = [kept(0, [0, 1, 2]), kept(1, [0, 1], missing=[2]), kept(2, [0, 1, 3], bad=[1])]
    waiting = [OpenRound(fragment=0, round=3, uploaded=[3])]
    summary = summary_of("r", [rounds[-1]], 0.0, 1.0, waiting)
    grid = grid_of(items_of(rounds), summary, "why", 400)
    assert grid.rows == ["0", "1", "2", "3"]
    assert grid.cells == ["iiiw", "iinw", "im..", "..ju"]
    assert [column.members for column in grid.columns] == [3, 2, 3, 1]
    assert grid.columns[-1].is_open
    assert grid.columns[1].share == 2 / 3


def test_many_rounds_and_ranks_become_bins_that_show_the_worst() -> None:
    everyone = list(range(1000))
    rounds = [kept(n, everyone) for n in range(1000)]
    rounds[500] = kept(500, [r for r in everyone if r != 777], missing=[777])
    grid = grid_of(items_of(rounds), None, "", 100)
    assert len(grid.columns) == 100
    assert len(grid.rows) <= MAX_ROWS
    bad = [
        (row, at) for row, text in enumerate(grid.cells) for at, x in enumerate(text) if x == "m"
    ]
    assert len(bad) == 1
    row, at = bad[0]
    first, last = grid.columns[at].first, grid.columns[at].last
    assert first <= 500 <= last
    low, _, high = grid.rows[row].partition("-")
    assert int(low) <= 777 <= int(high)
    assert grid.columns[at].share < 1


def test_without_rounds_there_is_nothing_to_draw() -> None:
    grid = grid_of([], None, "why", 400)
    assert (grid.rows, grid.columns, grid.cells) == ([], [], [])
