"""The exception that ended a program is found in its last lines; nothing else is taken for one."""

from __future__ import annotations

import pytest

from atoll.core.ranks import exception_in

HEADER = "Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("tail", "exception"),
    [
        ([HEADER, "  x()", "ValueError: bad shape", ""], "ValueError: bad shape"),
        ([HEADER, "torch.cuda.OutOfMemoryError"], "torch.cuda.OutOfMemoryError"),
        ([HEADER, '  File "a.py", line 1, in <module>', "StopIteration"], "StopIteration"),
        (['  File "a.py", line 3', "    x x", "    ^", "SyntaxError: bad"], "SyntaxError: bad"),
        (
            [HEADER, "  x()", "KeyError: 1", "", "During handling of it:", HEADER, "OSError: 2"],
            "OSError: 2",
        ),
        ([HEADER, "  x()", "KeyError: 1", "then went on"], ""),
        (
            [HEADER, "  x()", "RuntimeError: Error(s) in loading:", '\tMissing key(s): "a".', ""],
            "RuntimeError: Error(s) in loading:",
        ),
        ([HEADER, "  x()"], ""),
        (["ValueError: printed by somebody"], ""),
        ([], ""),
        (
            [f"[rank0]: {HEADER}", "[rank0]:   x()", "[rank0]: ValueError: oops", "beside"],
            "ValueError: oops",
        ),
        (
            [
                f"[rank1]: {HEADER}",
                "[rank1]:   x()",
                "another",
                "[rank1]: RuntimeError: long",
                "[rank1]: message",
            ],
            "RuntimeError: long",
        ),
        (
            [
                "Root Cause (first observed failure):",
                "  traceback : Signal 9 (SIGKILL) received by PID 7",
            ],
            "Signal 9 (SIGKILL) received by PID 7",
        ),
    ],
)
def test_the_exception_that_ended_a_program(tail: list[str], exception: str) -> None:
    assert exception_in(tail) == exception
