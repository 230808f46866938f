from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.text import escape_control, keep_colours

RED = "\x1b[31mred\x1b[0m"


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("plain\ttext", "plain\ttext"),
        (RED, RED),
        ("\x1b[1;38:5:9mopen", "\x1b[1;38:5:9mopen\x1b[0m"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]52;c;c2VjcmV0\x1b\\after", "after"),
        ("\x1b]0;never ended", ""),
        ("\x1b[2J\x1b[H\x1b[1Agone", "gone"),
        ("\x1b[?1049hscreen", "screen"),
        ("\x1bcreset\x1b(0", "reset"),
        ("\x9b31mone byte", "31mone byte"),
        ("a\x08\x08b\x07", "ab"),
        ("\x1b\x07[2J", "[2J"),
        ("\x1b[>0;1mnot a colour", "not a colour"),
    ],
)
def test_a_terminal_gets_colours_only(line: str, shown: str) -> None:
    assert keep_colours(line) == shown


@given(st.text(alphabet="\x1b[]0;1m\x07\\PX^_cAJ\x9b\x9ca\n\r\t"))
def test_nothing_but_colours_is_left_of_any_line(line: str) -> None:
    rest = re.sub(r"\x1b\[[0-9;:]*m", "", keep_colours(line))
    assert not re.search("[\x00-\x08\x0a-\x1f\x7f-\x9f]", rest)


def test_a_message_shows_control_characters_as_text() -> None:
    assert escape_control("a\x1b[31mb\nc\u202ed\u2028é") == "a\\x1b[31mb\\nc\\u202ed\\u2028é"
