"""Finds the exception that ended a Python program in the last lines that it printed. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

MESSAGE_CHARS = 500

_RANK_PREFIX = re.compile(r"\[rank\d+\]: ?")  # torch puts it before each line of a traceback
_FRAME = re.compile(r'Traceback \(most recent call last\):|  File ".*", line \d+')
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(:\s.*)?")
# Of torchrun's report on a process that printed nothing when it ended.
_SIGNAL = re.compile(r"\s*traceback : (Signal \d+ \(SIG\w+\) received by PID \d+)")


def exception_in(lines: Sequence[str]) -> str:
    """`ValueError: oops`, if `lines` end with a traceback, or else an empty text.

    A program that printed more after a traceback went on. Torch marks each line of the traceback
    of a process, so what others printed in between does not matter.
    """
    for at in range(len(lines) - 1, -1, -1):
        prefix = _prefix_of(lines[at])
        if not _FRAME.match(lines[at], len(prefix)):
            continue
        after = [line[len(prefix) :] for line in lines[at + 1 :] if line.startswith(prefix)]
        after = [line for line in after if line.strip()]
        end = next((n for n, line in enumerate(after) if not line[0].isspace()), None)
        if end is None or not _EXCEPTION.fullmatch(after[end]):
            break
        if not prefix and end + 1 < len(after):
            break
        return after[end].rstrip()[:MESSAGE_CHARS]
    return _signal_in(lines)


def _prefix_of(line: str) -> str:
    found = _RANK_PREFIX.match(line)
    return found.group() if found else ""


def _signal_in(lines: Sequence[str]) -> str:
    found = (_SIGNAL.fullmatch(line.rstrip()) for line in reversed(lines))
    return next((match.group(1) for match in found if match), "")
