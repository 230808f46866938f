"""ObjectStoreAllReduce: the mean of everybody's tensors, through nothing but an object store."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, Self

from atoll.core.errors import BackendError, DistributedError, ValidationError
from atoll.diloco import packing
from atoll.diloco.allreduce import catchup
from atoll.diloco.allreduce import layout as layouts
from atoll.diloco.allreduce.arguments import (
    MAX_REPLICAS,
    MAX_ROUNDS,
    as_lists,
    check_seconds,
    read_complete,
    read_min,
    read_round,
    read_run_id,
    read_weight,
)
from atoll.diloco.allreduce.catchup import Checkpoint, JoinState
from atoll.diloco.allreduce.exchange import Abandoned, Behind, Exchange, run_as_one
from atoll.diloco.allreduce.feedback import Feedback
from atoll.diloco.allreduce.keys import COMPLETE, Keys, part_of
from atoll.diloco.allreduce.layout import Layout
from atoll.diloco.allreduce.manifest import Manifest, PastRound
from atoll.diloco.allreduce.note import UploadHeader
from atoll.diloco.allreduce.pace import MIN_GRACE_S, History
from atoll.diloco.allreduce.settle import (
    DONE,
    FAILED,
    LEFT,
    Decider,
    Decision,
    Left,
    Me,
    refuse_foreign,
)
from atoll.diloco.allreduce.share import Share
from atoll.diloco.allreduce.start import Start, read_start
from atoll.diloco.allreduce.sweep import StoreSweep, refuse_unconditional
from atoll.diloco.allreduce.team import Solo, Team, is_equal, lead, together
from atoll.diloco.allreduce.upload import Parcel, Payload
from atoll.diloco.allreduce.work import (
    EncodedMean,
    JointWork,
    ReduceReport,
    TensorWork,
    Values,
    Work,
    is_counted,
    settle_failed,
)
from atoll.diloco.codecs import Codec, get_codec
from atoll.diloco.packing import Vector
from atoll.objectstore import ObjectStore, Traffic

log = logging.getLogger("atoll.allreduce")

THREADS = 8


class ObjectStoreAllReduce:
    """Averages lists of tensors over the replicas of a run; see docs/decisions/018.

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
        uri: str | os.PathLike[str] | ObjectStore,
        rank: int,
        world_size: int,
        *,
        round_id: int | None = None,
        timeout_s: float = 1800.0,
        poll_interval_s: float = 1.0,
        min_replicas: int | None = None,
        run_id: str | None = None,
        codec: str | Codec = "fp32",
        down_codec: str | Codec | None = None,
        grace_s: float | None = None,
        keep_rounds: int = 2,
        carries_late_work: bool | None = None,
        start: Start | None = None,
        team: Team | None = None,
    ) -> None:
        """`round_id`: the first round to do; None: the next one of the run. `poll_interval_s`: the
        longest pause between two looks at the store. `grace_s`: how long stragglers and owners are
        waited for; None learns it from the rounds.

        `carries_late_work`: when this replica was too late for a round, its values are added to
        what it brings to the next one. None: only with a lossy codec, where the same is done with
        everything that the codec left out.

        `start`: how the run begins, for callers with several runs that begin as one. None: as the
        environment says.

        `team`: the processes that are this replica together, all with the same arguments. Each
        brings its share with `allreduce_share` or `allreduce_parts`.
        """
        self.world_size = read_complete("world_size", world_size, 1, MAX_REPLICAS)
        self.rank = read_complete("rank", rank, 0, self.world_size - 1)
        least = read_min(min_replicas, self.world_size)
        check_seconds("timeout_s", timeout_s)
        check_seconds("poll_interval_s", poll_interval_s)
        if grace_s is not None:
            check_seconds("grace_s", grace_s)
        self.codec = get_codec(codec)
        self.down_codec = self.codec if down_codec is None else get_codec(down_codec, "down_codec")
        self._codecs = (self.codec.name, self.down_codec.name)
        self.keys = Keys(read_run_id(run_id))
        keep_rounds = read_complete("keep_rounds", keep_rounds, 1, MAX_ROUNDS)
        self.blobs = uri if isinstance(uri, ObjectStore) else ObjectStore.open(uri)
        self.last_round: ReduceReport | None = None
        self.carries = not self.codec.is_exact if carries_late_work is None else carries_late_work
        self.team: Team = Solo() if team is None else team
        me = Me(self.rank, self.world_size, least, secrets.token_hex(8), timeout_s)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix=f"allreduce-{self.rank}")
        self._history = History(grace_s, timeout_s, poll_interval_s)
        self._beginning = start or read_start(self.world_size, least, min_replicas, grace_s)
        self.decider = self._decider = Decider(
            self.blobs, self.keys, me, self._history, self._pool, self._beginning
        )
        self._me = me
        self._feedback: dict[str, Feedback] = {}
        self._cargo: dict[str, Payload] = {}
        self._shares: dict[str, Share] = {}
        self._next = read_round(round_id)  # the round to do next; None: ask the store
        self.may_be_late = False  # rounds may have been decided without this replica
        self._sweep = StoreSweep(self.blobs, self.keys, self._pool, keep_rounds)
        self._lock = threading.Lock()
        self._has_left = self._is_closed = False
        lead(self.team, self._come)

    @property
    def has_residual(self) -> bool:
        """Whether values that do not count in their round, or parts of them, come with the next."""
        return self.carries or not self.codec.is_exact

    @property
    def round(self) -> int | None:
        """The round that the next `allreduce` starts with; None until the store was asked."""
        return self._next

    def forget_late_work(self) -> None:
        """What was owed from earlier rounds is not brought to a later one."""
        for feedback in self._feedback.values():
            feedback.up = feedback.entry = None

    def go_on_at(self, round: int) -> None:
        """The next `allreduce` does `round`; for callers whose state is not from `join()`."""
        self._next = round

    def allreduce(
        self, tensors: Any, name: str = "", *, weight: float = 1.0, out: Any = None
    ) -> Any:
        """The weighted mean of the manifest: a list like `tensors`, or a tensor for one tensor.

        `out`: tensors like `tensors`, or those themselves, to hold the mean; they are what is
        returned. A loop that gives the result of its first call to the later ones needs no fresh
        memory. If the call fails, `tensors` are as they were, and other tensors in `out` hold
        anything.

        `name` tells apart streams of tensors that take turns (each keeps its own error feedback).
        Raises BelowMinimumWorld when no quorum came within the timeout, ValidationError when the
        replicas' tensors differ.
        """
        if self.team.processes > 1:
            raise ValidationError("tensors", len(tensors), "a process of several has a share only")
        tensors, out, is_one = as_lists(tensors, out)
        arrays = packing.as_arrays(tensors)
        layout, weight = self.describe(arrays, name), read_weight(weight)
        if out is not None:
            packing.check_out(out, arrays)
        is_plain = self.codec.is_exact and self.down_codec.is_exact and not self.carries
        with self._lock:
            payload, feedback = self._load(layout)
            work = TensorWork.of(payload, feedback, weight, arrays, out, is_plain=is_plain)
            self._allreduce(work)
        assert (mean := work.out) is not None
        means = packing.unflatten(mean, arrays) if out is None else packing.fill(mean, out)
        return means[0] if is_one else means

    def describe(self, tensors: Sequence[Any], name: str = "") -> Layout:
        """The layout of a round with tensors like these."""
        payload = self._cargo.get(name)
        return layouts.describe(
            tensors,
            shards=self.world_size,
            codec=self.codec.name,
            down_codec=self.down_codec.name,
            name=name,
            known=None if payload is None else payload.layout,
        )

    def share_of(self, layout: Layout) -> Share:
        """What this process carries of a round."""
        share = self._shares.get(layout.name)
        if share is None or share.layout is not layout:
            share = Share(layout, self.team.process, self.team.processes)
            self._shares[layout.name] = share
        return share

    def allreduce_share(
        self,
        layout: Layout,
        row: Vector,
        again: Callable[[], None],
        *,
        weight: float = 1.0,
        note: str = "",
        header: UploadHeader | None = None,
    ) -> None:
        """`row` holds the mean of what this process carries, as it held its values; see `share_of`.

        `again` brings its values back, if it is called before this returns. If this fails, the row
        holds anything. `note` is a word for all members of the round, in the name of the upload;
        `header` is what goes into the manifest. With a ledger in it this is one round: it raises
        Behind if the run is further, where the values of any
        other call would be brought to a later one.

        All processes of the replica call it, with the same layout and weight. What fails in one of
        them is raised in all.
        """
        if self.has_residual:
            raise ValidationError("codec", self.codec.name, "expected an exact one, see `begin`")
        with self._lock:
            payload, feedback = self._load(layout)
            payload.hold(row)
            payload.add(feedback.up)
            work = Work(payload, feedback, row, again, read_weight(weight), note, header)
            self._allreduce(work)

    def begin(self, layout: Layout, again: Values | None = None) -> JointWork:
        """What this process owes, to add its values to; for an all-reduce that `owes`.

        `again(take)` calls `take(start, part)` with parts of the row, which `take` may change. It
        is called before `allreduce_parts` returns only, and each time with the same values.
        """
        with self._lock:
            return JointWork.of(*self._load(layout), again)

    def allreduce_parts(
        self,
        work: JointWork,
        *,
        weight: float = 1.0,
        note: str = "",
        header: UploadHeader | None = None,
    ) -> EncodedMean:
        """The mean of what `begin` gave; as `allreduce_share`, from any thread."""
        work.weight, work.note, work.header = read_weight(weight), note, header
        with self._lock:
            return EncodedMean(self._allreduce(work))

    def _load(self, layout: Layout) -> tuple[Payload, Feedback]:
        """Memory for what this process brings, and what it owes of earlier rounds."""
        if self._is_closed:
            raise DistributedError("this all-reduce is closed: make another one")
        feedback = self._feedback_for(layout)
        settle_failed(self, feedback)
        payload = self._cargo.get(layout.name)
        if payload is None or payload.layout != layout:
            payload = Payload(self.share_of(layout), self.rank, self.codec)
            self._cargo[layout.name] = payload
        return payload, feedback

    def _allreduce(self, work: Work) -> Exchange:
        before, started, payload = self.blobs.traffic, time.monotonic(), work.payload
        try:
            if self.codec.needs_finite or self.down_codec.needs_finite:
                together(self.team, payload.check_finite)
            exchange = self._until_done(work, started, before)
            payload.release()
            return exchange
        except BaseException:
            work.fail()
            raise

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

    def read_since(
        self, following: int, out: Vector | None = None
    ) -> Iterator[tuple[Vector, Layout]]:
        """The mean of each round from `following` on, as far as this process carries it.

        Each is in `out`, if it is of that size, until the next is read. The next
        `allreduce` goes on after them. Raises Outdated or Gone if one is deleted.
        """
        with self._lock:
            for after, mean in catchup.read_since(self, following, out):
                following = after
                if mean is not None:
                    yield mean
            self._go_on_after(following)

    def _go_on_after(self, following: int) -> None:
        self._next = following
        self.may_be_late = True
        if following:
            self._beginning.begin()

    def state_dict(self) -> dict[str, Any]:
        """The error feedback of this rank, to go on exactly after a planned restart."""
        return {name: feedback.state() for name, feedback in self._feedback.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._feedback = {name: Feedback.of(part) for name, part in state.items()}

    def leave(self, error: BaseException | None = None) -> None:
        """Tell the others that this replica is done, or has failed with `error`.

        They do not wait for it then. Without $ATOLL_STARTED_TOGETHER only a failure is told.
        """
        has_left, self._has_left = self._has_left, True
        is_requested = not self.team.process and not has_left
        if is_requested and not isinstance(error, BackendError):  # a store that fails is not asked
            self._decider.leave(DONE if error is None else FAILED)

    def close(self) -> None:
        """Stop the threads. Objects in the store stay."""
        self._is_closed = True
        self.leave()
        self._sweep.close()
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

    def _until_done(self, work: Work, started: float, before: Traffic) -> Exchange:
        begin = self._start() if self._next is None else self._next
        number, skipped = begin, list[int]()
        is_single = work.header is not None and work.header.is_single
        if self.may_be_late and not is_single:
            # Rounds already decided are lost to this replica: take part in the next one instead.
            number = max(begin, self._start(begin - 1))
            skipped += range(begin, number)
        # If this call fails, the next one reports all rounds decided since as skipped.
        self._next, self.may_be_late = begin, True
        while True:
            try:
                manifest, mean = self._one_round(number, work)
            except Behind as news:
                log.warning("round %d is gone: the run is at round %d", number, news.latest)
                if is_single:
                    raise
                counted = partial(is_counted, self, work, news.manifest)
                work.bring_again(counted, carries=self.carries)
                departed, number = number, self._start(number - 1)
                skipped += range(departed, number)
                continue
            if mean is None:  # the round is void, by common decision: nobody has its mean
                self._decider.last = None
                number += 1
                continue
            self._next = number + 1
            self._finish(manifest, work, skipped, started, before)
            return mean

    def _one_round(self, number: int, work: Work) -> tuple[Manifest, Exchange | None]:
        decider = self._decider
        work.uploads.clear()
        if decider.is_leaving:
            work.note = COMPLETE
        started = time.monotonic()
        self._upload(number, work)
        began = time.monotonic()
        decision = decider.first_ballot(number)
        decision.lead_s = began - started
        while True:
            manifest = self._settle(decision, work)
            work.payload.is_complete = False  # a manifest with a whole upload is not waited for
            work.upload = next((u for u in work.uploads if manifest.has(u)), work.upload)
            work.seconds["manifest"] = time.monotonic() - began
            if manifest.error:
                raise manifest.refusal(self.rank)
            if not manifest.members:
                return manifest, None
            refuse_foreign(manifest, work.layout, self.rank)
            exchange = self.exchange(manifest, work.layout)
            if manifest.has(work.upload):
                work.feedback.entry = work.entry(manifest, self._pool)
            try:
                self._check_claims(exchange, work)
                run = partial(exchange.run, work.upload, work.payload, work.feedback, work.out)
                run_as_one(self.team, manifest, run)
            except Abandoned as news:
                work.feedback.give_up()
                work.bring_back()
                decision = decider.next_decision(manifest, news.damage)
                decision.is_blamed = work.upload in decision.blamed
                continue
            work.seconds |= exchange.seconds
            return manifest, exchange

    def go(self) -> None:
        """Wait for no round: whoever waits hands in and raises Left. From any thread."""
        self._decider.is_leaving = self.team.processes == 1

    def depart(self) -> None:
        """Mark this replica as one that was told to leave."""
        has_left, self._has_left = self._has_left, True
        if not has_left and not self.team.process:
            self._decider.leave(LEFT)

    def _settle(self, decision: Decision, work: Work) -> Manifest:
        while True:
            if self._decider.is_leaving:
                return self._hand_in(decision, work)
            decision.idle_s = work.header.idle_s if work.header else 0.0
            manifest = lead(
                self.team, lambda: self._decider.settle(decision, work.layout, self.codec)
            )
            if isinstance(manifest, PastRound):
                raise Behind(*manifest)
            if manifest is not None:
                return manifest
            if not self._decider.is_leaving:
                self._upload(decision.number, work)

    def _hand_in(self, decision: Decision, work: Work) -> Manifest:
        """Raises Left, with a whole upload in the store; or the manifest that was there before."""
        if work.note != COMPLETE:
            work.note = COMPLETE
            self._upload(decision.number, work)
        manifest = self._decider.read_decided(decision)
        if isinstance(manifest, PastRound):
            raise Behind(*manifest)
        if manifest is None or manifest.has(work.uploads[-1]):
            self.depart()
            raise Left
        return manifest

    def _check_claims(self, exchange: Exchange, work: Work) -> None:
        """Raises Abandoned, or Behind, for a manifest that is none of this replica's ledger.

        As every member must publish a mean, such a round is never committed.
        """
        manifest, ledger_writer = exchange.manifest, self._decider.ledger_writer
        problem = None if ledger_writer is None else ledger_writer.problem(manifest.data_round())
        if problem is None:
            return
        if not manifest.has(work.upload):
            raise Behind(manifest.round, manifest)
        log.warning("round %d: its manifest is refused: %s", manifest.round, problem)
        raise Abandoned(lead(self.team, lambda: exchange.refuse(work.upload, problem)))

    def _come(self) -> None:
        refuse_unconditional(self.blobs)
        self._decider.come()

    def _upload(self, number: int, work: Work) -> None:
        """The upload of the replica is whole: process 0 puts its object when all others have."""
        began = time.monotonic()
        team = self.team
        # Every upload has a name of its own, so that what a manifest names never changes.
        nonce = lead(team, lambda: secrets.token_hex(8))
        work.upload = self.keys.upload(
            number,
            self.rank,
            nonce,
            work.weight,
            work.layout.fingerprint,
            team.processes,
            work.note,
            work.header.text if work.header else "",
        )
        work.uploads.append(work.upload)
        self._decider.uploads.append(work.upload)
        key = part_of(work.upload, team.process)
        encoded, work.payload.is_complete = began, work.note == COMPLETE

        def pack() -> Parcel:
            nonlocal encoded
            parcel = work.payload.pack(key, self._pool)
            encoded = time.monotonic()
            if team.process:
                self.blobs.put(key, parcel.pieces)
            return parcel

        packed, sections = is_equal(team, pack, lambda parcel: parcel.sections)
        header = work.header.full if work.header else b""
        footer = work.payload.footer(key, sections, header)
        lead(team, lambda: self.blobs.put(key, [*packed.pieces, footer]))
        work.seconds |= {"encode": encoded - began, "upload": time.monotonic() - encoded}

    def _finish(
        self, manifest: Manifest, work: Work, skipped: list[int], started: float, before: Traffic
    ) -> None:
        is_member = manifest.has(work.upload)
        self.may_be_late = not is_member
        if is_member:
            work.settle()
        elif manifest.member(self.rank) is None:
            work.carry() if self.carries else work.drop()
        else:  # the rank's work is in the round, so that of this process must not come in later
            log.warning(
                "round %d: another process was taken for rank %d", manifest.round, self.rank
            )
            work.drop()
        if not manifest.missing:
            # How far apart processes start says nothing about the rounds that follow.
            spread = manifest.spread_s
            self._history.note_spread(spread if manifest.round else min(spread, MIN_GRACE_S / 4))
        self._decider.last = manifest
        self._beginning.begin(len(manifest.members))
        used = self.blobs.traffic.since(before)
        work.seconds["total"] = time.monotonic() - started
        self.last_round = ReduceReport(
            round=manifest.round,
            attempt=manifest.attempt,
            members=manifest.weights,
            is_member=is_member,
            missing=list(manifest.missing),
            skipped=skipped,
            bytes_up=used.bytes_up,
            bytes_down=used.bytes_down,
            requests=used.requests,
            seconds=dict(work.seconds),
            committed=manifest,
            notes={m.rank: m.note for m in manifest.members if m.note},
        )
        if manifest.by == self._me.nonce and not self.team.process:
            self._sweep.start(manifest.round)

    def _start(self, known: int = -1) -> int:
        """The round after the newest one that was decided; `known` was."""

        def read() -> tuple[tuple[int, int] | None, Manifest | None]:
            newest = catchup.newest(self.blobs, self.keys, known)
            return newest, newest and self._decider.read(self.keys.manifest(*newest))

        newest, manifest = lead(self.team, read)
        if newest is None:
            return 0
        self._beginning.begin()
        self._decider.last = manifest
        if manifest is not None:
            self._history.note_spread(min(manifest.spread_s, MIN_GRACE_S / 4))
        return newest[0] + 1

    def exchange(self, manifest: Manifest, layout: Layout) -> Exchange:
        up, down = (
            own if name == own.name else get_codec(name)
            for name, own in ((layout.codec, self.codec), (layout.down_codec, self.down_codec))
        )
        stored = (self.blobs, self.keys, self._me, self._history, self._pool)
        return Exchange(*stored, manifest, self._readable(layout), up, down)

    def _readable(self, layout: Layout) -> Share:
        """What is read of a round: the own share, or all of one that was cut in another way."""
        cut = (self.world_size, layouts.cells_of(layout.size // self.world_size, self._codecs))
        is_alike = (layout.shards, layout.cells) == cut
        return self.share_of(layout) if is_alike else Share(layout)

    def _feedback_for(self, layout: Layout) -> Feedback:
        feedback = self._feedback.setdefault(layout.name, Feedback())
        if feedback.up is not None and len(feedback.up) != self.share_of(layout).size:
            feedback = self._feedback[layout.name] = Feedback()
        feedback.decay = getattr(self.codec, "decay", 1.0)
        return feedback
