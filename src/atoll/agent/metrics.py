"""`atoll.report`: metrics of a rank, such as its loss.

A call appends to a deque, and neither takes a lock nor writes. A thread sends the metrics to the
sink that the variable `ATOLL_REPORTS` names (`agent/metric_sinks.py`), and logs what is wrong with
them. It works in short slices, as the caller waits for the interpreter meanwhile. What cannot be
sent yet is merged, so that memory is bounded, and sent later.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from atoll.agent.metric_sinks import EVERY_S, BatchRefused, sink_of

SOON_S = 0.1  # until the first batch: a rank may be killed within a second
LAST_S = 15.0  # at most, for what is left when the process ends: three tries by HTTP
MAX_NAMES = 100  # of one rank: a page shows no more, and a name made of a number has no end
MAX_NAME = 64  # characters
MAX_WAITING = 65_536  # calls between two turns of the thread: 10 MB, a second of a tight loop
MAX_ROUNDS = 1000  # that wait to be sent; older ones are dropped
MAX_WEIGHTS = 100  # versions that wait to be sent, likewise
MAX_NOTES = 100  # on what is wrong, until the thread logs them
MAX_SETTINGS = 200  # of one rank, as the control plane takes them
MAX_SETTING = 2**53  # of a number: larger integers are not exact in every language
MAX_SETTING_CHARS = 1000  # of a text, likewise
ROUNDS_A_BATCH = 50  # some 4 kB each with a manifest of 64 ranks: well below MAX_BATCH
MAX_BATCH = 2**20  # bytes, as the server takes them
POINTS_A_NAME = 60  # in one batch, which is a second: one a pixel, more are merged
SLICE_CALLS = 64  # that the thread takes at a time: 0.1 ms of the interpreter, or so
PAUSE_S = 0.001  # in which callers get the interpreter, between two slices

log = logging.getLogger(__name__)

# A point is [time, step, value], and several of them merged are
# [time, step, least, mean, largest, how many, how many of them were not finite].
Point = list[Any]


def report(step: int | None = None, **metrics: Any) -> None:
    """Report metrics of this rank: `atoll.report(step=i, loss=0.3, tokens=4096)`.

    Values are numbers, or whatever `float` takes; a tensor of one element, too. Never raises, and
    does not wait. Does nothing outside a training.
    """
    try:
        _REPORTER.add(step, metrics)
    except Exception as error:  # a metric must never end a training
        _REPORTER.note("report", f"a report is dropped: {error!r}")


def report_settings(**settings: Any) -> None:
    """Report what was varied in this training: `atoll.report_settings(**vars(args))`.

    Lists and the page show, filter and sort by it. Numbers, texts and booleans stay as they are,
    anything else is reported as its text. Never raises, and does nothing outside a training.
    """
    try:
        _REPORTER.add_settings(settings)
    except Exception as error:  # a report must never end a training
        _REPORTER.note("settings", f"settings are dropped: {error!r}")


def report_round(message: Mapping[str, Any]) -> None:
    """Report an outer round, as `core/rounds.py:ReportedRound` has it. Never raises."""
    try:
        _REPORTER.add_round(message)
    except Exception as error:
        _REPORTER.note("round", f"a round is dropped: {error!r}")


def report_weights(message: Mapping[str, Any]) -> None:
    """Report a version that is published or served, as `core/weights.py:ReportedWeights` has it.
    Never raises."""
    try:
        _REPORTER.add_weights(message)
    except Exception as error:
        _REPORTER.note("weights", f"a version of weights is dropped: {error!r}")


class Reporter:
    """The metrics of whatever process this is: a fork begins anew, and sends nothing twice."""

    def __init__(self) -> None:
        self._sessions: dict[int, PendingMetrics] = {}  # by pid; only that of this process is used

    def add(self, step: int | None, metrics: Mapping[str, Any]) -> None:
        session = self._sessions.get(os.getpid()) or self._begin()
        if session.sink is None:
            return
        if len(session.calls) >= MAX_WAITING:
            session.lost += len(metrics)
            return
        known = {name: _copy(value) for name, value in metrics.items()}
        session.calls.append((time.time(), None if step is None else int(step), known))

    def add_round(self, message: Mapping[str, Any]) -> None:
        session = self._sessions.get(os.getpid()) or self._begin()
        if session.sink is not None:
            session.rounds.append(message)

    def add_weights(self, message: Mapping[str, Any]) -> None:
        session = self._sessions.get(os.getpid()) or self._begin()
        if session.sink is not None:
            session.weights.append(message)

    def add_settings(self, settings: Mapping[str, Any]) -> None:
        session = self._sessions.get(os.getpid()) or self._begin()
        if session.sink is not None:
            session.settings.append({name: _setting(value) for name, value in settings.items()})

    def note(self, what: str, message: str) -> None:
        """Has the thread log it: a log may be as slow as whoever reads it."""
        session = self._sessions.get(os.getpid())
        if session is not None:
            session.notes.append((what, message))

    def flush(self) -> float:
        """Sends what there is. Returns the seconds until it is worth trying again."""
        session = self._sessions.get(os.getpid())
        return EVERY_S if session is None else session.flush()

    def _begin(self) -> PendingMetrics:
        session = PendingMetrics(os.environ)
        # Whichever thread comes first: no lock is needed for that.
        ours = self._sessions.setdefault(os.getpid(), session)
        if ours is session and session.sink is not None:
            try:
                # `Thread.start` would wait until it runs. A rank may be killed within a second.
                _thread.start_new_thread(session.run, (SOON_S,))
            except RuntimeError as error:
                session.sink = None
                _warn_once("thread", f"metrics are dropped: {error}")
            else:
                atexit.register(session.close)
        return ours


class PendingMetrics:
    """The metrics of one process, until they are sent. Callers only append to its deques."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.calls: deque[tuple[float, int | None, dict[str, Any]]] = deque()
        self.rounds: deque[Mapping[str, Any]] = deque(maxlen=MAX_ROUNDS)
        self.weights: deque[Mapping[str, Any]] = deque(maxlen=MAX_WEIGHTS)
        self.notes: deque[tuple[str, str]] = deque(maxlen=MAX_NOTES)
        self.settings: deque[dict[str, Any]] = deque()
        self.lost = 0  # metrics of calls while the deque was full
        writer = self._writer = MetricWriter.of(environment)
        owner = f"{writer.rank}.{writer.attempt}.{writer.process}.{writer.id}"
        self.sink = sink_of(environment, owner)
        self._pid = os.getpid()
        self._handing = threading.Lock()  # of what follows; no caller takes it
        self._pending: dict[str, list[Point]] = {}  # taken from the calls, and not sent yet
        self._sending_rounds: list[Mapping[str, Any]] = []  # taken from the rounds, likewise
        self._sending_weights: list[Mapping[str, Any]] = []  # taken from the weights, likewise
        self._sending_settings: dict[str, Any] = {}  # taken from the settings, likewise
        self._names: set[str] = set()
        self._skipped = 0  # metrics that were dropped, and are not reported yet
        self._lost_warned = 0  # of `lost`
        self._number = 0  # of batches
        self._sending: bytes | None = None  # the batch that is on its way
        self._is_delayed = False  # the last try failed
        self._is_ending = threading.Event()
        self._is_over = threading.Event()

    def run(self, pause_s: float) -> None:
        """The work of the thread, first after a pause, until the process ends."""
        threading.current_thread().name = "atoll-report"
        while not self._is_ending.wait(pause_s):
            pause_s = self.flush(self._pause)
        self.flush()
        while self._has_more() and not self._is_delayed:
            self.flush()
        self._is_over.set()

    def close(self) -> None:
        """Waits for the thread to send what is left, but not for ever: the process ends."""
        if self._pid == os.getpid():
            self._is_ending.set()
            self._is_over.wait(LAST_S)

    def _pause(self) -> None:
        if not self._is_ending.is_set():
            time.sleep(PAUSE_S)

    def _has_more(self) -> bool:
        return bool(
            self._sending
            or self._pending
            or self._sending_rounds
            or self._sending_weights
            or self._sending_settings
            or self.calls
            or self.rounds
            or self.weights
            or self.settings
        )

    def flush(self, pause: Callable[[], object] = lambda: None) -> float:
        """Sends what there is. Returns the seconds until it is worth trying again.

        `pause` is called between slices of work.
        """
        if self.sink is None:
            return EVERY_S
        with self._handing:
            self._is_delayed = False
            try:
                self._take(pause)
                if self._sending is None:
                    self._sending = self._next_batch(pause)
                if self._sending is None:
                    return EVERY_S
                # Until it has arrived, it stays as it is: it may have, and only its answer is lost.
                pause_s = self.sink.hand_on(self._sending)
                self._sending = None
                return pause_s
            except BatchRefused as error:
                self._sending = None
                _warn_once("refused", f"metrics are dropped: {error}")
            except OSError as error:
                self._is_delayed = True
                _warn_once("sink", f"metrics wait: {error}")
            except Exception:
                self._sending, self._is_delayed = None, True
                _warn_once("flush", "metrics cannot be sent", exc_info=True)
            return self.sink.patience_s

    def _next_batch(self, pause: Callable[[], object]) -> bytes | None:
        count = ROUNDS_A_BATCH
        lost = self.lost
        skipped = self._skipped + lost - self._lost_warned
        while True:
            rounds = self._sending_rounds[:count]
            more = {"settings": self._sending_settings, "weights": self._sending_weights}
            if not self._pending and not skipped and not rounds and not any(more.values()):
                return None
            number = self._number + 1
            batch = batch_of(self._writer, number, self._pending, skipped, rounds, pause, more)
            if len(batch) <= MAX_BATCH or not rounds:
                break
            if count == 1:
                self._sending_rounds.pop(0)
                _warn_once("round", "a round is dropped: its manifest is too large")
            count = max(1, count // 2)
        del self._sending_rounds[: len(rounds)]
        self._pending, self._skipped, self._lost_warned = {}, 0, lost
        self._sending_settings, self._sending_weights = {}, []
        self._number += 1
        return batch

    def _take(self, pause: Callable[[], object]) -> None:
        while self.notes:
            _warn_once(*self.notes.popleft())
        while self.settings:
            settings = {**self._sending_settings, **self.settings.popleft()}
            self._sending_settings = dict(list(settings.items())[:MAX_SETTINGS])
        while self.rounds:
            self._sending_rounds.append(self.rounds.popleft())
        del self._sending_rounds[:-MAX_ROUNDS]
        while self.weights:
            self._sending_weights.append(self.weights.popleft())
        del self._sending_weights[:-MAX_WEIGHTS]
        for count in range(len(self.calls)):
            if count % SLICE_CALLS == SLICE_CALLS - 1:
                pause()
            at, step, metrics = self.calls.popleft()
            for name, value in metrics.items():
                number = _number(name, value)
                if number is not None:
                    self._hold(name[:MAX_NAME], [at, step, number])
        for name, points in self._pending.items():
            if len(points) > POINTS_A_NAME:
                pause()
                self._pending[name] = merged(points, POINTS_A_NAME, pause)

    def _hold(self, name: str, point: Point) -> None:
        self._names.add(name)
        if len(self._names) > MAX_NAMES:
            self._names.discard(name)
            _warn_once("names", f"at most {MAX_NAMES} names are reported: {name!r} is dropped")
            self._skipped += 1
            return
        self._pending.setdefault(name, []).append(point)


class MetricWriter(NamedTuple):
    """Whose metrics these are. A process of a rank that is started again is another life."""

    rank: int
    attempt: int
    process: int  # of the rank: torchrun starts several
    id: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> MetricWriter:
        is_one_of_many = "TORCHELASTIC_RUN_ID" in environment
        return cls(
            _int_or(environment.get("ATOLL_RANK"), 0),
            _int_or(environment.get("ATOLL_ATTEMPT"), 1),
            _int_or(environment.get("LOCAL_RANK"), 0) if is_one_of_many else 0,
            f"{time.time_ns() // 1_000_000:x}-{os.getpid():x}",
        )


def batch_of(
    session: MetricWriter,
    number: int,
    metrics: Mapping[str, list[Point]],
    skipped: int,
    rounds: Sequence[Mapping[str, Any]] = (),
    pause: Callable[[], object] = lambda: None,
    more: Mapping[str, Any] | None = None,
) -> bytes:
    """One line, with what is not empty in `more`. Numbers that JSON does not have are text: `nan`,
    `inf`, `-inf`.

    Encoded bit by bit, with a `pause` between: the encoder does not let go of the interpreter.
    """
    filled = {name: value for name, value in (more or {}).items() if value}
    head = _json({**session._asdict(), "n": number, "skipped": skipped, **filled})
    series = []
    for name, points in metrics.items():
        series.append(_json(name) + ":" + _json([[_plain(part) for part in p] for p in points]))
        pause()
    encoded = []
    for message in rounds:
        encoded.append(_json(message))
        pause()
    tail = f',"rounds":[{",".join(encoded)}]' if encoded else ""
    return f'{head[:-1]},"metrics":{{{",".join(series)}}}{tail}}}\n'.encode()


def _json(what: Any) -> str:
    return json.dumps(what, separators=(",", ":"))


def merged(
    points: Sequence[Point], count: int, pause: Callable[[], object] = lambda: None
) -> list[Point]:
    """At most `count` points: neighbours become one, which keeps their least and largest."""
    width = -(-len(points) // count)
    complete = []
    for at in range(0, len(points), width):
        complete.append(_merge(points[at : at + width]))
        if width > SLICE_CALLS:
            pause()
    return complete


def _merge(points: Sequence[Point]) -> Point:
    if len(points) == 1:
        return points[0]
    complete = [point if len(point) > 3 else _widened(point) for point in points]
    total = sum(point[5] for point in complete)
    bad = sum(point[6] for point in complete)
    finite = [point for point in complete if point[5]]
    if not finite:
        return [*points[-1][:2], math.nan, math.nan, math.nan, 0, bad]
    mean = sum(point[3] * (point[5] / total) for point in finite)
    least, largest = min(p[2] for p in finite), max(p[4] for p in finite)
    return [*points[-1][:2], least, min(max(mean, least), largest), largest, total, bad]


def _widened(point: Point) -> Point:
    at, step, value = point
    is_finite = math.isfinite(value)
    return [at, step, value, value, value, int(is_finite), int(not is_finite)]


def _plain(part: Any) -> Any:
    return str(part) if isinstance(part, float) and not math.isfinite(part) else part


class _NoNumber(NamedTuple):
    """In place of a value that is none."""

    why: str


def _copy(value: Any) -> Any:
    """The value as it is now. What is still computed is read by the thread, not here."""
    if type(value) in (int, float):
        return value
    if hasattr(value, "block_until_ready"):  # JAX; it never changes
        return value
    try:
        if hasattr(value, "detach"):  # torch, which warns of numbers that still have a gradient
            value = value.detach()
            if value.device.type != "cpu":
                return value.clone()
        return None if value is None else float(value)
    except Exception as error:  # of whatever library the value is from
        return _NoNumber(str(error))


def _setting(value: Any) -> bool | int | float | str:
    """The value as JSON has it; anything else as text."""
    is_number = isinstance(value, int | float) and abs(value) <= MAX_SETTING
    if is_number:  # not of NaN and infinities
        return value  # type: ignore[no-any-return]
    return (value if isinstance(value, str) else str(value))[:MAX_SETTING_CHARS]


def _number(name: str, value: Any) -> float | None:
    """None, and a line in the log, if it is none."""
    try:
        if not isinstance(value, _NoNumber):
            return None if value is None else float(value)
        why = value.why
    except Exception as error:
        why = str(error)
    _warn_once(f"value {name}", f"{name} is dropped: {why}")
    return None


def _int_or(text: str | None, otherwise: int) -> int:
    with contextlib.suppress(TypeError, ValueError):
        return int(text)  # type: ignore[arg-type]
    return otherwise


def _warn_once(what: str, message: str, *, exc_info: bool = False) -> None:
    if what not in _WARNED:
        _WARNED.add(what)
        log.warning("atoll.report: %s", message, exc_info=exc_info)


_WARNED: set[str] = set()
_REPORTER = Reporter()
