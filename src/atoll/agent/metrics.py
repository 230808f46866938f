"""`atoll.report`: figures that a rank tells of itself, such as its loss.

A call appends to a deque, and neither takes a lock nor writes. A thread hands the figures on, to
the place that the variable `ATOLL_REPORTS` names (`agent/metric_sinks.py`), and tells of what is
wrong with them. It works in short slices, as the caller waits for the interpreter meanwhile. What
cannot be handed on yet is merged, so that memory is bounded, and tried again.
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

SOON_S = 0.1
LAST_S = 15.0  # at most, for what is left when the process ends
MAX_NAMES = 100
MAX_NAME = 64  # characters
MAX_WAITING = 65_536  # calls between two rounds of the thread
MAX_ROUNDS = 1000  # that wait to be handed on; older ones are left out
MAX_NOTES = 100  # on what is wrong, until the thread tells of it
ROUNDS_A_BATCH = 50
MAX_BATCH = 2**20  # bytes
POINTS_A_NAME = 60  # in one batch; more are merged
SLICE_CALLS = 64  # that the thread takes at a time: 0.1 ms of the interpreter, or so
REST_S = 0.001  # in which callers get the interpreter, between two slices

log = logging.getLogger(__name__)

# A point is [time, step, value], and several of them merged are
# [time, step, least, mean, largest, how many, how many of them were not finite].
Point = list[Any]


def report(step: int | None = None, **figures: Any) -> None:
    """Tells figures of this rank: `atoll.report(step=i, loss=0.3, tokens=4096)`.

    Numbers, or whatever `float` makes one of; a tensor of one element, too. Never raises, and does
    not wait. Outside a training it does nothing.
    """
    try:
        _REPORTER.add(step, figures)
    except Exception as error:  # a figure must never end a training
        _REPORTER.note("report", f"a report is left out: {error!r}")


def report_round(word: Mapping[str, Any]) -> None:
    """Tells of an outer round, as `core/rounds.py:RoundWord` has it. Never raises."""
    try:
        _REPORTER.add_round(word)
    except Exception as error:
        _REPORTER.note("round", f"a round is left out: {error!r}")


class Reporter:
    """The figures of whatever process this is: a fork begins anew, with nothing to tell twice."""

    def __init__(self) -> None:
        self._lives: dict[int, PendingFigures] = {}  # by pid; only that of this process is used

    def add(self, step: int | None, figures: Mapping[str, Any]) -> None:
        life = self._lives.get(os.getpid()) or self._begin()
        if life.sink is None:
            return
        if len(life.calls) >= MAX_WAITING:
            life.lost += len(figures)
            return
        known = {name: _kept(value) for name, value in figures.items()}
        life.calls.append((time.time(), None if step is None else int(step), known))

    def add_round(self, word: Mapping[str, Any]) -> None:
        life = self._lives.get(os.getpid()) or self._begin()
        if life.sink is not None:
            life.rounds.append(word)

    def note(self, what: str, words: str) -> None:
        """Has the thread tell of it: a log may be as slow as whoever reads it."""
        life = self._lives.get(os.getpid())
        if life is not None:
            life.notes.append((what, words))

    def flush(self) -> float:
        """Hands on what there is. Returns the seconds until it is worth trying again."""
        life = self._lives.get(os.getpid())
        return EVERY_S if life is None else life.flush()

    def _begin(self) -> PendingFigures:
        life = PendingFigures(os.environ)
        # Whichever thread comes first: no lock is needed for that.
        ours = self._lives.setdefault(os.getpid(), life)
        if ours is life and life.sink is not None:
            try:
                # `Thread.start` would wait until it runs. A rank may be killed within a second.
                _thread.start_new_thread(life.run, (SOON_S,))
            except RuntimeError as error:
                life.sink = None
                _tell_once("thread", f"figures are left out: {error}")
            else:
                atexit.register(life.close)
        return ours


class PendingFigures:
    """The figures of one process, until they are handed on. Callers only append to its deques."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.calls: deque[tuple[float, int | None, dict[str, Any]]] = deque()
        self.rounds: deque[Mapping[str, Any]] = deque(maxlen=MAX_ROUNDS)
        self.notes: deque[tuple[str, str]] = deque(maxlen=MAX_NOTES)
        self.lost = 0  # figures of calls that found no room
        teller = self._teller = Teller.of(environment)
        owner = f"{teller.rank}.{teller.attempt}.{teller.process}.{teller.id}"
        self.sink = sink_of(environment, owner)
        self._pid = os.getpid()
        self._handing = threading.Lock()  # of what follows; no caller takes it
        self._held: dict[str, list[Point]] = {}  # taken from the calls, and not handed on yet
        self._telling: list[Mapping[str, Any]] = []  # taken from the rounds, likewise
        self._names: set[str] = set()
        self._skipped = 0  # figures that were not kept, and are not told of yet
        self._lost_told = 0  # of `lost`
        self._number = 0  # of batches
        self._sending: bytes | None = None  # the batch that is on its way
        self._is_held_back = False  # the last try failed
        self._is_ending = threading.Event()
        self._is_over = threading.Event()

    def run(self, pause_s: float) -> None:
        """What the thread does, first after a pause, until the process ends."""
        threading.current_thread().name = "atoll-report"
        while not self._is_ending.wait(pause_s):
            pause_s = self.flush(self._rest)
        self.flush()
        while self._has_more() and not self._is_held_back:
            self.flush()
        self._is_over.set()

    def close(self) -> None:
        """Waits for the thread to hand the rest on, but not for ever: the process ends."""
        if self._pid == os.getpid():
            self._is_ending.set()
            self._is_over.wait(LAST_S)

    def _rest(self) -> None:
        if not self._is_ending.is_set():
            time.sleep(REST_S)

    def _has_more(self) -> bool:
        return bool(self._sending or self._held or self._telling or self.calls or self.rounds)

    def flush(self, rest: Callable[[], object] = lambda: None) -> float:
        """Hands on what there is. Returns the seconds until it is worth trying again.

        `rest` is called between slices of work.
        """
        if self.sink is None:
            return EVERY_S
        with self._handing:
            self._is_held_back = False
            try:
                self._take(rest)
                if self._sending is None:
                    self._sending = self._next_batch(rest)
                if self._sending is None:
                    return EVERY_S
                # Until it has arrived, it stays as it is: it may have, and only its answer is lost.
                pause_s = self.sink.hand_on(self._sending)
                self._sending = None
                return pause_s
            except BatchRefused as error:
                self._sending = None
                _tell_once("refused", f"figures are left out: {error}")
            except OSError as error:
                self._is_held_back = True
                _tell_once("sink", f"figures are held back: {error}")
            except Exception:
                self._sending, self._is_held_back = None, True
                _tell_once("flush", "figures cannot be handed on", exc_info=True)
            return self.sink.patience_s

    def _next_batch(self, rest: Callable[[], object]) -> bytes | None:
        count = ROUNDS_A_BATCH
        lost = self.lost
        skipped = self._skipped + lost - self._lost_told
        while True:
            rounds = self._telling[:count]
            if not self._held and not skipped and not rounds:
                return None
            batch = batch_of(self._teller, self._number + 1, self._held, skipped, rounds, rest)
            if len(batch) <= MAX_BATCH or not rounds:
                break
            if count == 1:
                self._telling.pop(0)
                _tell_once("round", "a round is left out: its manifest is too large")
            count = max(1, count // 2)
        del self._telling[: len(rounds)]
        self._held, self._skipped, self._lost_told = {}, 0, lost
        self._number += 1
        return batch

    def _take(self, rest: Callable[[], object]) -> None:
        while self.notes:
            _tell_once(*self.notes.popleft())
        while self.rounds:
            self._telling.append(self.rounds.popleft())
        del self._telling[:-MAX_ROUNDS]
        for count in range(len(self.calls)):
            if count % SLICE_CALLS == SLICE_CALLS - 1:
                rest()
            at, step, figures = self.calls.popleft()
            for name, value in figures.items():
                number = _number(name, value)
                if number is not None:
                    self._hold(name[:MAX_NAME], [at, step, number])
        for name, points in self._held.items():
            if len(points) > POINTS_A_NAME:
                rest()
                self._held[name] = merged(points, POINTS_A_NAME, rest)

    def _hold(self, name: str, point: Point) -> None:
        self._names.add(name)
        if len(self._names) > MAX_NAMES:
            self._names.discard(name)
            _tell_once("names", f"only {MAX_NAMES} names are kept: {name!r} is left out")
            self._skipped += 1
            return
        self._held.setdefault(name, []).append(point)


class Teller(NamedTuple):
    """Whose figures these are. A process of a rank that is started again is another life."""

    rank: int
    attempt: int
    process: int  # of the rank: torchrun starts several
    id: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Teller:
        is_one_of_many = "TORCHELASTIC_RUN_ID" in environment
        return cls(
            _whole(environment.get("ATOLL_RANK"), 0),
            _whole(environment.get("ATOLL_ATTEMPT"), 1),
            _whole(environment.get("LOCAL_RANK"), 0) if is_one_of_many else 0,
            f"{time.time_ns() // 1_000_000:x}-{os.getpid():x}",
        )


def batch_of(
    life: Teller,
    number: int,
    figures: Mapping[str, list[Point]],
    skipped: int,
    rounds: Sequence[Mapping[str, Any]] = (),
    rest: Callable[[], object] = lambda: None,
) -> bytes:
    """One line. Numbers that JSON does not have are text: `nan`, `inf`, `-inf`.

    Encoded bit by bit, with a `rest` between: the encoder does not let go of the interpreter.
    """
    head = _json({**life._asdict(), "n": number, "skipped": skipped})
    told = []
    for name, points in figures.items():
        told.append(_json(name) + ":" + _json([[_plain(part) for part in p] for p in points]))
        rest()
    words = []
    for word in rounds:
        words.append(_json(word))
        rest()
    tail = f',"rounds":[{",".join(words)}]' if words else ""
    return f'{head[:-1]},"figures":{{{",".join(told)}}}{tail}}}\n'.encode()


def _json(what: Any) -> str:
    return json.dumps(what, separators=(",", ":"))


def merged(
    points: Sequence[Point], count: int, rest: Callable[[], object] = lambda: None
) -> list[Point]:
    """At most `count` points: neighbours become one, which keeps their least and largest."""
    width = -(-len(points) // count)
    whole = []
    for at in range(0, len(points), width):
        whole.append(_merge(points[at : at + width]))
        if width > SLICE_CALLS:
            rest()
    return whole


def _merge(points: Sequence[Point]) -> Point:
    if len(points) == 1:
        return points[0]
    whole = [point if len(point) > 3 else _widened(point) for point in points]
    total = sum(point[5] for point in whole)
    bad = sum(point[6] for point in whole)
    finite = [point for point in whole if point[5]]
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


def _kept(value: Any) -> Any:
    """The value as it is now. What is still computed is read by the thread, not waited for here."""
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


def _number(name: str, value: Any) -> float | None:
    """None, and a line in the log, if it is none."""
    try:
        if not isinstance(value, _NoNumber):
            return None if value is None else float(value)
        why = value.why
    except Exception as error:
        why = str(error)
    _tell_once(f"value {name}", f"{name} is left out: {why}")
    return None


def _whole(text: str | None, otherwise: int) -> int:
    with contextlib.suppress(TypeError, ValueError):
        return int(text)  # type: ignore[arg-type]
    return otherwise


def _tell_once(what: str, words: str, *, exc_info: bool = False) -> None:
    if what not in _TOLD:
        _TOLD.add(what)
        log.warning("atoll.report: %s", words, exc_info=exc_info)


_TOLD: set[str] = set()
_REPORTER = Reporter()
