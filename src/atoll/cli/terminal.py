"""Terminals: colour, a status line at the bottom, and a full screen that is redrawn."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from io import TextIOWrapper
from typing import TYPE_CHECKING, NoReturn, TextIO

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.live import Live

# Codes of ANSI terminals. The colours of neighbouring ranks differ on both backgrounds.
RED, GREEN, YELLOW, DIM = 31, 32, 33, 2
RANK_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
PHASE_COLOURS = {"ready": GREEN, "succeeded": GREEN, "failed": RED, "cancelled": YELLOW}
REFRESH_HZ = 2  # so soon a screen has its new size; one of 200 columns takes 1.3 ms of CPU


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
        self._live: Live | None = None
        self._text = ""  # as it is drawn

    def show(self, text: str) -> None:
        """Draws the line if it changed, so it may be called often."""
        if text == self._text or not can_redraw(self._stream):
            return
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream)
            self._live = Live(
                console=console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
        self._live.start()
        # Nobody would show the cursor again after Ctrl-Z, or after a second Ctrl-C.
        self._live.console.show_cursor()
        self._live.update(Cropped(text), refresh=True)
        self._text = text

    def hide(self) -> None:
        if self._live is not None:
            self._live.stop()
        self._text = ""


class Cropped:
    """As much of a text as the screen holds. What is left out below is counted."""

    def __init__(self, text: str) -> None:
        self._lines = text.split("\n")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        lines, height = self._lines, options.size.height
        if len(lines) > height:
            lines = [*lines[: height - 1], f"… {len(lines) - height + 1} more lines"]
        yield Text.from_ansi("\n".join(lines), no_wrap=True, overflow="crop")


@contextlib.contextmanager
def screen() -> Iterator[Callable[[str], None]]:
    """A screen of its own, as what draws a text on it over the one before."""
    from rich.console import Console
    from rich.live import Live

    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)  # they would hide a new size of the terminal
    with Live(
        console=Console(),
        screen=True,
        refresh_per_second=REFRESH_HZ,
        redirect_stdout=False,  # a stand-in for stdout has no encoding, by which curves are drawn
        redirect_stderr=False,
    ) as live:
        try:
            yield lambda text: live.update(Cropped(text), refresh=True)
        finally:
            live.console.clear()  # tmux leaves lines of a screen that was resized


@contextlib.contextmanager
def keyboard() -> Iterator[Callable[[float], bool]]:
    """What waits so many seconds, and says whether a key to quit was pressed meanwhile."""
    import termios
    import tty

    with contextlib.ExitStack() as stack:
        keys: list[int] = []
        with contextlib.suppress(OSError, ValueError, termios.error):
            fd = sys.stdin.fileno()
            # Reading keys in the background would stop the process.
            if os.tcgetpgrp(fd) == os.getpgrp():
                stack.callback(termios.tcsetattr, fd, termios.TCSADRAIN, termios.tcgetattr(fd))
                tty.setcbreak(fd)
                keys.append(fd)

        def is_left(seconds: float) -> bool:
            ends_at = time.monotonic() + seconds
            while select.select(keys, [], [], max(0.0, ends_at - time.monotonic()))[0]:
                pressed = os.read(keys[0], 64).decode(errors="replace")
                # Nothing: the keyboard was closed. Arrows and the like begin with an escape too.
                if not pressed or pressed == "\x1b" or pressed[0] in "qQ":
                    return True
            return False

        yield is_left
