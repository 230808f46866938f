"""Durations, quantities and sizes, in and out."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.core.errors import ValidationError
from atoll.core.text import (
    check_quantity,
    format_bytes,
    format_duration,
    parse_duration,
    parse_quantity,
)


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


@pytest.mark.parametrize(
    ("text", "value"),
    [("2", 2), ("500m", 0.5), ("1.5Gi", 1.5 * 2**30), ("3G", 3e9), ("4Ki", 4096), ("2k", 2000),
     ("1048576Ki", 2**30), ("1Ei", 2**60)],
)  # fmt: skip
def test_quantities_are_those_of_kubernetes(text: str, value: float) -> None:
    check_quantity("memory", text)
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "4ki", "4K", "4gi", "-1", "1e3 ", "Gi", "4GiB", "mi", 4])
def test_what_kubernetes_would_refuse_is_refused(text: Any) -> None:
    with pytest.raises(ValidationError, match="memory: .* expected a quantity such as"):
        check_quantity("memory", text)


def test_a_size_is_printed_in_its_largest_unit() -> None:
    sizes = [0, 1023, 1536, 812 * 2**20, 19.6 * 2**30]
    assert [format_bytes(size) for size in sizes] == [
        "0 B", "1023 B", "1.5 KiB", "812 MiB", "19.6 GiB",
    ]  # fmt: skip
