"""The series of all trainings in one SQLite file of their own.

What arrives is logged in the file as it came and folded in memory. From time to time the folded
series are written and the log is emptied, so that the work stays in proportion to what arrives. A
batch that arrives twice counts once.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sqlite3
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from atoll.agent.metrics import MAX_BATCH, MAX_NAME
from atoll.core.errors import ValidationError
from atoll.core.metrics import MACHINE, MAX_COUNT, MAX_TIME
from atoll.core.model import json_decoder
from atoll.core.ranks import MAX_WARNINGS
from atoll.core.rounds import ReportedRound, is_bounded
from atoll.core.settings import (
    MAX_ENTRIES,
    MAX_KEY_CHARS,
    MAX_VALUE_CHARS,
    Setting,
    Settings,
    check_settings,
)
from atoll.core.spec import RankNumber
from atoll.core.status import Training
from atoll.core.text import escape_control
from atoll.core.weights import ReportedWeights
from atoll.core.weights import is_bounded as is_bounded_version
from atoll.metrics.file import MetricFile
from atoll.metrics.rounds import MAX_FRAGMENTS, RoundTable, read_finished
from atoll.metrics.rounds import SCHEMA as ROUNDS
from atoll.metrics.series import MEAN, MIN_BUCKETS, Series, point_of
from atoll.metrics.weights import SCHEMA as WEIGHTS
from atoll.metrics.weights import WeightTable

# How long ranks have been idle, from what they and their wrappers send.
#
# A wrapper sends for how long its rank has printed nothing and used no CPU; metrics of the rank
# itself arrive here. In memory only: a restarted control plane counts from zero.


@dataclass
class _RankActivity:
    """The last activity of one rank, of any attempt."""

    idle_s: float | None = None  # as its wrapper sent last
    idle_at: float = 0.0  # when that arrived, by the wall clock
    reported_at: float | None = None  # when metrics arrived last, by the monotonic clock


class ReportedIdle:
    """Its methods may be called from several threads."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall = wall
        self._steady = steady
        self._lock = threading.Lock()
        self._activity: dict[str, dict[int, _RankActivity]] = {}  # by training and rank

    def note(self, uid: str, rank: int, *, idle_s: float | None, has_report: bool) -> None:
        with self._lock:
            activity = self._activity.setdefault(uid, {}).setdefault(rank, _RankActivity())
            if idle_s is not None:
                activity.idle_s, activity.idle_at = idle_s, self._wall()
            if has_report:
                activity.reported_at = self._steady()

    def idle_s(self, uid: str, started: Mapping[int, float | None]) -> dict[int, float]:
        """Seconds that each rank has been idle, as far as that is known.

        `started` is when the present attempt of each began: older activity belongs to another one.
        """
        idle = {}
        with self._lock:
            for rank, activity in self._activity.get(uid, {}).items():
                began_at = started.get(rank)
                if activity.idle_s is None or began_at is None or activity.idle_at < began_at:
                    continue
                spans = [activity.idle_s, self._wall() - began_at]
                if activity.reported_at is not None:
                    spans.append(self._steady() - activity.reported_at)
                idle[rank] = max(0.0, min(spans))
        return idle

    def forget(self, uid: str) -> None:
        with self._lock:
            self._activity.pop(uid, None)


MAX_BUCKETS = 2_000  # of one series
MAX_OF_TRAINING = 1_000_000  # buckets of all series of a training
MAX_SERIES = 20_000  # of a training
MAX_CACHED = 64  # trainings in memory
MAX_ROUNDS = 10**9  # a number beyond is a defect, not a round
MAX_MISSED = 10**9  # batches that are counted
MAX_ERROR = 500  # characters
MAX_ID = 200  # characters
MAX_CHANNEL = 1000  # characters of a URI
LOG_BYTES = 4 * 2**20  # of one training, before it is folded into its series

_SCHEMA = """
create table series (
    uid text not null, rank integer not null, process integer not null, name text not null,
    body blob not null, primary key (uid, rank, process, name)) without rowid;
create table batches (
    id integer primary key autoincrement, uid text not null, body blob not null);
create index batches_of_training on batches (uid, id);
create table lives (
    uid text not null, life text not null, n integer not null, primary key (uid, life)
    ) without rowid;
create table finished_reports (uid text primary key) without rowid;
create table losses (
    uid text primary key, skipped integer not null, missed integer not null) without rowid;
"""

_RUN = re.compile(r"[\w.+=@-]{1,200}")

log = logging.getLogger(__name__)


MetricKey = tuple[int, int, str]  # rank, process, name
Counted = Annotated[int, Meta(ge=0, le=MAX_COUNT)]


class _WireBatch(msgspec.Struct, frozen=True):
    """A report of one process of a rank, as `agent/metrics.py` writes it.

    Whatever ranks report comes in here, so this is where its numbers are checked.
    """

    rank: RankNumber
    attempt: Counted
    process: Counted
    id: Annotated[str, Meta(max_length=MAX_ID)]  # of the process
    n: Counted  # 1, 2, …
    metrics: dict[str, list[list[float | str | None]]]
    skipped: Counted = 0
    rounds: list[ReportedRound] = []
    idle_s: Annotated[float, Meta(le=MAX_TIME)] | None = None
    settings: dict[str, Setting] = {}
    weights: list[ReportedWeights] = []


class Batch(NamedTuple):
    """The same with its points checked."""

    rank: int
    attempt: int
    process: int
    source: str
    number: int
    points: dict[str, list[tuple[float, ...]]]
    skipped: int
    rounds: list[ReportedRound]
    idle_s: float | None  # for how long the rank has printed nothing and used no CPU
    settings: Settings
    weights: list[ReportedWeights]


class LabeledSeries(NamedTuple):
    """One series and whose it is."""

    rank: int
    process: int
    name: str
    series: Series


class _TrainingMetrics:
    """The series of one training in memory."""

    def __init__(self) -> None:
        self.series: dict[MetricKey, Series] = {}
        self.numbers: dict[str, int] = {}  # of the newest batch of each process
        self.changed: set[MetricKey] = set()
        self.logged_bytes = 0
        self.sizes: dict[MetricKey, int] = {}  # bytes in the file
        self.skipped = 0
        self.missed = 0  # batches

    def most(self) -> int:
        share = MAX_OF_TRAINING // max(1, len(self.series))
        return max(MIN_BUCKETS, min(MAX_BUCKETS, share))

    def is_new(self, batch: Batch) -> bool:
        return batch.number > self.numbers.get(batch.source, 0)

    def skip(self, count: int) -> None:
        self.skipped = min(self.skipped + count, MAX_COUNT)

    def fold(self, batch: Batch) -> None:
        # Batches are numbered: those in between were sent and did not arrive.
        lost = batch.number - self.numbers.get(batch.source, 0) - 1
        self.missed = min(self.missed + lost, MAX_MISSED)
        self.numbers[batch.source] = batch.number
        self.skip(batch.skipped)
        for name, points in batch.points.items():
            key = (batch.rank, batch.process, name)
            if key not in self.series:
                if len(self.series) >= MAX_SERIES:
                    self.skip(len(points))
                    continue
                self.series[key] = Series()
            self.changed.add(key)
            most, add = self.most(), self.series[key].add
            for point in points:
                add(point, batch.attempt, most)


_DECODER = json_decoder(_WireBatch)


def decode_batch(line: bytes) -> Batch:
    """Raises ValidationError."""
    if len(line) > MAX_BATCH:
        raise ValidationError("report", f"{len(line)} bytes", f"expected {MAX_BATCH} at most")
    try:
        wire = _DECODER.decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        text = line[:60].decode(errors="replace")
        raise ValidationError("report", text, f"not a report: {error}") from error
    skipped = wire.skipped
    names: dict[str, list[tuple[float, ...]]] = {}
    for name, points_sent in wire.metrics.items():
        points = names.setdefault(escape_control(name)[:MAX_NAME], [])
        for parts in points_sent:
            try:
                points.append(point_of(parts))
            except (ValueError, TypeError):  # the others are as good as before
                skipped += 1
    return Batch(
        wire.rank,
        wire.attempt,
        wire.process,
        wire.id,
        wire.n,
        {name: points for name, points in names.items() if points},
        skipped,
        [_checked(report, wire.rank) for report in wire.rounds],
        wire.idle_s if wire.idle_s is None or wire.idle_s >= 0 else None,
        _checked_settings(wire.settings),
        [_checked_version(report) for report in wire.weights],
    )


def _checked(report: ReportedRound, rank: int) -> ReportedRound:
    """Raises ValidationError for a report about another rank, or with numbers out of bounds."""
    facts = report.facts
    key = (report.run, report.fragment, report.round)
    is_good = (
        _RUN.fullmatch(report.run)
        and 0 <= report.fragment < MAX_FRAGMENTS
        and 0 <= report.round < MAX_ROUNDS
        and report.cost.rank == rank
        and (facts is None or (facts.run, facts.fragment, facts.round) == key)
        and is_bounded(report)
    )
    if not is_good:
        raise ValidationError("report", str(report)[:60], "not a report: no such round")
    if facts is not None and facts.error:
        facts = replace(facts, error=escape_control(facts.error)[:MAX_ERROR])
    warnings = [escape_control(messages)[:MAX_ERROR] for messages in report.warnings[:MAX_WARNINGS]]
    return replace(report, facts=facts, warnings=warnings)


def _checked_version(report: ReportedWeights) -> ReportedWeights:
    """Raises ValidationError for numbers out of bounds."""
    if not is_bounded_version(report):
        raise ValidationError("report", str(report)[:60], "not a report: no such version")
    return replace(
        report,
        channel=escape_control(report.channel)[:MAX_CHANNEL],
        id=escape_control(report.id)[:MAX_ID],
        publisher=escape_control(report.publisher)[:MAX_ID],
    )


def _checked_settings(settings: Settings) -> Settings:
    """With names and texts that can be shown, and cut where they are too long."""
    bounded = {
        escape_control(name).replace("=", "-")[:MAX_KEY_CHARS]: escape_control(value)[
            :MAX_VALUE_CHARS
        ]
        if isinstance(value, str)
        else value
        for name, value in list(settings.items())[:MAX_ENTRIES]
        if name
    }
    check_settings("settings", bounded)
    return bounded


CatchUp = Callable[[Training], Awaitable[None]]


class MetricStore:
    """All series. Its methods may be called from several threads."""

    def __init__(self, path: Path | str) -> None:
        self._cache: OrderedDict[str, _TrainingMetrics] = OrderedDict()
        self._file = MetricFile(path, _SCHEMA + ROUNDS + WEIGHTS)
        self.rounds = RoundTable(self._file)
        self.weights = WeightTable(self._file)
        self._file.on_empty = self._write_all
        self._finished = read_finished(self._file, "finished_reports")
        self.idle_tracker = ReportedIdle()
        # By training: what ranks reported since this process began. Replaced whole, so that the
        # event loop may read it without a lock.
        self.settings: dict[str, Settings] = {}
        self._setting_ranks: dict[str, dict[str, int]] = {}  # the rank that reported each
        self.catch_up: CatchUp | None = None  # of the collector

    @property
    def _db(self) -> sqlite3.Connection:
        return self._file.db

    @property
    def trouble(self) -> str:
        """Why the last write failed; empty if it did not."""
        return self._file.trouble

    @property
    def notes(self) -> Sequence[str]:
        """What was lost since this process began, in sentences."""
        return self._file.notes

    def check(self) -> None:
        """Puts things right if the file was deleted or replaced. Raises Temporary."""
        self._file.check()

    def close(self) -> None:
        self._file.close()

    def take(self, uid: str, lines: Iterable[bytes]) -> int:
        """Stores these batches in one transaction. Returns how many of them were new.

        Raises ValidationError if one is malformed; then none is stored.
        """
        batches = [(line, decode_batch(line)) for line in lines]
        with self._file:
            cached = self._of(uid)
            numbers: dict[str, int] = {}
            new = []
            for line, batch in batches:
                if cached.is_new(batch) and batch.number > numbers.get(batch.source, 0):
                    numbers[batch.source] = batch.number
                    new.append((line, batch))
            with self._file.transaction():
                self._db.executemany(
                    "insert into batches (uid, body) values (?, ?)",
                    [(uid, line) for line, _ in new],
                )
                for _, batch in new:
                    self.rounds.add_reports(uid, batch.rounds)
                    self.weights.add_reports(uid, batch.rank, batch.attempt, batch.weights)
            for _, batch in batches:  # of old ones, too: a new process may not have seen them
                self._note_settings(uid, batch)
            for line, batch in new:
                self._note_activity(uid, batch)
                cached.fold(batch)
                cached.logged_bytes += len(line)
            if cached.logged_bytes > max(LOG_BYTES, sum(cached.sizes.values())):
                self._write(uid, cached)
            return len(new)

    def series(
        self, uid: str, names: Collection[str] = (), ranks: Collection[int] = ()
    ) -> list[LabeledSeries]:
        """A copy of the series of a training, in order of name, rank and process; all, or those of
        these names and ranks."""
        with self._file:
            cached = self._of(uid)
            wanted = [
                (name, rank, process)
                for rank, process, name in cached.series
                if (not names or name in names) and (not ranks or rank in ranks)
            ]
            return [
                LabeledSeries(rank, process, name, cached.series[rank, process, name].copy())
                for name, rank, process in sorted(wanted)
            ]

    def keys(self, uid: str) -> list[MetricKey]:
        with self._file:
            return list(self._of(uid).series)

    def first(self, uid: str, name: str) -> Series | None:
        """A copy of this series of the lowest rank that has one. Of a training that is not in
        memory, nothing else is read: lists of thousands ask for it."""
        with self._file:
            if uid not in self._cache and not self._is_logged(uid):
                row = self._db.execute(
                    "select body from series where uid = ? and name = ? order by rank, process "
                    "limit 1",
                    (uid, name),
                ).fetchone()
                with contextlib.suppress(ValueError, zlib.error):  # damaged
                    return None if row is None else Series.unpack(row[0])
                return None
            cached = self._of(uid).series
            keys = [key for key in cached if key[2] == name]
            return cached[min(keys)].copy() if keys else None

    def newest_values(self, uid: str, names: Collection[str]) -> dict[MetricKey, float]:
        """The newest value of each series of these names."""
        with self._file:
            return {
                key: series.columns[MEAN][-1]
                for key, series in self._of(uid).series.items()
                if key[2] in names and len(series)
            }

    def _note_activity(self, uid: str, batch: Batch) -> None:
        has_report = any(not name.startswith(MACHINE) for name in batch.points)
        self.idle_tracker.note(
            uid, batch.rank, idle_s=batch.idle_s, has_report=has_report or bool(batch.rounds)
        )

    def _note_settings(self, uid: str, batch: Batch) -> None:
        """Of two ranks that report the same setting the lower one counts."""
        if not batch.settings:
            return
        known, ranks = dict(self.settings.get(uid, {})), self._setting_ranks.setdefault(uid, {})
        for name, value in batch.settings.items():
            is_new = name not in known and len(known) < MAX_ENTRIES
            if is_new or batch.rank <= ranks.get(name, -1):
                known[name], ranks[name] = value, batch.rank
        if known != self.settings.get(uid):
            self.settings[uid] = known
            self.rounds.on_news(uid)

    def _is_logged(self, uid: str) -> bool:
        query = "select 1 from batches where uid = ? limit 1"
        return self._db.execute(query, (uid,)).fetchone() is not None

    def skipped(self, uid: str) -> int:
        """How many metrics were not stored, by a rank or here."""
        with self._file:
            return self._of(uid).skipped

    def missed(self, uid: str) -> int:
        """How many batches of a rank were lost on the way, or with an earlier file."""
        with self._file:
            return self._of(uid).missed

    def remove(self, uid: str) -> None:
        with self._file, self._file.transaction():
            self._cache.pop(uid, None)
            self.idle_tracker.forget(uid)
            self._finished.discard(uid)
            self.settings.pop(uid, None)
            self._setting_ranks.pop(uid, None)
            for table in ("series", "batches", "lives", "finished_reports", "losses"):
                self._db.execute(f"delete from {table} where uid = ?", (uid,))
            self.rounds.remove(uid)
            self.weights.remove(uid)

    def finish(self, uid: str) -> None:
        """The training is over, and all that its ranks left behind was read."""
        with self._file, self._file.transaction():
            self._db.execute("insert or replace into finished_reports values (?)", (uid,))
            self._finished.add(uid)

    def is_finished(self, uid: str) -> bool:
        """Waits for nobody: the event loop asks."""
        return uid in self._finished

    def uids(self) -> set[str]:
        with self._file:
            rows = self._db.execute(
                "select distinct uid from series union select distinct uid from batches"
            )
            return {row[0] for row in rows} | self.rounds.uids() | self.weights.uids()

    def _of(self, uid: str) -> _TrainingMetrics:
        cached = self._cache.get(uid)
        if cached is None:
            cached = self._cache[uid] = self._read(uid)
            while len(self._cache) > MAX_CACHED:
                oldest, left = next(iter(self._cache.items()))
                self._write(oldest, left)
                del self._cache[oldest]
        self._cache.move_to_end(uid)
        return cached

    def _read(self, uid: str) -> _TrainingMetrics:
        cached = _TrainingMetrics()
        rows = self._db.execute(
            "select rank, process, name, body from series where uid = ?", (uid,)
        )
        for rank, process, name, body in rows:
            try:
                cached.series[rank, process, name] = Series.unpack(body)
            except (ValueError, zlib.error) as error:  # damaged: it hides no other
                log.warning("%s of rank %s of training %s is left out: %s", name, rank, uid, error)
            cached.sizes[rank, process, name] = len(body)
        cached.numbers = dict(
            self._db.execute("select life, n from lives where uid = ?", (uid,)).fetchall()
        )
        row = self._db.execute(
            "select skipped, missed from losses where uid = ?", (uid,)
        ).fetchone()
        if row is not None:
            cached.skipped, cached.missed = row
        for (body,) in self._db.execute(
            "select body from batches where uid = ? order by id", (uid,)
        ):
            cached.logged_bytes += len(body)
            try:
                batch = decode_batch(body)
            except ValidationError as error:
                log.warning("training %s: %s", uid, error)
                continue
            if cached.is_new(batch):
                cached.fold(batch)
        return cached

    def _write_all(self) -> None:
        """What is in memory outlives the file that it came from."""
        self.rounds.recount()
        for uid, cached in self._cache.items():
            cached.changed, cached.sizes = set(cached.series), {}
            self._write(uid, cached)

    def _write(self, uid: str, cached: _TrainingMetrics) -> None:
        """Replaces the log by the folded series."""
        if not cached.changed:
            return
        changed = list(cached.changed)
        rows = [(uid, *key, cached.series[key].pack()) for key in changed]
        with self._file.transaction():
            self._db.executemany("insert or replace into series values (?, ?, ?, ?, ?)", rows)
            self._db.executemany(
                "insert or replace into lives values (?, ?, ?)",
                [(uid, source, n) for source, n in cached.numbers.items()],
            )
            self._db.execute(
                "insert or replace into losses values (?, ?, ?)",
                (uid, cached.skipped, cached.missed),
            )
            self._db.execute("delete from batches where uid = ?", (uid,))
        cached.changed.clear()
        cached.logged_bytes = 0
        cached.sizes |= {key: len(row[-1]) for key, row in zip(changed, rows, strict=True)}
