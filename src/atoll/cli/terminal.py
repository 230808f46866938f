"""Terminals: colour where it is wanted, and a last line that stays in place."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from io import TextIOWrapper
from typing import NoReturn, TextIO

RED, GREEN, YELLOW, DIM = 31, 32, 33, 2
RANK_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
PHASE_COLOURS = {"ready": GREEN, "succeeded": GREEN, "failed": RED, "cancelled": YELLOW}
_ERASE = "\r\x1b[2K"


def prepare() -> None:
    """Makes stdout and stderr usable, even if closed or in an encoding with few characters."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # else the next file or socket gets the number of a closed stream
    os.close(number)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    warnings.showwarning = _show_warning


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Prints a warning as one line on a terminal; elsewhere only what endangers a token."""
    if sys.stderr.isatty() or type(message).__name__ == "PlainToken":
        print(f"atoll: {message}", file=sys.stderr, flush=True)


class Unread:
    """A stream that drops output when it cannot be written to, instead of raising."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_open = True

    def write(self, text: str) -> None:
        self._try(lambda: self._stream.write(text))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def isatty(self) -> bool:
        return self._stream.isatty()

    def _try(self, act: Callable[[], object]) -> None:
        try:
            if self._is_open:
                act()
        except OSError as error:
            self._is_open = False
            why = "nobody reads the output any more"
            if not isinstance(error, BrokenPipeError):
                why = f"the output cannot be written: {error.strerror}"
            print(f"atoll: {why}; still following, Ctrl-C cancels", file=sys.stderr, flush=True)


def go_on_unread() -> None:
    """Keeps following when nobody reads the output, as after q in `atoll run … | less`."""
    sys.stdout, sys.stderr = Unread(sys.stdout), Unread(sys.stderr)


def leave(code: int) -> NoReturn:
    """Ends the process with nothing left to write. To tidy up its memory would take 10 ms."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wants_colour(stream: TextIO) -> bool:
    """Whether to use colour: NO_COLOR (https://no-color.org), FORCE_COLOR, else on a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return can_redraw(stream)


def can_redraw(stream: TextIO) -> bool:
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class Painted(str):
    """Text of atoll's own with its colour: a table shows it as it is."""


def paint(text: str, colour: int, is_on: bool) -> Painted:
    return Painted(f"\x1b[{colour}m{text}\x1b[0m" if is_on else text)


def last_look(text: str) -> str:
    """A line as a terminal leaves it: progress bars overwrite themselves with carriage returns."""
    return text.rstrip("\r").rpartition("\r")[2]


class LastLine:
    """A line kept at the bottom of a terminal, below everything else that is written to it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_on = can_redraw(stream)
        self._text = ""
        self._is_shown = False

    def show(self, text: str) -> None:
        """Draws the line if it changed, so it may be called often."""
        if not self._is_on or (self._is_shown and text == self._text):
            return
        from shutil import get_terminal_size

        width = get_terminal_size().columns - 1
        self._stream.write(_ERASE + text[:width])
        self._stream.flush()
        self._text, self._is_shown = text, True

    def hide(self) -> None:
        if self._is_shown:
            self._stream.write(_ERASE)
            self._stream.flush()
            self._is_shown = False
