"""Follow one training to its end: logs, its world, Ctrl-C, and the verdict, as text or as JSON.

Two threads read, logs and states; everything they see goes through one queue to the main thread,
which alone prints and decides. A signal is one more thing in the queue.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from math import inf
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

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
from atoll.core.describe import TAIL_LINES
from atoll.core.errors import AtollError
from atoll.core.executors import executor_problem
from atoll.core.phase import Phase, PhaseReason
from atoll.core.status import LogLine, Training
from atoll.core.text import format_duration, keep_colours
from atoll.sdk import flows
from atoll.sdk.client import Client
from atoll.sdk.effects import Flow
from atoll.sdk.training import DistributedTraining

TICK_S = 0.1  # the live line shows seconds
LINES_AHEAD = 10_000  # read but not printed: a terminal may be slow, or stopped with Ctrl-S
LINES_IN_SIGHT = 40  # above the verdict: a laptop's terminal has more
LOGS_S = 5.0  # how long the last lines may take once the training is over
CONFIRM_S = 5.0  # how long the end may take once ranks are stopped, where nobody may answer
SUCCEEDED, FAILED, TIMED_OUT = 0, 1, 124  # the last as timeout(1) has it


class Signalled(NamedTuple):
    number: int


class Ended(NamedTuple):
    """One of the two readers is through."""

    reader: str
    error: BaseException | None = None


Item = LogLine | Training | Signalled | Ended


class Interrupts:
    """Ctrl-C and SIGTERM as items of the queue; the second one leaves at once."""

    def __init__(self, items: SimpleQueue[Item]) -> None:
        self._items = items
        self._is_second = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._is_second:
            # Nothing may be waited for here, not even threads that are reading.
            os.write(2, b"\r\natoll: left; the training is being cancelled\n")
            os._exit(128 + number)
        self._is_second = True
        self._items.put(Signalled(number))


class Following:
    """One training, followed. `run` returns the exit code.

    Made before the training is: a Ctrl-C that comes while it is being stored is not lost.
    """

    report: Report

    def __init__(self, deadline_s: float | None = None, timeout: float | None = None) -> None:
        self._deadline_s = deadline_s  # of the training
        self._timeout = timeout  # of this command
        self._items: SimpleQueue[Item] = SimpleQueue()
        self._room = threading.Semaphore(LINES_AHEAD)
        self._signal: int | None = None
        self._is_abandoned = False
        self._cancelled_at: float | None = None
        Interrupts(self._items)

    def run(self, client: Client, training: DistributedTraining, report: Report) -> int:
        self.report = report
        self._start("logs", lambda: self._read_logs(training))
        self._start("states", lambda: client.run(to_the_end(training.last, self._items.put)))
        last = training.last
        leaves_at = inf if self._timeout is None else time.monotonic() + self._timeout
        open_readers = {"logs", "states"}
        while open_readers:
            is_over, is_cancelled = "states" not in open_readers, self._cancelled_at is not None
            left_s = inf if is_over or is_cancelled else leaves_at - time.monotonic()
            if left_s <= 0:
                return self._stop_following(last)
            patience_s = LOGS_S if is_over else self._patience_s(last)
            item = self._next(min(left_s, patience_s))
            if item is None:
                if is_over:
                    break
                if is_cancelled:
                    return self._leave(last)
                if patience_s <= left_s:
                    self._give_up(training, last)
            elif isinstance(item, LogLine):
                self.report.line(item)
                self._room.release()
            elif isinstance(item, Training):
                last = item
                self.report.state(last)
            elif isinstance(item, Signalled):
                self._cancel(training, item.number)
            else:
                open_readers.discard(item.reader)
                self._note_end(item)
        code = self._code(last)
        # Ranks send their last reports as they end: rounds and warnings are newest now.
        with contextlib.suppress(AtollError):
            last = client.run(flows.read(flows.TrainingRef(last.name, last.uid), patience_s=0))
        self.report.end(last, code)
        return code

    def _read_logs(self, training: DistributedTraining) -> None:
        for line in training.stream_logs():
            self._room.acquire()
            self._items.put(line)

    def _start(self, reader: str, read: Callable[[], object]) -> None:
        def work() -> None:
            error = None
            try:
                read()
            except Exception as failure:  # handed to the main thread, which judges it
                error = failure
            self._items.put(Ended(reader, error))

        threading.Thread(target=work, name=reader, daemon=True).start()

    def _next(self, limit_s: float) -> Item | None:
        """The next item, or None after `limit_s` without one. Redraws the last line meanwhile."""
        until = time.monotonic() + limit_s
        while True:
            left = until - time.monotonic()
            try:
                return self._items.get(timeout=max(0.0, min(TICK_S, left)))
            except Empty:
                if left <= TICK_S:
                    return None
                self.report.tick()

    def _patience_s(self, last: Training) -> float:
        """How long it may still wait to be started, or to be stopped where nobody may answer.

        A training that runs has its own deadline, for as long as its executor answers.
        """
        opened_at, is_answering = last.status.gate_opened_at, is_reachable(last)
        if self._cancelled_at is not None:
            until = self._cancelled_at + last.spec.stop_grace_s + CONFIRM_S
            return inf if is_answering else max(0.0, until - time.time())
        if self._deadline_s is None or (opened_at is not None and is_answering):
            return inf
        since = last.created_at if opened_at is None else opened_at
        return max(0.0, since + self._deadline_s - time.time())

    def _stop_following(self, last: Training) -> int:
        state = "keeps running" if last.status.phase is Phase.READY else "still waits to run"
        self.report.note(
            f"not over after {self._timeout:g} s; {last.name} {state}: "
            f"'atoll logs -f {last.name}' follows it, 'atoll cancel {last.name}' stops it"
        )
        self.report.close()
        return TIMED_OUT

    def _give_up(self, training: DistributedTraining, last: Training) -> None:
        self._is_abandoned = True
        late = "not over" if last.status.gate_opened_at is not None else "not started"
        self.report.note(f"{late} within {self._deadline_s:g} s; cancelling the training")
        self._cancelled_at = time.time()
        training.cancel()

    def _leave(self, last: Training) -> int:
        """Leave although ranks may still run: nobody answers. The exit code has the reason."""
        self.report.note(
            f"left {last.name}: it is not known whether its ranks have stopped; the cancel is "
            f"stored, and is carried out when the executor {last.executor!r} answers"
        )
        self.report.close()
        return TIMED_OUT if self._signal is None else 128 + self._signal

    def _cancel(self, training: DistributedTraining, number: int) -> None:
        self._signal = number
        self.report.note("cancelling the training; press Ctrl-C again to leave at once")
        self._cancelled_at = time.time()
        training.cancel()

    def _note_end(self, ended: Ended) -> None:
        if ended.error is None:
            return
        if ended.reader == "states":
            self.report.close()
            raise ended.error
        self.report.note(f"no more log lines: {ended.error}")

    def _code(self, training: Training) -> int:
        code = verdict_code(training)
        if code == SUCCEEDED:
            return code
        if self._signal is not None:
            return 128 + self._signal
        return TIMED_OUT if self._is_abandoned else code


def to_the_end(training: Training, on_read: Callable[[Training], object]) -> Flow[Training]:
    """Every state from now to the last one, as the server pushes them."""
    return flows.wait(
        flows.TrainingRef(training.name, training.uid),
        timeout=None,
        until=lambda now: now if now.status.phase.is_terminal else None,
        needed=lambda now: now.spec.world_size.target,
        on_read=on_read,
    )


def is_reachable(training: Training) -> bool:
    """Whether its executor answers, and was observed since the last change of the spec."""
    is_observed = training.status.observed_generation == training.generation
    return is_observed and not executor_problem(training)


def verdict_code(training: Training) -> int:
    """The exit code for the end of a training."""
    if training.status.phase is Phase.SUCCEEDED:
        return SUCCEEDED
    is_late = training.status.reason == PhaseReason.DEADLINE_EXCEEDED
    return TIMED_OUT if is_late else FAILED


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
        self._printed: deque[tuple[int, str]] = deque(maxlen=LINES_IN_SIGHT)

    def state(self, training: Training) -> None:
        self._training = training
        self._printer.width = len(str(training.spec.world_size.max - 1))
        text = world_text(training)
        if text == self._last_text or training.status.phase.is_terminal:
            return
        self._last_text = text
        if not self._is_live:
            print_note(f"{training.display_name} {text}")

    def line(self, line: LogLine) -> None:
        self._last_line.hide()
        self._printer.print(line)
        self._printed.append((line.rank, line.text))

    def note(self, text: str) -> None:
        self._last_line.hide()
        print_note(text)

    def tick(self) -> None:
        training = self._training
        if training is None or training.status.phase.is_terminal:
            return
        ran = training.status.ran_for(time.time())
        age = "" if ran is None else f"  {_without_fraction(ran)}"
        self._last_line.show(f"── {training.display_name}  {world_text(training)}{age}")

    def end(self, training: Training, code: int) -> None:
        self.close()
        ran = training.status.ran_for(time.time())
        took = f" ({format_duration(ran)})" if ran is not None and code == 0 else ""
        has_tail = not self._is_tail_above(training)
        first, *details = end_report(training, has_tail=has_tail).split("\n")
        print("\n".join([f"atoll: {first}{took}", *details]), file=sys.stderr, flush=True)

    def _is_tail_above(self, training: Training) -> bool:
        """Whether the traceback of the rank that failed was just printed, alone or between lines
        of other ranks."""
        cause = training.status.root_cause
        if cause is None or not any("Traceback (most recent" in line for line in cause.log_tail):
            return False
        tail = [*cause.log_tail[-TAIL_LINES:]]
        printed = [text for rank, text in self._printed if rank == cause.rank]
        return printed[-len(tail) :] == tail

    def close(self) -> None:
        self._last_line.hide()


class JsonReport:
    """Prints one JSON object per line; `type` is created, log, world, note or result."""

    def __init__(self) -> None:
        self._world: dict[str, Any] | None = None

    def state(self, training: Training) -> None:
        phase = training.status.phase.value
        world = {
            "type": "world",
            "name": training.display_name,
            "phase": phase,
            **world_json(training),
        }
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
