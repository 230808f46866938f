"""`atoll.report`: figures that a rank tells of itself, such as its loss.

A call only appends to a list. A thread hands the figures on, to the place that the variable
`ATOLL_REPORTS` names (`rank/sinks.py`). It never raises; what cannot be handed on yet is merged, so
that memory is bounded, and tried again.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from atoll.rank.sinks import EVERY_S, BatchRefused, sink_of

SOON_S = 0.1
MAX_NAMES = 100
MAX_NAME = 64  # characters
MAX_WAITING = 65_536  # calls between two rounds of the thread
MAX_ROUNDS = 1000  # that wait to be handed on; older ones are left out
ROUNDS_A_BATCH = 50
MOST_BATCH = 2**20  # bytes
POINTS_A_NAME = 60  # in one batch; more are merged

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
    except Exception:  # a figure must never end a training
        _tell_once("report", "a report was left out", exc_info=True)


def report_round(word: Mapping[str, Any]) -> None:
    """Tells of an outer round, as `core/rounds.py:RoundWord` has it. Never raises."""
    try:
        _REPORTER.add_round(word)
    except Exception:
        _tell_once("round", "a round was left out", exc_info=True)


class Reporter:
    """The figures of one process, until they are handed on."""

    def __init__(self) -> None:
        self._pid = 0

    def add(self, step: int | None, figures: Mapping[str, Any]) -> None:
        if self._pid != os.getpid():
            self._begin(os.environ)
        if self._sink is None:
            return
        if len(self._calls) >= MAX_WAITING:
            self._skipped += len(figures)
            return
        known = {name: _kept(name, value) for name, value in figures.items()}
        self._calls.append((time.time(), None if step is None else int(step), known))

    def add_round(self, word: Mapping[str, Any]) -> None:
        if self._pid != os.getpid():
            self._begin(os.environ)
        if self._sink is not None:
            self._rounds.append(word)

    def _begin(self, environment: Mapping[str, str]) -> None:
        """In this process: a fork has none of the threads, nor any figures to tell twice."""
        self._pid = os.getpid()
        self._calls: deque[tuple[float, int | None, dict[str, Any]]] = deque()
        self._held: dict[str, list[Point]] = {}  # taken from the calls, and not handed on yet
        self._rounds: deque[Mapping[str, Any]] = deque(maxlen=MAX_ROUNDS)
        self._telling: list[Mapping[str, Any]] = []  # taken from them, and not handed on yet
        self._names: set[str] = set()
        self._skipped = 0  # figures that were not kept
        self._number = 0  # of batches
        self._sending: bytes | None = None  # the batch that is on its way
        self._handing = threading.Lock()
        self._life = Teller.of(environment)
        life = self._life
        owner = f"{life.rank}.{life.attempt}.{life.process}.{life.id}"
        self._sink = sink_of(environment, owner)
        if self._sink is not None:
            threading.Thread(target=self._run, name="atoll-report", daemon=True).start()
            atexit.register(self.flush)

    def _run(self) -> None:
        pause_s = SOON_S  # a rank may be killed within its first second
        while True:
            time.sleep(pause_s)
            pause_s = self.flush()

    def flush(self) -> float:
        """Hands on what there is. Returns the seconds until it is worth trying again."""
        if self._sink is None or self._pid != os.getpid():
            return EVERY_S
        with self._handing:
            try:
                self._take()
                if self._sending is None:
                    self._sending = self._next_batch()
                if self._sending is None:
                    return EVERY_S
                # Until it has arrived, it stays as it is: it may have, and only its answer is lost.
                pause_s = self._sink.hand_on(self._sending)
                self._sending = None
                return pause_s
            except BatchRefused as error:
                self._sending = None
                _tell_once("refused", f"figures are left out: {error}")
            except OSError as error:
                _tell_once("sink", f"figures are held back: {error}")
            except Exception:
                self._sending = None
                _tell_once("flush", "figures cannot be handed on", exc_info=True)
            return self._sink.patience_s

    def _next_batch(self) -> bytes | None:
        count = ROUNDS_A_BATCH
        while True:
            rounds = self._telling[:count]
            if not self._held and not self._skipped and not rounds:
                return None
            batch = batch_of(self._life, self._number + 1, self._held, self._skipped, rounds)
            if len(batch) <= MOST_BATCH or not rounds:
                break
            if count == 1:
                self._telling.pop(0)
                _tell_once("round", "a round is left out: its roster is too large")
            count = max(1, count // 2)
        del self._telling[: len(rounds)]
        self._held, self._skipped, self._number = {}, 0, self._number + 1
        return batch

    def _take(self) -> None:
        while self._rounds:
            self._telling.append(self._rounds.popleft())
        del self._telling[:-MAX_ROUNDS]
        for _ in range(len(self._calls)):
            at, step, figures = self._calls.popleft()
            for name, value in figures.items():
                number = _number(name, value)
                if number is not None:
                    self._hold(name[:MAX_NAME], [at, step, number])
        for name, points in self._held.items():
            if len(points) > POINTS_A_NAME:
                self._held[name] = merged(points, POINTS_A_NAME)

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
) -> bytes:
    """One line. Numbers that JSON does not have are text: `nan`, `inf`, `-inf`."""
    document = {
        **life._asdict(),
        "n": number,
        "skipped": skipped,
        "figures": {
            name: [[_plain(part) for part in point] for point in points]
            for name, points in figures.items()
        },
        **({"rounds": list(rounds)} if rounds else {}),
    }
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def merged(points: Sequence[Point], count: int) -> list[Point]:
    """At most `count` points: neighbours become one, which keeps their least and largest."""
    width = -(-len(points) // count)
    return [_merge(points[at : at + width]) for at in range(0, len(points), width)]


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


def _kept(name: str, value: Any) -> Any:
    """The value as it is now. What lies on a device is read by the thread, not waited for here."""
    if type(value) in (int, float):
        return value
    device = getattr(value, "device", None)
    if device is not None and getattr(device, "type", "cpu") != "cpu":
        return value.detach().clone()
    return _number(name, value)


def _number(name: str, value: Any) -> float | None:
    """None, and a line in the log, if it is none."""
    try:
        return None if value is None else float(value)
    except Exception as error:  # of whatever library the value is from
        _tell_once(f"value {name}", f"{name} is left out: {error}")
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
