"""ObjectStoreAllReduce: the mean of everybody's tensors, through nothing but an object store."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from atoll.core.errors import BackendError, ValidationError
from atoll.diloco.allreduce import catchup, wire
from atoll.diloco.allreduce import layout as layouts
from atoll.diloco.allreduce.arguments import (
    MOST_REPLICAS,
    check_seconds,
    read_min,
    read_run_id,
    read_weight,
    read_whole,
)
from atoll.diloco.allreduce.catchup import Checkpoint, JoinState
from atoll.diloco.allreduce.codecs import Codec, get_codec
from atoll.diloco.allreduce.exchange import Abandoned, Behind, Exchange
from atoll.diloco.allreduce.feedback import Entry, Feedback
from atoll.diloco.allreduce.keys import Keys, part_of
from atoll.diloco.allreduce.layout import Layout, Vector, difference
from atoll.diloco.allreduce.pace import MIN_GRACE_S, History
from atoll.diloco.allreduce.roster import Roster
from atoll.diloco.allreduce.settle import DONE, FAILED, Ballot, Me, Settler
from atoll.diloco.allreduce.share import Share
from atoll.diloco.allreduce.start import Start, read_start
from atoll.diloco.allreduce.sweep import collect_garbage, refuse_unconditional
from atoll.diloco.allreduce.team import Solo, Team, alike, lead, together
from atoll.diloco.allreduce.upload import Cargo, Parcel
from atoll.diloco.blobs import Blobs, Traffic

log = logging.getLogger("atoll.allreduce")

THREADS = 8
MOST_ROUNDS = 10**8


@dataclass(frozen=True)
class ReduceReport:
    """How one round went, as this replica saw it.

    `roster`: rank to weight, of those whose tensors are in the mean. `is_member`: whether this
    replica's are. `missing`: ranks that were waited for and did not come. `skipped`: rounds that
    were decided and whose means this replica did not read; its caller catches up with `join()`.
    """

    round: int
    attempt: int
    roster: dict[int, float]
    is_member: bool
    missing: list[int]
    skipped: list[int]
    bytes_up: int
    bytes_down: int
    requests: int
    seconds: dict[str, float] = field(default_factory=dict)


class ObjectStoreAllReduce:
    """Averages lists of tensors over the replicas of a run; see docs/decisions/007.

    `allreduce` must be called by every replica, with tensors of the same shapes and types. When
    a replica is missing, the others wait for the grace and go on, as long as `min_replicas` are
    there. The default for that is half of a launch, $ATOLL_WORLD_MIN in a training, else half of
    the world, rounded up. The first round waits, until its timeout, for $ATOLL_STARTED_TOGETHER
    replicas, unless `grace_s` or `min_replicas` is given; it needs more than half of a launch.

    A run is a URI together with `run_id` (default $ATOLL_RUN_ID, $ATOLL_UID, else "run"). A process
    that comes to a run where rounds have been decided goes on with the next one, so a restarted
    replica needs nothing but the same arguments. Independent runs need their own URI or id.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str] | Blobs,
        rank: int,
        world_size: int,
        *,
        min_replicas: int | None = None,
        run_id: str | None = None,
        codec: str | Codec = "fp32",
        down_codec: str | Codec | None = None,
        timeout: float = 600.0,
        grace_s: float | None = None,
        keep_rounds: int = 2,
        carries_late_work: bool | None = None,
        start: Start | None = None,
        team: Team | None = None,
    ) -> None:
        """`grace_s`: how long stragglers and owners are waited for; None learns it from the rounds.

        `carries_late_work`: when this replica was too late for a round, its values are added to
        what it brings to the next one. None: only with a lossy codec, where the same is done with
        everything that the codec left out.

        `start`: how the run begins, for callers with several runs that begin as one. None: as the
        environment says.

        `team`: the processes that are this replica together, all with the same arguments. Each
        brings its share with `allreduce_share`.
        """
        self.world_size = read_whole("world_size", world_size, 1, MOST_REPLICAS)
        self.rank = read_whole("rank", rank, 0, self.world_size - 1)
        least = read_min(min_replicas, self.world_size)
        check_seconds("timeout", timeout)
        if grace_s is not None:
            check_seconds("grace_s", grace_s)
        self.codec = get_codec(codec)
        self.down_codec = get_codec(codec if down_codec is None else down_codec)
        self._codecs = (self.codec.name, self.down_codec.name)
        self.keys = Keys(read_run_id(run_id))
        self._keep_rounds = read_whole("keep_rounds", keep_rounds, 1, MOST_ROUNDS)
        self.blobs = uri if isinstance(uri, Blobs) else Blobs.open(uri)
        self.last_round: ReduceReport | None = None
        self._carries = not self.codec.is_exact if carries_late_work is None else carries_late_work
        self.team: Team = Solo() if team is None else team
        me = Me(self.rank, self.world_size, least, secrets.token_hex(8), timeout)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix=f"allreduce-{self.rank}")
        self._history = History(grace_s, timeout)
        self._beginning = start or read_start(self.world_size, least, min_replicas, grace_s)
        self.settler = self._settler = Settler(
            self.blobs, self.keys, me, self._history, self._pool, self._beginning
        )
        self._me = me
        self._feedback: dict[str, Feedback] = {}
        self._cargo: dict[str, Cargo] = {}
        self._next: int | None = None  # the round to do next; None: ask the store
        self._may_be_late = False
        self._sweeping: Future[None] | None = None
        self._lock = threading.Lock()
        self._has_left = False
        lead(self.team, self._come)

    @property
    def round(self) -> int | None:
        """The round that the next `allreduce` starts with; None until the store was asked."""
        return self._next

    def go_on_at(self, round: int) -> None:
        """The next `allreduce` does `round`; for callers whose state is not from `join()`."""
        self._next = round

    def allreduce(
        self, tensors: Sequence[Any], *, weight: float = 1.0, name: str = ""
    ) -> list[Any]:
        """The weighted mean of the roster, in the order, shapes and types of `tensors`.

        `name` tells apart streams of tensors that take turns (each keeps its own error feedback).
        Raises BelowMinimumWorld when no quorum came within the timeout, ValidationError when the
        replicas' tensors differ.
        """
        if self.team.processes > 1:
            raise ValidationError("tensors", len(tensors), "a process of several has a share only")
        arrays = layouts.as_arrays(tensors)
        mean = self._allreduce(self.describe(arrays, name), arrays, read_weight(weight))
        return layouts.unflatten(mean, arrays)

    def describe(self, tensors: Sequence[Any], name: str = "") -> Layout:
        """The layout of a round with tensors like these."""
        return layouts.describe(
            tensors,
            shards=self.world_size,
            codec=self.codec.name,
            down_codec=self.down_codec.name,
            name=name,
        )

    def share_of(self, layout: Layout) -> Share:
        """What this process carries of a round."""
        return Share(layout, self.team.process, self.team.processes)

    def allreduce_share(self, layout: Layout, row: Vector, *, weight: float = 1.0) -> Vector:
        """The mean of what this process carries, as `row` is of its values; see `share_of`.

        All processes of the replica call it, with the same layout and weight. What fails in one of
        them is raised in all.
        """
        return self._allreduce(layout, [row], read_weight(weight))

    def _allreduce(self, layout: Layout, arrays: Sequence[Any], weight: float) -> Vector:
        with self._lock:
            before, started = self.blobs.usage, time.monotonic()
            feedback = self._feedback_for(layout)
            self._settle_failed(feedback)

            def load() -> _Work:
                cargo = self._cargo.get(layout.name)
                if cargo is None or cargo.layout != layout:
                    cargo = Cargo(self.share_of(layout), self.rank, self.codec)
                    self._cargo[layout.name] = cargo
                cargo.load(arrays, feedback.up)
                if self.codec.needs_finite or self.down_codec.needs_finite:
                    cargo.check_finite()
                return _Work(layout, arrays, cargo, weight, feedback)

            work, _ = alike(self.team, load)
            return self._until_done(work, started, before)

    def save_checkpoint(self, state: bytes | Sequence[Any], round: int | None = None) -> bool:
        """Store the state after `round` (default: the last one done; -1: before the first).

        All replicas hold the same state then, so any of them may store it. Returns False if
        another one already did.
        """
        if round is None:
            round = self.last_round.round if self.last_round else -1
        return catchup.save(self.blobs, self.keys, round, state)

    def load_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, or None."""
        return catchup.load(self.blobs, self.keys)

    def join(self) -> JoinState:
        """Everything a new or restarted replica needs, from the store alone.

        Waits for a round that is being exchanged right now. The next `allreduce` goes on at
        `JoinState.round`.
        """
        with self._lock:
            state = catchup.join(self)
            self._go_on_after(state.round)
            return state

    def read_since(self, following: int) -> Iterator[tuple[Vector, Layout]]:
        """The mean of each round from `following` on, as far as this process carries it.

        The next `allreduce` goes on after them. Raises Outdated or Gone if one is deleted.
        """
        with self._lock:
            for after, mean in catchup.read_since(self, following):
                following = after
                if mean is not None:
                    yield mean
            self._go_on_after(following)

    def _go_on_after(self, following: int) -> None:
        self._next = following
        self._may_be_late = True
        if following:
            self._beginning.begin()

    def state_dict(self) -> dict[str, Any]:
        """The error feedback of this rank, to go on exactly after a planned restart."""
        return {name: feedback.state() for name, feedback in self._feedback.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._feedback = {
            name: Feedback(up=part["up"], down=dict(part["down"])) for name, part in state.items()
        }

    def leave(self, error: BaseException | None = None) -> None:
        """Tell the others that this replica is done, or has failed with `error`.

        They do not wait for it then. Without $ATOLL_STARTED_TOGETHER nothing is told.
        """
        has_left, self._has_left = self._has_left, True
        is_told = not self.team.process and not has_left
        if is_told and not isinstance(error, BackendError):  # a store that fails is not asked
            self._settler.leave(DONE if error is None else FAILED)

    def close(self) -> None:
        """Stop the threads. Objects in the store stay."""
        self.leave()
        if self._sweeping is not None:
            self._sweeping.exception()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave(error)
        self.close()

    def _until_done(self, work: _Work, started: float, before: Traffic) -> Vector:
        begin = self._start() if self._next is None else self._next
        number, skipped = begin, list[int]()
        if self._may_be_late:
            # Rounds already decided are lost to this replica: take part in the next one instead.
            number = max(begin, self._start())
            skipped += range(begin, number)
        # If this call fails, the next one reports all rounds decided since as skipped.
        self._next, self._may_be_late = begin, True
        while True:
            try:
                roster, mean = self._one_round(number, work)
            except Behind as news:
                log.warning("round %d is gone: the run is at round %d", number, news.latest)
                self._bring_again(work, news.roster)
                gone, number = number, self._start()
                skipped += range(gone, number)
                continue
            if mean is None:  # the round is void, by common decision: nobody has its mean
                self._settler.last = None
                number += 1
                continue
            self._next = number + 1
            self._finish(roster, work, skipped, started, before)
            return mean

    def _one_round(self, number: int, work: _Work) -> tuple[Roster, Vector | None]:
        settler = self._settler
        work.uploads.clear()
        self._upload(number, work)
        began = time.monotonic()
        ballot = settler.first_ballot(number)
        while True:
            roster = self._settle(ballot, work)
            work.upload = next((u for u in work.uploads if roster.has(u)), work.upload)
            work.seconds["roster"] = time.monotonic() - began
            if roster.error:
                raise ValidationError("tensors", f"of rank {self.rank}", roster.error)
            if not roster.members:
                return roster, None
            self._refuse_foreign(roster, work.layout)
            exchange = self._exchange(roster, work.layout)
            if roster.has(work.upload):
                work.feedback.entry = Entry(
                    roster, work.upload, self.rank, work.cargo.share, work.left_out
                )
            try:
                mean = self._run(exchange, work)
            except Abandoned as news:
                work.feedback.give_up()
                ballot = settler.next_ballot(roster, news.blame)
                ballot.is_blamed = work.upload in ballot.blamed
                continue
            work.seconds |= exchange.seconds
            return roster, mean

    def _settle(self, ballot: Ballot, work: _Work) -> Roster:
        while True:
            roster = lead(self.team, lambda: self._settler.settle(ballot, work.layout, self.codec))
            if roster is not None:
                return roster
            self._upload(ballot.number, work)

    def _run(self, exchange: Exchange, work: _Work) -> Vector:
        """The mean, once all processes of the replica have theirs.

        A process sees only its share of the places. So what one of them met counts for all: they
        go to the next attempt, or catch up, together.
        """
        if self.team.processes == 1:
            return exchange.run(work.upload, work.cargo, work.feedback)
        mean: list[Vector] = []

        def run() -> wire.Blame | int | None:
            try:
                mean.append(exchange.run(work.upload, work.cargo, work.feedback))
            except Abandoned as news:
                return news.blame
            except Behind as news:
                return news.latest
            return None

        words = together(self.team, run)
        # A note makes the attempt void; being behind is only a reason to catch up.
        for word in sorted(words, key=lambda word: not isinstance(word, wire.Blame)):
            if isinstance(word, wire.Blame):
                raise Abandoned(word)
            if word is not None:
                raise Behind(word, exchange.roster)
        return mean[0]

    def _come(self) -> None:
        refuse_unconditional(self.blobs)
        self._settler.come()

    def _refuse_foreign(self, roster: Roster, mine: Layout) -> None:
        """Raises ValidationError if the roster was decided for tensors unlike this replica's.

        A replica that is in time makes such a round void for everybody instead.
        """
        theirs = Layout.unpack(roster.layout)
        if theirs != mine:
            raise ValidationError(
                "tensors",
                f"of rank {self.rank}",
                f"round {roster.round} went on without it with others: {difference(mine, theirs)}",
            )

    def _upload(self, number: int, work: _Work) -> None:
        """The upload of the replica is whole: process 0 puts its object when all others have."""
        began = time.monotonic()
        team = self.team
        # Every upload has a name of its own, so that what a roster names never changes.
        nonce = lead(team, lambda: secrets.token_hex(8))
        work.upload = self.keys.upload(
            number, self.rank, nonce, work.weight, work.layout.fingerprint, team.processes
        )
        work.uploads.append(work.upload)
        key = part_of(work.upload, team.process)
        encoded = began

        def pack() -> Parcel:
            nonlocal encoded
            parcel = work.cargo.pack(key, self._pool)
            encoded = time.monotonic()
            if team.process:
                self.blobs.put(key, parcel.body())
            return parcel

        packed, sections = alike(team, pack, lambda parcel: parcel.sections)
        lead(team, lambda: self.blobs.put(key, work.cargo.close(key, packed, sections)))
        work.left_out = packed.left_out
        work.seconds |= {"encode": encoded - began, "upload": time.monotonic() - encoded}

    def _finish(
        self, roster: Roster, work: _Work, skipped: list[int], started: float, before: Traffic
    ) -> None:
        is_member = roster.has(work.upload)
        self._may_be_late = not is_member
        if is_member:
            work.feedback.settle()
        elif roster.member(self.rank) is None:
            if self._carries:
                work.feedback.carry(work.cargo.whole())
        else:  # the rank's work is in the round, so that of this process must not come in later
            log.warning("round %d: another process was taken for rank %d", roster.round, self.rank)
        if not roster.missing:
            # How far apart processes start says nothing about the rounds that follow.
            spread = roster.spread_s
            self._history.note_spread(spread if roster.round else min(spread, MIN_GRACE_S / 4))
        self._settler.last = roster
        self._beginning.begin(len(roster.members))
        used = self.blobs.usage.since(before)
        work.seconds["total"] = time.monotonic() - started
        self.last_round = ReduceReport(
            round=roster.round,
            attempt=roster.attempt,
            roster=roster.weights,
            is_member=is_member,
            missing=list(roster.missing),
            skipped=skipped,
            bytes_up=used.bytes_up,
            bytes_down=used.bytes_down,
            requests=used.requests,
            seconds=dict(work.seconds),
        )
        if roster.by == self._me.nonce and not self.team.process:
            self._sweep(roster.round)

    def _settle_failed(self, feedback: Feedback) -> bool:
        """Whether the round in which an earlier try failed was committed with its upload."""
        entry = feedback.entry
        if entry is None:
            return False
        has_residuals = entry.left_out is not None or entry.shards or feedback.up is not None
        # Processes of a replica may differ in what is left out, and must not in what they ask.
        asks = any(together(self.team, lambda: bool(has_residuals)))
        if asks and catchup.was_committed(self, entry):
            feedback.settle()
            return True
        feedback.give_up()
        return False

    def _bring_again(self, work: _Work, roster: Roster) -> None:
        """Make the work ready for a later round, as the mean of `roster` cannot be read any more.

        If the round has the rank's work, only what is owed counts in the later one.
        """
        if roster.has(work.upload):
            is_counted = self._settle_failed(work.feedback)
        else:
            is_counted = roster.member(self.rank) is not None
        if is_counted and self._carries:
            work.cargo.load_owed(work.feedback.up)
        elif is_counted:
            work.cargo.load(work.arrays, work.feedback.up)

    def _sweep(self, number: int) -> None:
        """Delete, in the background, what no replica can need any more."""
        if number % self._keep_rounds or (self._sweeping and not self._sweeping.done()):
            return
        oldest = number - self._keep_rounds
        self._sweeping = self._pool.submit(collect_garbage, self.blobs, self.keys, oldest)

    def _start(self) -> int:
        """The round after the newest one that was decided."""

        def read() -> tuple[tuple[int, int] | None, Roster | None]:
            newest = catchup.latest(self.blobs, self.keys)
            return newest, newest and self._settler.read(self.keys.roster(*newest))

        newest, roster = lead(self.team, read)
        if newest is None:
            return 0
        self._beginning.begin()
        self._settler.last = roster
        if roster is not None:
            self._history.note_spread(min(roster.spread_s, MIN_GRACE_S / 4))
        return newest[0] + 1

    def exchange(self, roster: Roster, layout: Layout) -> Exchange:
        return self._exchange(roster, layout)

    def _exchange(self, roster: Roster, layout: Layout) -> Exchange:
        return Exchange(
            self.blobs,
            self.keys,
            self._me,
            self._history,
            self._pool,
            roster,
            self._readable(layout),
            get_codec(layout.codec) if layout.codec != self.codec.name else self.codec,
            get_codec(layout.down_codec)
            if layout.down_codec != self.down_codec.name
            else self.down_codec,
        )

    def _readable(self, layout: Layout) -> Share:
        """What is read of a round: the own share, or all of one that was cut in another way."""
        cut = (self.world_size, layouts.cells_of(layout.size // self.world_size, self._codecs))
        is_alike = (layout.shards, layout.cells) == cut
        return self.share_of(layout) if is_alike else Share(layout)

    def _feedback_for(self, layout: Layout) -> Feedback:
        feedback = self._feedback.setdefault(layout.name, Feedback())
        if feedback.up is not None and len(feedback.up) != self.share_of(layout).size:
            feedback = self._feedback[layout.name] = Feedback()
        return feedback


@dataclass
class _Work:
    """What one call of `allreduce` brings to its rounds."""

    layout: Layout
    arrays: Sequence[Any]
    cargo: Cargo
    weight: float
    feedback: Feedback
    upload: str = ""
    uploads: list[str] = field(default_factory=list)  # of this round; all hold the same values
    left_out: Vector | None = None
    seconds: dict[str, float] = field(default_factory=dict)
