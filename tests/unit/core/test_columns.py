"""Rows of a table are folded and come back as they were."""

from __future__ import annotations

import random
from typing import Any

import pytest

from atoll.core.columns import MOST_GROUPS, Column, fold_rows, unfold_rows
from atoll.core.model import decode, encode

VALUES: dict[str, list[Any]] = {
    "code": [0, 1, -9, 2**40],
    "word": ["", "a b", "5*3", "é", "="],
    "flag": [True],
    "name": ["n", "node-1", "node-10", "node-11", "a-1-b", "a-2-b", "-", "*", "{rank}", "a-"],
    "time": [0.0, 1.5, 1e9 / 3, -2.25, 1_800_000_000.001],
}


def there_and_back(
    ranks: list[int], shared: dict[str, list[Any]], own: dict[str, list[Any]]
) -> list[dict[str, Any]]:
    times = frozenset({"time"})
    groups, columns = fold_rows(ranks, shared, own, times)
    stored = decode(encode(columns), dict[str, Column])
    rows = unfold_rows(groups, stored, times)
    assert list(rows) == ranks
    return list(rows.values())


@pytest.mark.parametrize("seed", range(200))
def test_rows_come_back_as_they_were(seed: int) -> None:
    dice = random.Random(seed)
    ranks = [rank for rank in range(12) if dice.random() < 0.7]
    values = {
        field: [None if dice.random() < 0.2 else dice.choice(kinds) for _ in ranks]
        for field, kinds in VALUES.items()
    }
    own = {field: column for field, column in values.items() if dice.random() < 0.6}
    shared = {field: column for field, column in values.items() if field not in own}
    rows = there_and_back(ranks, shared, own)
    for place, row in enumerate(rows):
        assert row == {f: v[place] for f, v in values.items() if v[place] is not None}


def test_equal_rows_are_one_group() -> None:
    groups, columns = fold_rows([0, 1, 2, 5], {"code": [7, 7, 8, 7]}, {})
    assert groups == [("0-1, 5", {"code": 7}), ("2", {"code": 8})]
    assert columns == {}


def test_a_field_that_differs_from_rank_to_rank_becomes_a_column() -> None:
    ranks = list(range(MOST_GROUPS + 1))
    groups, columns = fold_rows(ranks, {"code": ranks, "kind": ["x"] * len(ranks)}, {})
    assert groups == [(f"0-{MOST_GROUPS}", {"kind": "x"})]
    assert columns == {"code": Column(each=f"0 1*{MOST_GROUPS}")}


def test_names_are_a_pattern_and_what_fills_it() -> None:
    ranks = [8, 9, 10, 11]
    pods = [f"big-5f1c-{rank}-{tail}" for rank, tail in zip(ranks, "wxyz", strict=True)]
    nodes = [f"ip-10-0-0-{n}.eu.internal" for n in (1, 11, 12, 3)]
    _, columns = fold_rows(ranks, {}, {"pod": pods, "node": nodes})
    assert columns["pod"] == Column(pattern="big-5f1c-{rank}-*", each="w x y z")
    assert columns["node"] == Column(pattern="ip-10-0-0-*.eu.internal", each="1 11 12 3")


def test_times_are_differences_in_milliseconds() -> None:
    _, columns = fold_rows([0, 1, 2], {}, {"time": [1.5, 1.5, None]}, frozenset({"time"}))
    assert columns == {"time": Column(each="1500 0 -")}


@pytest.mark.parametrize(
    "column",
    [
        Column(each="1"),
        Column(each="1*3"),
        Column(each="1*99999999999"),
        Column(each="x y"),
        Column(values=["a"], each="0 1"),
        Column(values=["a"], each="-1 0"),
    ],
)
def test_a_column_that_does_not_fit_its_ranks_is_refused(column: Column) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        unfold_rows([("0-1", {})], {"field": column})
