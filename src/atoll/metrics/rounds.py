"""The rounds of all trainings, in the file of the series: one row for each round of a fragment.

What arrives twice counts once. When the rounds of a training take too much space, the oldest are
dropped, and counted.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import sqlite3
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from atoll.core.errors import Temporary
from atoll.core.model import json_decoder
from atoll.core.ranks import ABSENT_ROUNDS, merge_warnings
from atoll.core.rounds import (
    OpenRound,
    RankRounds,
    ReportedRound,
    RoundCost,
    RoundFacts,
    RoundSummary,
    SlowRank,
    StoredRound,
    is_bounded,
    summary_of,
    with_observed,
    with_report,
)
from atoll.core.slow_ranks import SLOW_ROUNDS, slow_ranks
from atoll.core.status import ObservedRounds
from atoll.metrics.file import MetricFile

MAX_BYTES = 64 * 2**20  # of the rounds of one training
TRIM_EVERY = 256  # new rounds between two checks of the total
MAX_FRAGMENTS = 1000  # of a run: far above any model, so that reports cannot fill the file

SCHEMA = """
create table rounds (
    uid text not null, run text not null, fragment integer not null, round integer not null,
    at real, tokens real not null, size integer not null, body blob not null,
    primary key (uid, run, fragment, round)) without rowid;
create table dropped_rounds (
    uid text not null, run text not null, rounds integer not null, tokens real not null,
    primary key (uid, run)) without rowid;
create table read_runs (
    uid text not null, name text not null, following integer not null,
    primary key (uid, name)) without rowid;
create table finished_runs (uid text primary key) without rowid;
"""
TABLES = ("rounds", "dropped_rounds", "read_runs", "finished_runs")

log = logging.getLogger(__name__)

_BODY = json_decoder(StoredRound)


class StoreObservation(NamedTuple):
    """The newest observation of the store of a training; not stored."""

    at: float
    run: str = ""
    waiting: tuple[OpenRound, ...] = ()
    departures: dict[int, str] = {}
    problem: str = ""  # the rounds are not read from the store


class RunTally:
    """Counts of all rounds, also of those that the file has dropped."""

    def __init__(self) -> None:
        self._taken: Counter[tuple[int, int]] = Counter()  # by rank and fragment
        self._last: dict[int, int] = {}
        self._bad: dict[int, int] = {}
        self._left: set[int] = set()
        self._times: dict[int, float] = {}  # of the newest rounds
        self._warnings: list[str] = []
        # Rounds and their costs, newest last, by rank and process.
        self._costs: dict[tuple[int, int], deque[tuple[int, RoundCost]]] = {}
        self._slow: list[SlowRank] | None = None  # None: costs have come since they were compared

    def add_cost(self, round: int, cost: RoundCost) -> None:
        own = self._costs.setdefault((cost.rank, cost.process), deque(maxlen=SLOW_ROUNDS))
        own.append((round, cost))
        self._slow = None

    @property
    def slow(self) -> list[SlowRank]:
        """Of the ranks that were in one of the newest rounds."""
        if self._slow is None:
            self._slow = self._find_slow()
        return self._slow

    def _find_slow(self) -> list[SlowRank]:
        newest = max((own[-1][0] for own in self._costs.values()), default=0)
        recent: dict[int, list[RoundCost]] = {}
        for (rank, _), own in self._costs.items():
            if own[-1][0] > newest - SLOW_ROUNDS:
                recent.setdefault(rank, []).extend(cost for _, cost in own)
        return slow_ranks(recent)

    def replace(self, before: StoredRound | None, stored_round: StoredRound) -> None:
        """Counts a round that is new, or of which more is known than before."""
        self._warnings = merge_warnings(self._warnings, stored_round.warnings)
        old, facts = None if before is None else before.facts, stored_round.facts
        if old is not None:
            self._taken.subtract((rank, old.fragment) for rank in old.members)
        if facts is None:
            return
        self._taken.update((rank, facts.fragment) for rank in facts.members)
        for rank in facts.members:
            self._last[rank] = max(self._last.get(rank, -1), facts.round)
            if rank not in facts.leaving:
                self._left.discard(rank)
        self._left.update(facts.leaving)
        for rank in facts.bad:
            self._bad[rank] = min(self._bad.get(rank, facts.round), facts.round)
        if facts.at is not None:
            self._times[facts.round] = min(self._times.get(facts.round, facts.at), facts.at)
        if len(self._times) > 2 * ABSENT_ROUNDS:
            newest = heapq.nlargest(ABSENT_ROUNDS, self._times)
            self._times = {number: self._times[number] for number in newest}

    @property
    def leavers(self) -> list[int]:
        return sorted(self._left)

    @property
    def ranks(self) -> list[RankRounds]:
        """A round of several fragments counts once, though some may have been missed."""
        rounds: dict[int, int] = {}
        for (rank, _), count in self._taken.items():
            rounds[rank] = max(rounds.get(rank, 0), count)
        return [
            RankRounds(rank=rank, rounds=count, last=self._last[rank])
            for rank, count in sorted(rounds.items())
            if count
        ]

    @property
    def observed(self) -> ObservedRounds:
        newest = heapq.nlargest(ABSENT_ROUNDS, self._times)
        return ObservedRounds(
            newest=max(self._last.values(), default=-1),
            recent_since=self._times[newest[-1]] if len(newest) == ABSENT_ROUNDS else None,
            last=dict(self._last),
            left=self.leavers,
            bad=dict(self._bad),
            warnings=list(self._warnings),
        )


def read_finished(file: MetricFile, table: str) -> set[str]:
    """The trainings that a table names; none if that shows the file to be damaged."""
    with contextlib.suppress(Temporary), file:
        return {uid for (uid,) in file.db.execute(f"select uid from {table}")}
    return set()


class RoundTable:
    """All rounds. Its methods may be called from several threads."""

    def __init__(self, file: MetricFile) -> None:
        self._file = file
        self._observations: dict[str, StoreObservation] = {}
        self._untrimmed: dict[str, int] = {}
        self._tallies: dict[tuple[str, str], RunTally] = {}  # by training and run
        # By training. Replaced whole, so that the event loop may read it without a lock.
        self._observed: dict[str, ObservedRounds] = {}
        self.on_news: Callable[[str], None] = lambda uid: None  # from any thread
        self._finished = read_finished(file, "finished_runs")
        file.on_rollback = self.recount

    def recount(self) -> None:
        """The file has lost rounds: they are counted again."""
        self._tallies.clear()

    @property
    def _db(self) -> sqlite3.Connection:
        return self._file.db

    def observed(self, uid: str) -> ObservedRounds | None:
        """What the rounds since this process began show. Waits for nobody: the event loop asks."""
        return self._observed.get(uid)

    def _tally(self, uid: str, run: str) -> RunTally:
        """Within a lock of the caller."""
        tally = self._tallies.get((uid, run))
        if tally is None:
            tally = self._tallies[uid, run] = RunTally()
            for stored in self.rounds(uid, run):
                tally.replace(None, stored)
                if stored.facts is not None:
                    for cost in stored.costs:
                        tally.add_cost(stored.facts.round, cost)
        return tally

    def _note(self, uid: str, tally: RunTally) -> None:
        before, observed = self._observed.get(uid), tally.observed
        self._observed[uid] = observed
        is_due = (
            observed.newest // ABSENT_ROUNDS != (before.newest if before else 0) // ABSENT_ROUNDS
        )
        is_new = before is None or (observed.warnings, observed.bad) != (
            before.warnings,
            before.bad,
        )
        if is_new or is_due:
            self.on_news(uid)

    def add_reports(self, uid: str, reports: Iterable[ReportedRound]) -> None:
        """Adds what replicas report, within a transaction of the caller."""
        for report in reports:
            self._change(
                uid,
                (report.run, report.fragment, report.round),
                lambda stored, report=report: with_report(stored, report),  # type: ignore[misc]
            )

    def add_manifests(
        self, uid: str, rounds: Iterable[RoundFacts], name: str, following: int
    ) -> None:
        """What the manifests of the run `name` in the store say, of rounds before `following`."""
        with self._file, self._file.transaction():
            for facts in rounds:
                if not is_bounded(facts):  # ranks can write anything there
                    log.warning("round %.40s of training %s is left out", facts.round, uid)
                    continue
                self._change(
                    uid,
                    (facts.run, facts.fragment, facts.round),
                    lambda stored, facts=facts: with_observed(stored, facts),  # type: ignore[misc]
                )
            self._db.execute(
                "insert or replace into read_runs values (?, ?, ?)", (uid, name, following)
            )

    def following(self, uid: str, name: str) -> int:
        """The first round of a run in the store that was not read yet."""
        with self._file:
            row = self._db.execute(
                "select following from read_runs where uid = ? and name = ?", (uid, name)
            ).fetchone()
            return 0 if row is None else int(row[0])

    def finish(self, uid: str) -> None:
        """The training is over, and its rounds were read to the end."""
        with self._file, self._file.transaction():
            self._db.execute("insert or replace into finished_runs values (?)", (uid,))
            self._finished.add(uid)

    def is_finished(self, uid: str) -> bool:
        """Waits for nobody: the event loop asks."""
        return uid in self._finished

    def set_observation(self, uid: str, observation: StoreObservation) -> None:
        with self._file:
            self._observations[uid] = observation

    def observation(self, uid: str) -> StoreObservation | None:
        with self._file:
            return self._observations.get(uid)

    def run_of(self, uid: str) -> str | None:
        """The run whose newest round was decided last."""
        with self._file:
            row = self._db.execute(
                "select run from rounds where uid = ? group by run "
                "order by max(at) desc, max(round) desc limit 1",
                (uid,),
            ).fetchone()
            return None if row is None else str(row[0])

    def reached(self, uid: str) -> int | None:
        """How many rounds the longest of its runs has; for lists, which ask for nothing else."""
        with self._file:
            row = self._db.execute("select max(round) from rounds where uid = ?", (uid,)).fetchone()
            return None if row[0] is None else int(row[0]) + 1

    def commits(self, uid: str) -> tuple[int, list[float]]:
        """The first stored round of its newest run, and the commit times from there on."""
        with self._file:
            rows = self._db.execute(
                "select round, max(at) from rounds where uid = ? and run = ? and at is not null "
                "group by round order by round",
                (uid, self.run_of(uid)),
            ).fetchall()
        return (rows[0][0], [row[1] for row in rows]) if rows else (0, [])

    def runs(self, uid: str) -> list[str]:
        """All runs with a stored round."""
        with self._file:
            rows = self._db.execute("select distinct run from rounds where uid = ?", (uid,))
            return [row[0] for row in rows]

    def rounds(
        self, uid: str, run: str, first: int = 0, last: int | None = None, limit: int = 100_000
    ) -> list[StoredRound]:
        """Rounds `first` to `last` in order, those of a round by fragment; the newest `limit`."""
        with self._file:
            rows = self._db.execute(
                "select body from rounds where uid = ? and run = ? and round >= ? and round <= ? "
                "order by round desc, fragment desc limit ?",
                (uid, run, first, 2**62 if last is None else last, limit),
            ).fetchall()
        return _readable(row[0] for row in reversed(rows))

    def newest(self, uid: str, run: str) -> list[StoredRound]:
        """The newest round of each fragment."""
        with self._file:
            tops = self._db.execute(
                "select fragment, max(round) from rounds where uid = ? and run = ? "
                "group by fragment",
                (uid, run),
            ).fetchall()
            rows = [
                self._db.execute(
                    "select body from rounds where uid = ? and run = ? and fragment = ? "
                    "and round = ?",
                    (uid, run, *top),
                ).fetchone()
                for top in tops
            ]
        return _readable(row[0] for row in rows)

    def dropped(self, uid: str, run: str) -> tuple[int, float]:
        """The number of dropped rounds, and their tokens."""
        with self._file:
            row = self._db.execute(
                "select rounds, tokens from dropped_rounds where uid = ? and run = ?", (uid, run)
            ).fetchone()
        return (0, 0.0) if row is None else (row[0], row[1])

    def summary(self, uid: str, run: str | None = None) -> RoundSummary | None:
        """How far the run is; None if there was no round."""
        with self._file:
            observation = self._observations.get(uid)
            run = run or self.run_of(uid) or (observation.run if observation is not None else None)
            if not run:
                return None
            total = self._db.execute(
                "select total(tokens) from rounds where uid = ? and run = ?", (uid, run)
            ).fetchone()[0]
            tally = self._tally(uid, run)
            is_observed = observation is not None and observation.run == run
            return summary_of(
                run,
                self.newest(uid, run),
                total + self.dropped(uid, run)[1],
                observation.at if observation is not None and not observation.problem else None,
                observation.waiting if observation is not None and is_observed else (),
                observation.departures if observation is not None and is_observed else None,
                tally.ranks,
                tally.leavers,
                tally.slow,
            )

    def remove(self, uid: str) -> None:
        """Within a transaction of the caller."""
        self._observations.pop(uid, None)
        self._untrimmed.pop(uid, None)
        self._observed.pop(uid, None)
        for key in [key for key in self._tallies if key[0] == uid]:
            del self._tallies[key]
        self._finished.discard(uid)
        for table in TABLES:
            self._db.execute(f"delete from {table} where uid = ?", (uid,))

    def uids(self) -> set[str]:
        with self._file:
            return {row[0] for row in self._db.execute("select distinct uid from rounds")}

    def _change(
        self, uid: str, key: tuple[str, int, int], change: Callable[[StoredRound], StoredRound]
    ) -> None:
        row = self._db.execute(
            "select body from rounds where uid = ? and run = ? and fragment = ? and round = ?",
            (uid, *key),
        ).fetchone()
        before = next(iter(_readable(row or ())), StoredRound())
        stored = change(before)
        if stored == before:
            return
        facts = stored.facts
        tally = self._tally(uid, key[0])  # before this round is in the file
        body = msgspec.json.encode(stored)
        at, tokens = (None, 0.0) if facts is None else (facts.at, facts.tokens)
        self._db.execute(
            "insert or replace into rounds values (?, ?, ?, ?, ?, ?, ?, ?)",
            (uid, *key, at, tokens, len(body), body),
        )
        tally.replace(before, stored)
        for cost in {*stored.costs} - {*before.costs}:
            tally.add_cost(key[2], cost)
        self._note(uid, tally)
        self._untrimmed[uid] = self._untrimmed.get(uid, 0) + 1
        if self._untrimmed[uid] >= TRIM_EVERY:
            self._untrimmed[uid] = 0
            self._trim(uid)

    def _trim(self, uid: str) -> None:
        """Drops the oldest rounds until nine tenths of the space are enough."""
        (total,) = self._db.execute(
            "select total(size) from rounds where uid = ?", (uid,)
        ).fetchone()
        if total <= MAX_BYTES:
            return
        rows = self._db.execute(
            "select run, fragment, round, tokens, size from rounds where uid = ? order by round",
            (uid,),
        ).fetchall()
        for run, fragment, number, tokens, size in rows:
            if total <= 0.9 * MAX_BYTES:
                return
            total -= size
            self._db.execute(
                "delete from rounds where uid = ? and run = ? and fragment = ? and round = ?",
                (uid, run, fragment, number),
            )
            self._db.execute(
                "insert into dropped_rounds values (?, ?, 1, ?) on conflict (uid, run) do update "
                "set rounds = rounds + 1, tokens = tokens + excluded.tokens",
                (uid, run, tokens),
            )


def _readable(bodies: Iterable[bytes]) -> list[StoredRound]:
    """One that is damaged hides no other."""
    rounds = []
    for body in bodies:
        try:
            rounds.append(_BODY.decode(body))
        except msgspec.MsgspecError as error:
            log.warning("a round is left out: %s", error)
    return rounds
