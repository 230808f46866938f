"""Reports on a training while it is followed: as text for people, as JSON lines for programs."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

from atoll.cli.output import (
    end_report,
    print_json,
    print_note,
    training_json,
    world_json,
    world_text,
)
from atoll.cli.terminal import (
    RANK_COLOURS,
    LastLine,
    after_carriage_return,
    can_redraw,
    paint,
    wants_colour,
)
from atoll.core.escape import keep_colours
from atoll.core.quantities import format_duration
from atoll.core.status import LogLine, Training


class Report(Protocol):
    def state(self, training: Training) -> None: ...
    def line(self, line: LogLine) -> None: ...
    def note(self, text: str) -> None: ...
    def tick(self) -> None:
        """Called while nothing happens."""

    def end(self, training: Training, code: int) -> None: ...
    def close(self) -> None: ...


class TextReport:
    """Prints logs to stdout, and the world to stderr: a live line on a terminal, else changes."""

    def __init__(self) -> None:
        self._printer = LinePrinter()
        self._last_line = LastLine(sys.stderr)
        self._is_live = can_redraw(sys.stderr)
        self._training: Training | None = None
        self._last_text = ""

    def state(self, training: Training) -> None:
        self._training = training
        self._printer.width = len(str(training.spec.world_size.max - 1))
        text = world_text(training)
        if text == self._last_text or training.status.phase.is_terminal:
            return
        self._last_text = text
        if not self._is_live:
            print_note(f"{training.name} {text}")

    def line(self, line: LogLine) -> None:
        self._last_line.hide()
        self._printer.print(line)

    def note(self, text: str) -> None:
        self._last_line.hide()
        print_note(text)

    def tick(self) -> None:
        training = self._training
        if training is None or training.status.phase.is_terminal:
            return
        ran = training.status.ran_for(time.time())
        age = "" if ran is None else f"  {_without_fraction(ran)}"
        self._last_line.show(f"── {training.name}  {world_text(training)}{age}")

    def end(self, training: Training, code: int) -> None:
        self.close()
        ran = training.status.ran_for(time.time())
        took = f" ({format_duration(ran)})" if ran is not None and code == 0 else ""
        first, *details = end_report(training).split("\n")
        print("\n".join([f"atoll: {first}{took}", *details]), file=sys.stderr, flush=True)

    def close(self) -> None:
        self._last_line.hide()


class JsonReport:
    """Prints one JSON object per line; `type` is created, log, world, note or result."""

    def __init__(self) -> None:
        self._world: dict[str, Any] | None = None

    def state(self, training: Training) -> None:
        phase = training.status.phase.value
        world = {"type": "world", "name": training.name, "phase": phase, **world_json(training)}
        if world != self._world:
            print_json(world)
        self._world = world

    def line(self, line: LogLine) -> None:
        print_json({"type": "log", "rank": line.rank, "text": line.text})

    def note(self, text: str) -> None:
        print_json({"type": "note", "message": text})

    def tick(self) -> None:
        pass

    def end(self, training: Training, code: int) -> None:
        print_json({"type": "result", "exitCode": code, **training_json(training)})

    def close(self) -> None:
        pass


class LinePrinter:
    """Prints log lines to stdout, each with its rank, or with its time as well.

    `is_live`: each line at once, also where nobody seems to watch.
    """

    def __init__(
        self, *, is_prefixed: bool = True, is_timed: bool = False, is_live: bool = True
    ) -> None:
        self.width = 1
        self._is_prefixed = is_prefixed
        self._is_timed = is_timed
        self._is_coloured = wants_colour(sys.stdout)
        self._is_terminal = sys.stdout.isatty()
        self._is_flushed = is_live or self._is_terminal

    def print(self, line: LogLine) -> None:
        text = keep_colours(after_carriage_return(line.text)) if self._is_terminal else line.text
        if self._is_timed:
            text = f"{_stamp(line.time)} {text}"
        if self._is_prefixed:
            colour = RANK_COLOURS[line.rank % len(RANK_COLOURS)]
            text = f"{paint(f'[{line.rank:>{self.width}}]', colour, self._is_coloured)} {text}"
        print(text, flush=self._is_flushed)


def _stamp(at: float | None) -> str:
    """`2026-11-17T02:33:57.042Z`; as wide where it is not known."""
    if at is None:
        return f"{'-':<24}"
    seconds, ms = divmod(round(at * 1000), 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{ms:03}Z"


def _without_fraction(seconds: float) -> str:
    return format_duration(seconds) if seconds >= 10 else f"{int(seconds)}s"
