"""An error in a notebook is what happened and the user's own lines, not sixty frames."""

from __future__ import annotations

from atoll.core.checks import check_name
from atoll.core.errors import AtollError, ValidationError


def raised(name: str) -> ValidationError:
    try:
        check_name("name", name)
    except ValidationError as error:
        return error
    raise AssertionError("it was taken")


def test_frames_of_atoll_are_left_out_and_the_users_line_is_there() -> None:
    error = raised("No Such Name")
    error.add_note("and a note")
    error.hint = "do this"
    lines = error._render_traceback_()
    assert lines[0].startswith("ValidationError: name: 'No Such Name'")
    assert "and a note" in lines
    assert "do this" in lines
    assert any(
        'check_name("name", name)' in line and "test_html_frames.py" in line for line in lines
    )
    assert not any("core/checks.py" in line for line in lines)
    assert len(lines) < 8


def test_what_a_rank_printed_reaches_no_terminal_as_control_characters() -> None:
    lines = AtollError("first\nrank 1 said \x1b]0;title\x07")._render_traceback_()
    assert lines[:2] == ["AtollError: first", r"rank 1 said \x1b]0;title\x07"]
