"""The rounds of all trainings, in the file of the series: one row for each round of a fragment.

What arrives twice counts once. When the rounds of a training take too much room, the oldest are
dropped, and counted.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from atoll.core.rounds import (
    KeptRound,
    OpenRound,
    RoundFacts,
    RoundSummary,
    RoundWord,
    summary_of,
    with_seen,
    with_word,
)

MOST_BYTES = 64 * 2**20  # of the rounds of one training
TRIM_EVERY = 256  # rounds, before it is looked again whether there are too many
MOST_FRAGMENTS = 1000

SCHEMA = """
create table if not exists rounds (
    uid text not null, run text not null, fragment integer not null, round integer not null,
    at real, tokens real not null, size integer not null, body blob not null,
    primary key (uid, run, fragment, round)) without rowid;
create table if not exists dropped_rounds (
    uid text not null, run text not null, rounds integer not null, tokens real not null,
    primary key (uid, run)) without rowid;
create table if not exists read_runs (
    uid text not null, name text not null, following integer not null,
    primary key (uid, name)) without rowid;
create table if not exists finished_runs (uid text primary key) without rowid;
"""
TABLES = ("rounds", "dropped_rounds", "read_runs", "finished_runs")

_BODY = msgspec.json.Decoder(KeptRound)


# Run, fragment, round, time, tokens, body.
RoundRow = tuple[str, int, int, float | None, float, bytes]


class CopiedRounds(msgspec.Struct, frozen=True):
    """The rounds of one training, to go on from elsewhere."""

    rounds: list[RoundRow] = []
    dropped: dict[str, tuple[int, float]] = {}  # by run: how many, and their tokens
    read: dict[str, int] = {}  # by run in the store: the first round that was not read
    is_finished: bool = False


class StoreLook(NamedTuple):
    """What the newest look at the store of a training found; not stored."""

    at: float
    run: str = ""
    waiting: tuple[OpenRound, ...] = ()
    left: dict[int, str] = {}
    why: str = ""  # the rounds are not read from the store


@contextlib.contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("begin immediate")
    try:
        yield
        db.execute("commit")
    except BaseException:
        if db.in_transaction:
            db.execute("rollback")
        raise


class RoundKeeper:
    """All rounds. Its methods may be called from several threads."""

    def __init__(self, db: sqlite3.Connection, lock: threading.RLock) -> None:
        self._db = db
        self._lock = lock
        self._looks: dict[str, StoreLook] = {}
        self._untrimmed: dict[str, int] = {}
        self.changes: Counter[str] = Counter()  # by training, since this process began
        db.executescript(SCHEMA)

    def add_words(self, uid: str, words: Iterable[RoundWord]) -> None:
        """What replicas tell. Within a transaction of the caller."""
        for word in words:
            self._change(
                uid,
                (word.run, word.fragment, word.round),
                lambda kept, word=word: with_word(kept, word),  # type: ignore[misc]
            )

    def add_seen(self, uid: str, rounds: Iterable[RoundFacts], name: str, following: int) -> None:
        """What the rosters of the run `name` in the store say: of all rounds before `following`."""
        with self._lock, transaction(self._db):
            for facts in rounds:
                self._change(
                    uid,
                    (facts.run, facts.fragment, facts.round),
                    lambda kept, facts=facts: with_seen(kept, facts),  # type: ignore[misc]
                )
            self._db.execute(
                "insert or replace into read_runs values (?, ?, ?)", (uid, name, following)
            )

    def following(self, uid: str, name: str) -> int:
        """The first round of a run in the store that was not read yet."""
        with self._lock:
            row = self._db.execute(
                "select following from read_runs where uid = ? and name = ?", (uid, name)
            ).fetchone()
            return 0 if row is None else int(row[0])

    def finish(self, uid: str) -> None:
        """The training is over, and its rounds were read to the end."""
        with self._lock, transaction(self._db):
            self._db.execute("insert or replace into finished_runs values (?)", (uid,))

    def is_finished(self, uid: str) -> bool:
        with self._lock:
            row = self._db.execute("select 1 from finished_runs where uid = ?", (uid,)).fetchone()
            return row is not None

    def note_look(self, uid: str, look: StoreLook) -> None:
        with self._lock:
            self._looks[uid] = look

    def look(self, uid: str) -> StoreLook | None:
        with self._lock:
            return self._looks.get(uid)

    def run_of(self, uid: str) -> str | None:
        """The run whose newest round was decided last."""
        with self._lock:
            row = self._db.execute(
                "select run from rounds where uid = ? group by run "
                "order by max(at) desc, max(round) desc limit 1",
                (uid,),
            ).fetchone()
            return None if row is None else str(row[0])

    def reached(self, uid: str) -> int | None:
        """How many rounds the longest of its runs has; for lists, which ask for nothing else."""
        with self._lock:
            row = self._db.execute("select max(round) from rounds where uid = ?", (uid,)).fetchone()
            return None if row[0] is None else int(row[0]) + 1

    def runs(self, uid: str) -> list[str]:
        """All runs that a round is kept of."""
        with self._lock:
            rows = self._db.execute("select distinct run from rounds where uid = ?", (uid,))
            return [row[0] for row in rows]

    def rounds(
        self, uid: str, run: str, first: int = 0, last: int | None = None, limit: int = 100_000
    ) -> list[KeptRound]:
        """Rounds `first` to `last` in order, those of a round by fragment; the newest `limit`."""
        with self._lock:
            rows = self._db.execute(
                "select body from rounds where uid = ? and run = ? and round >= ? and round <= ? "
                "order by round desc, fragment desc limit ?",
                (uid, run, first, 2**62 if last is None else last, limit),
            ).fetchall()
        return [_BODY.decode(row[0]) for row in reversed(rows)]

    def newest(self, uid: str, run: str) -> list[KeptRound]:
        """The newest round of each fragment."""
        with self._lock:
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
        return [_BODY.decode(row[0]) for row in rows]

    def dropped(self, uid: str, run: str) -> tuple[int, float]:
        """How many rounds are not kept any more, and the tokens of them."""
        with self._lock:
            row = self._db.execute(
                "select rounds, tokens from dropped_rounds where uid = ? and run = ?", (uid, run)
            ).fetchone()
        return (0, 0.0) if row is None else (row[0], row[1])

    def summary(self, uid: str, run: str | None = None) -> RoundSummary | None:
        """How far the run is; None if there was no round."""
        with self._lock:
            look = self._looks.get(uid)
            run = run or self.run_of(uid) or (look.run if look is not None else None)
            if not run:
                return None
            total = self._db.execute(
                "select total(tokens) from rounds where uid = ? and run = ?", (uid, run)
            ).fetchone()[0]
            is_seen = look is not None and look.run == run
            return summary_of(
                run,
                self.newest(uid, run),
                total + self.dropped(uid, run)[1],
                look.at if look is not None and not look.why else None,
                look.waiting if look is not None and is_seen else (),
                look.left if look is not None and is_seen else None,
            )

    def remove(self, uid: str) -> None:
        """Within a transaction of the caller."""
        self._looks.pop(uid, None)
        self._untrimmed.pop(uid, None)
        for table in TABLES:
            self._db.execute(f"delete from {table} where uid = ?", (uid,))

    def uids(self) -> set[str]:
        with self._lock:
            return {row[0] for row in self._db.execute("select distinct uid from rounds")}

    def copied(self, uid: str, most_bytes: int) -> CopiedRounds:
        """The newest rounds of a training in so many bytes, and what is to be known of the rest."""
        rounds: list[RoundRow] = []
        left = most_bytes
        with self._lock:
            dropped = {
                run: (number, tokens)
                for run, number, tokens in self._db.execute(
                    "select run, rounds, tokens from dropped_rounds where uid = ?", (uid,)
                )
            }
            rows = self._db.execute(
                "select run, fragment, round, at, tokens, body from rounds where uid = ? "
                "order by round desc",
                (uid,),
            )
            for row in rows:
                left -= len(row[-1])
                if left >= 0:
                    rounds.append(row)
                else:
                    number, tokens = dropped.get(row[0], (0, 0.0))
                    dropped[row[0]] = (number + 1, tokens + row[4])
            read = dict(
                self._db.execute("select name, following from read_runs where uid = ?", (uid,))
            )
            return CopiedRounds(rounds, dropped, read, is_finished=self.is_finished(uid))

    def restore(self, uid: str, copy: CopiedRounds) -> None:
        """Within a transaction of the caller: of a training that nothing is kept of."""
        self._db.executemany(
            "insert into rounds values (?, ?, ?, ?, ?, ?, ?, ?)",
            [(uid, *row[:5], len(row[-1]), row[-1]) for row in copy.rounds],
        )
        self._db.executemany(
            "insert into dropped_rounds values (?, ?, ?, ?)",
            [(uid, run, *what) for run, what in copy.dropped.items()],
        )
        self._db.executemany(
            "insert into read_runs values (?, ?, ?)",
            [(uid, name, following) for name, following in copy.read.items()],
        )
        if copy.is_finished:
            self._db.execute("insert into finished_runs values (?)", (uid,))

    def _change(
        self, uid: str, key: tuple[str, int, int], change: Callable[[KeptRound], KeptRound]
    ) -> None:
        row = self._db.execute(
            "select body from rounds where uid = ? and run = ? and fragment = ? and round = ?",
            (uid, *key),
        ).fetchone()
        before = KeptRound() if row is None else _BODY.decode(row[0])
        kept = change(before)
        if kept == before:
            return
        facts = kept.facts
        body = msgspec.json.encode(kept)
        at, tokens = (None, 0.0) if facts is None else (facts.at, facts.tokens)
        self._db.execute(
            "insert or replace into rounds values (?, ?, ?, ?, ?, ?, ?, ?)",
            (uid, *key, at, tokens, len(body), body),
        )
        self.changes[uid] += 1
        self._untrimmed[uid] = self._untrimmed.get(uid, 0) + 1
        if self._untrimmed[uid] >= TRIM_EVERY:
            self._untrimmed[uid] = 0
            self._trim(uid)

    def _trim(self, uid: str) -> None:
        """Drops the oldest rounds until nine tenths of the room are enough."""
        (total,) = self._db.execute(
            "select total(size) from rounds where uid = ?", (uid,)
        ).fetchone()
        if total <= MOST_BYTES:
            return
        rows = self._db.execute(
            "select run, fragment, round, tokens, size from rounds where uid = ? order by round",
            (uid,),
        ).fetchall()
        for run, fragment, number, tokens, size in rows:
            if total <= 0.9 * MOST_BYTES:
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
