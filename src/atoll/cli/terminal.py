"""Terminals: colour, a status line at the bottom, and a full screen that is redrawn."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from io import TextIOWrapper
from types import TracebackType
from typing import Any, NoReturn, TextIO

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


class TolerantStream:
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


def ignore_closed_output() -> None:
    """Keeps following when nobody reads the output, as after q in `atoll run … | less`."""
    sys.stdout, sys.stderr = TolerantStream(sys.stdout), TolerantStream(sys.stderr)


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


class Coloured(str):
    """Text of atoll's own with its colour: a table shows it as it is."""


def paint(text: str, colour: int, is_on: bool) -> Coloured:
    return Coloured(f"\x1b[{colour}m{text}\x1b[0m" if is_on else text)


def after_carriage_return(text: str) -> str:
    """A line as a terminal leaves it: progress bars overwrite themselves with carriage returns."""
    return text.rstrip("\r").rpartition("\r")[2]


class LastLine:
    """A status line at the bottom of a terminal, below everything else that is written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_on = can_redraw(stream)
        self._text = ""
        self._is_drawn = False

    def show(self, text: str) -> None:
        """Draws the line if it changed, so it may be called often."""
        if not self._is_on or (self._is_drawn and text == self._text):
            return
        from shutil import get_terminal_size

        width = get_terminal_size().columns - 1
        self._stream.write(_ERASE + text[:width])
        self._stream.flush()
        self._text, self._is_drawn = text, True

    def hide(self) -> None:
        if self._is_drawn:
            self._stream.write(_ERASE)
            self._stream.flush()
            self._is_drawn = False


ENTER = "\x1b[?1049h\x1b[?25l"  # the other screen, without a cursor
LEAVE = "\x1b[?25h\x1b[?1049l"
HOME, ERASE_LINE, ERASE_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
QUIT = frozenset("qQ\x1b")


class Screen:
    """Used with `with`. Keys are read as they are pressed, where there is a keyboard."""

    def __init__(self) -> None:
        self._keyboard: int | None = None
        self._before: Any = None
        self._resized, self._resize = os.pipe()
        self._old: Any = None

    def __enter__(self) -> Screen:
        import termios
        import tty

        os.set_blocking(self._resize, False)
        self._old = signal.signal(signal.SIGWINCH, self._on_resize)
        with contextlib.suppress(OSError, ValueError, termios.error):
            fd = sys.stdin.fileno()
            # Reading keys in the background would stop the process.
            if os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp():
                self._before = termios.tcgetattr(fd)
                tty.setcbreak(fd)
                self._keyboard = fd
        sys.stdout.write(ENTER)
        sys.stdout.flush()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        import termios

        with contextlib.suppress(OSError):
            sys.stdout.write(LEAVE)
            sys.stdout.flush()
        if self._keyboard is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._keyboard, termios.TCSADRAIN, self._before)
        signal.signal(signal.SIGWINCH, self._old)
        for fd in (self._resized, self._resize):
            os.close(fd)

    def _on_resize(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            os.write(self._resize, b"r")

    def size(self) -> tuple[int, int]:
        """Columns and lines, as they are now."""
        with contextlib.suppress(OSError, ValueError):
            columns, lines = os.get_terminal_size(sys.stdout.fileno())
            if columns > 0 and lines > 0:
                return columns, lines
        from shutil import get_terminal_size

        columns, lines = get_terminal_size()
        return columns, lines

    def draw(self, text: str) -> None:
        """Over what was there, line by line: erasing it all first would flicker."""
        lines = text.split("\n")
        sys.stdout.write(HOME + f"{ERASE_LINE}\n".join(lines) + ERASE_LINE + ERASE_BELOW)
        sys.stdout.flush()

    def wait(self, seconds: float, again: Callable[[], str]) -> bool:
        """Whether a key to quit was pressed meanwhile. A resized screen is drawn `again`."""
        ends_at = time.monotonic() + seconds
        while (left := ends_at - time.monotonic()) > 0:
            watched = [self._resized, *([] if self._keyboard is None else [self._keyboard])]
            ready = select.select(watched, [], [], left)[0]
            if self._keyboard in ready and self._keyboard is not None:
                keys = os.read(self._keyboard, 64).decode(errors="replace")
                if not keys:  # the keyboard was closed
                    return True
                # Arrows and the like begin with an escape too.
                if keys[0] in QUIT and (keys[0] != "\x1b" or len(keys) == 1):
                    return True
            if self._resized in ready:
                os.read(self._resized, 1024)
                self.draw(again())
        return False


def fit(text: str, size: tuple[int, int]) -> str:
    """As much of the text as the screen holds, so that the next drawing starts at the top."""
    width, height = size
    lines = text.split("\n")
    if len(lines) >= height:
        height_left = max(1, height - 2)
        lines = [*lines[:height_left], f"… {len(lines) - height_left} more lines"]
    return "\n".join(cut(line, width) for line in lines)


def cut(line: str, width: int) -> str:
    """The first columns of a line. Colours take none, and are not left on."""
    if len(line) <= width:
        return line
    out, column_count, at, is_coloured = [], 0, 0, False
    while at < len(line) and column_count < width:
        if line[at] == "\x1b":
            end = line.index("m", at) + 1
            is_coloured = line[at:end] != "\x1b[0m"
            out.append(line[at:end])
            at = end
            continue
        out.append(line[at])
        column_count += 1
        at += 1
    return "".join(out) + ("\x1b[0m" if is_coloured else "")
