"""A screen holds what it is given: no line is too long, no colour is left on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.cli.terminal import cut, fit


def test_colours_take_no_columns_and_are_not_left_on() -> None:
    line = "a\x1b[31mred\x1b[0m and more"
    assert cut(line, 3) == "a\x1b[31mre\x1b[0m"
    assert cut(line, 6) == "a\x1b[31mred\x1b[0m a"
    assert cut("plain", 5) == "plain"


def test_what_does_not_fit_is_counted() -> None:
    text = "\n".join(map(str, range(100)))
    shown = fit(text, (80, 10)).split("\n")
    assert len(shown) == 9
    assert shown[-1] == "… 92 more lines"


@given(st.text(alphabet="ab\n", max_size=300), st.integers(1, 40), st.integers(1, 20))
def test_nothing_is_wider_or_higher_than_the_screen(text: str, width: int, height: int) -> None:
    lines = fit(text, (width, height)).split("\n")
    assert len(lines) <= max(2, height)
    assert all(len(line) <= width for line in lines)
