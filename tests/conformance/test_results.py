"""The page of the fault table is what the runs said."""

from __future__ import annotations

import pytest
from tests.conformance import results
from tests.conformance.table import ROWS


def test_the_page_is_made_from_the_kept_outcomes() -> None:
    table = results.TABLE.search(results.PAGE.read_text())
    assert table is not None
    assert table[0] == results.render(), "run: python -m tests.conformance.results --write"


@pytest.mark.parametrize("backend", results.BACKENDS)
def test_every_row_that_was_run_was_right(backend: str) -> None:
    outcomes = results.read(backend)
    assert [name for name, each in outcomes.items() if each["outcome"] == "failed"] == []
    assert all(each["why"] for each in outcomes.values() if each["outcome"] == "cannot")


@pytest.mark.parametrize("backend", ["local", "slurm"])
def test_every_row_was_run(backend: str) -> None:
    assert list(results.read(backend)) == list(dict.fromkeys(row.name for row in ROWS))
