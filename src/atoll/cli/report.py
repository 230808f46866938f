"""Reports on a training while it is followed: as text for people, as JSON lines for programs."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

from atoll.cli.show import counted, duration, print_json, says, training_json, world_json
from atoll.cli.terminal import RANK_COLOURS, LastLine, can_redraw, last_look, paint, wants_colour
from atoll.core.describe import TAIL_LINES, describe_end, describe_others, describe_ranks
from atoll.core.escape import escape_control, keep_colours
from atoll.core.executors import absence
from atoll.core.phase import Phase
from atoll.core.rounds import ShownTraining, describe_counts
from atoll.core.status import LogLine, Training
from atoll.core.warnings import has_replica_per_rank


class Report(Protocol):
    def state(self, training: Training) -> None: ...
    def line(self, line: LogLine) -> None: ...
    def says(self, text: str) -> None: ...
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
            says(f"{training.name} {text}")

    def line(self, line: LogLine) -> None:
        self._last_line.hide()
        self._printer.print(line)

    def says(self, text: str) -> None:
        self._last_line.hide()
        says(text)

    def tick(self) -> None:
        training = self._training
        if training is None or training.status.phase.is_terminal:
            return
        ran = training.status.ran_for(time.time())
        age = "" if ran is None else f"  {_whole(ran)}"
        self._last_line.show(f"── {training.name}  {world_text(training)}{age}")

    def end(self, training: Training, code: int) -> None:
        self.close()
        ran = training.status.ran_for(time.time())
        took = f" ({duration(ran)})" if ran is not None and code == 0 else ""
        first, *rest = end_report(training).split("\n")
        print("\n".join([f"atoll: {first}{took}", *rest]), file=sys.stderr, flush=True)

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

    def says(self, text: str) -> None:
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
        text = keep_colours(last_look(line.text)) if self._is_terminal else line.text
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
    whole, ms = divmod(round(at * 1000), 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{ms:03}Z"


def world_text(training: Training) -> str:
    """`ready 4/4 (min 2), 1 restart`."""
    status, size = training.status, training.spec.world_size
    is_stopping = bool(status.failing) or status.reason == "Cancelling"
    phase = "stopping" if is_stopping else status.phase.value or "stored"
    text = f"{phase} {status.world.ready}/{size.target}"
    if size.min != size.target:
        text += f" (min {size.min})"
    restarts = sum(rank.restarts for rank in status.ranks)
    lost = [r.rank for r in status.ranks if r.phase == "Failed"]
    waits = [f"rank {r.rank} {r.message}" for r in status.ranks if r.phase == "Pending"]
    if restarts:
        text += f", {counted(restarts, 'restart')}"
    if lost:
        text += f", lost: {describe_ranks(lost)}"
    if absence(training):
        text += f", {escape_control(status.message)}"
    elif waits and not is_stopping and not waits[0].endswith((" ", " starting")):
        text += f", {escape_control(waits[0])}"
    return text


def _whole(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else f"{int(seconds)}s"


def taken_lines(training: Training) -> list[str]:
    """In how many outer rounds each rank took part, if not all were in every one."""
    summary = training.rounds if isinstance(training, ShownTraining) else None
    if summary is None or not has_replica_per_rank(training, len(summary.ranks)):
        return []
    counts = dict.fromkeys(range(training.spec.world_size.target), 0)
    counts |= {each.rank: each.rounds for each in summary.ranks}
    if set(counts.values()) == {summary.rounds}:
        return []
    return [f"rounds taken part in, of {summary.rounds}: {describe_counts(counts)}"]


def end_report(training: Training) -> str:
    """How a training ended, and for a failure the other failed ranks and the last lines."""
    cause = training.status.root_cause
    lines = [describe_end(training)]
    lines += [f"  warning: {escape_control(words)}" for words in training.status.warnings]
    lines += [f"  {line}" for line in taken_lines(training)]
    if training.status.phase is not Phase.FAILED or cause is None:
        return "\n".join(lines)
    lines += [f"  {line}" for line in describe_others(training.status)]
    if cause.log_tail:
        lines.append(f"  last lines of rank {cause.rank}:")
        lines += [f"  | {escape_control(line)}" for line in cause.log_tail[-TAIL_LINES:]]
    else:
        lines.append(f"  rank {cause.rank} printed nothing")
    return "\n".join(lines)
