"""A screen holds what it is given: no line is too long, no colour is left on."""

from __future__ import annotations

from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from atoll.cli.terminal import Cropped, LastLine


def shown(text: str, width: int, height: int, *, is_terminal: bool = False) -> list[str]:
    file = StringIO()
    console = Console(file=file, width=width, height=height, force_terminal=is_terminal)
    console.print(Cropped(text))
    return file.getvalue().removesuffix("\n").split("\n")


def test_colours_take_no_columns_and_are_not_left_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TERM", "xterm"), ("NO_COLOR", ""), ("COLORTERM", "")):
        monkeypatch.setenv(name, value)
    line = "a\x1b[31mred\x1b[0m and more"
    assert shown(line, 3, 5, is_terminal=True) == ["a\x1b[31mre\x1b[0m"]
    assert shown(line, 6, 5, is_terminal=True) == ["a\x1b[31mred\x1b[0m a"]
    assert shown("plain", 5, 5) == ["plain"]
    assert shown("two columns: 界", 14, 5) == ["two columns:  "]


def test_what_does_not_fit_is_counted() -> None:
    lines = shown("\n".join(map(str, range(100))), 80, 10)
    assert len(lines) == 10
    assert lines[-1] == "… 91 more lines"


@given(st.text(alphabet="ab \n", max_size=300), st.integers(1, 40), st.integers(1, 20))
def test_nothing_is_wider_or_higher_than_the_screen(text: str, width: int, height: int) -> None:
    lines = shown(text, width, height)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)


class Tty(StringIO):
    def isatty(self) -> bool:
        return True


def test_the_cursor_is_shown_beside_the_last_line_and_the_line_goes_without_a_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Tty()
    line = LastLine(stream)
    line.show("ready 1/1")
    drawn = stream.getvalue()
    assert drawn.endswith("ready 1/1")
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")
    line.show("ready 1/1")
    assert stream.getvalue() == drawn, "nothing is written for a line that is there"
    line.hide()
    assert stream.getvalue().endswith("\r\x1b[1A\x1b[2K")
    hidden = stream.getvalue()
    line.hide()
    assert stream.getvalue() == hidden
    line.show("ready 1/1")
    assert stream.getvalue().endswith("ready 1/1")
