"""Text of ranks and of other people, made harmless for a terminal.

An escape sequence can set the title, write the clipboard, move the cursor over other lines, or
make a line that looks like one of atoll's own.
"""

from __future__ import annotations

import re

# Control characters, line separators, and those that turn the direction of what follows.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_RESET = "\x1b[0m"
_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: cursor, erasing, modes, and colours
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|\x9c|$)"  # OSC and its kind: title, clipboard
    r"|\x1b[ -/]*[0-~]"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f]",
    re.DOTALL,
)


def escape_control(text: str) -> str:
    r"""The text on one line, with control characters as Python writes them: `\x1b`, `\n`."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def keep_colours(line: str) -> str:
    """A line with its colours, which end with it, and without other control characters."""
    if not _SEQUENCE.search(line):
        return line
    colours = _SEQUENCE.sub(lambda match: match[0] if _COLOUR.fullmatch(match[0]) else "", line)
    return colours + _RESET if _COLOUR.search(colours) and not colours.endswith(_RESET) else colours
