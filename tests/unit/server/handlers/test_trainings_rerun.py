from __future__ import annotations

from itertools import islice

import pytest

from atoll.core.checks import check_name
from atoll.server.handlers.trainings import names_after


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("a", ["a-r2", "a-r3"]),
        ("a-r2", ["a-r3", "a-r4"]),
        ("a-r9", ["a-r10", "a-r11"]),
        ("gpt-3", ["gpt-3-r2", "gpt-3-r3"]),
        ("x" * 63, ["x" * 60 + "-r2", "x" * 60 + "-r3"]),
        ("x" * 59 + "-yyy", ["x" * 59 + "-r2", "x" * 59 + "-r3"]),
    ],
)
def test_names_of_runs_after_the_first(name: str, names: list[str]) -> None:
    made = list(islice(names_after(name), 2))
    assert made == names
    for each in made:
        check_name("name", each)
