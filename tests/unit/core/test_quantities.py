"""Durations in, durations out."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.core.errors import ValidationError
from atoll.core.quantities import format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(90, 90), ("90", 90), ("30s", 30), ("5m", 300), ("2h", 7200), ("1h30m", 5400), ("1.5m", 90),
     ("250ms", 0.25), ("7d", 604_800), ("1e3", 1000), (" 5m ", 300), (0, 0), (".5s", 0.5)],
)  # fmt: skip
def test_durations_that_people_write(text: Any, seconds: float) -> None:
    assert parse_duration("deadline", text) == seconds


@pytest.mark.parametrize(
    "text", ["", "m", "5 m", "5min", "-1", "-5m", "5mx", "nan", True, None, []]
)
def test_anything_else_is_refused_with_examples(text: Any) -> None:
    with pytest.raises(ValidationError, match="deadline: .* expected 30s, 5m, 2h"):
        parse_duration("deadline", text)


def test_a_duration_is_printed_in_its_two_largest_units() -> None:
    seconds = [0.4, 12, 185, 7800, 273_600]
    assert [*map(format_duration, seconds)] == ["0.4s", "12s", "3m05s", "2h10m", "3d04h"]
