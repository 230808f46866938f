"""A whole screen of a terminal: entered, drawn over and left as it was."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

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
        columns, lines = shutil.get_terminal_size()
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
                if not keys:  # the keyboard is gone
                    return True
                # Arrows and the like begin with an escape too.
                if keys[0] in QUIT and (keys[0] != "\x1b" or len(keys) == 1):
                    return True
            if self._resized in ready:
                os.read(self._resized, 1024)
                self.draw(again())
        return False


def fitted(text: str, size: tuple[int, int]) -> str:
    """As much of the text as the screen holds, so that the next drawing starts at the top."""
    width, height = size
    lines = text.split("\n")
    if len(lines) >= height:
        kept = max(1, height - 2)
        lines = [*lines[:kept], f"… {len(lines) - kept} more lines"]
    return "\n".join(cut(line, width) for line in lines)


def cut(line: str, width: int) -> str:
    """The first columns of a line. Colours take none, and are not left on."""
    if len(line) <= width:
        return line
    out, shown, at, is_painted = [], 0, 0, False
    while at < len(line) and shown < width:
        if line[at] == "\x1b":
            end = line.index("m", at) + 1
            is_painted = line[at:end] != "\x1b[0m"
            out.append(line[at:end])
            at = end
            continue
        out.append(line[at])
        shown += 1
        at += 1
    return "".join(out) + ("\x1b[0m" if is_painted else "")
