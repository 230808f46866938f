r"""Only "\n" ends a line, however the bytes come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.core.text import lines_of, split_lines

ODD = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\x1dh\x1ei\rj"


@given(st.text(alphabet=ODD + "\né"), st.integers(1, 7))
def test_chunks_make_the_lines_that_were_written(text: str, size: int) -> None:
    data = text.encode()
    chunks = [data[at : at + size] for at in range(0, len(data), size)]
    assert list(lines_of(chunks)) == split_lines(text)


def test_a_line_with_odd_characters_is_one_line() -> None:
    assert split_lines(f"{ODD}\nx\n") == [ODD, "x"]
    assert split_lines("") == []
    assert split_lines("\n") == [""]
