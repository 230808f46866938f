"""The figures of `top`: short, and honest about what is not known."""

from __future__ import annotations

import pytest

from atoll.cli.top import PLAIN_BARS, cores, size, spark


def test_figures_are_short_and_what_is_unknown_is_no_zero() -> None:
    assert (cores(None), cores(0.853), cores(7.5)) == ("-", "85%", "750%")
    assert size(None) == "-"
    assert (size(512), size(852_000_000), size(21_000_000_000)) == ("512B", "813M", "19.6G")
    assert (cores(float("nan")), size(float("inf"))) == ("-", "-")


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ([], ""),
        (["nan"], ""),
        ([1.0], "▁"),
        ([3.0, 2.0, 1.0], "█▅▁"),
        ([1.0, "nan", 2.0], "▁ █"),
        ([5, 5, 5], "▁▁▁"),
        ([-1e308, 1e308], "▁▁"),
    ],
)
def test_a_curve_of_one_line(values: list[float | str], wanted: str) -> None:
    assert spark(values) == wanted


def test_a_long_curve_keeps_its_ends_and_plain_terminals_get_plain_bars() -> None:
    drawn = spark([float(n) for n in range(24)], PLAIN_BARS)
    assert len(drawn) == 12
    assert (drawn[0], drawn[-1]) == (PLAIN_BARS[0], PLAIN_BARS[-1])
