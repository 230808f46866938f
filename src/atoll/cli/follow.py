"""Following one training to its end: logs, its world, Ctrl-C, and the verdict.

Two threads read, logs and states; everything they see goes through one queue to the main thread,
which alone prints and decides. A signal is one more thing in the queue.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from math import inf
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from atoll.core.errors import AtollError
from atoll.core.executors import executor_problem
from atoll.core.phase import Phase
from atoll.core.reasons import PhaseReason
from atoll.core.status import LogLine, Training
from atoll.sdk import flows
from atoll.sdk.client import Client
from atoll.sdk.effects import Flow
from atoll.sdk.training import DistributedTraining

if TYPE_CHECKING:
    from atoll.cli.report import Report

TICK_S = 0.1  # the live line shows seconds
LINES_AHEAD = 10_000  # read but not printed: a terminal may be slow, or stopped with Ctrl-S
LOGS_S = 5.0  # how long the last lines may take once the training is over
CONFIRM_S = 5.0  # how long the end may take once ranks are stopped, where nobody may answer
SUCCEEDED, FAILED, TIMED_OUT = 0, 1, 124


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
        self.report.note(
            f"not over after {self._timeout:g} s; {last.name} goes on: 'atoll logs -f {last.name}' "
            f"follows it, 'atoll cancel {last.name}' stops it"
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
        self.report.note("cancelling the training; once more to leave at once")
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
