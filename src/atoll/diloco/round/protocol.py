"""The outer round as a pure machine: upload, manifest, means, outer step.

Creating the manifest commits a round. The mean of each shard is created once, by its owner or by
whoever stands in, so all replicas end a round with the same bits. The calls of `RoundMachine` are
generators of effects. What the store fails to do is thrown into them; the next `prepare` or
`run(None)` goes on where they stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from atoll.core.errors import BelowMinimumWorld
from atoll.diloco.data import ledger as ledgers
from atoll.diloco.data import ranges
from atoll.diloco.data.ledger import Ledger
from atoll.diloco.data.ledger import Terms as DataTerms
from atoll.diloco.data.ranges import Ranges
from atoll.diloco.round import decide, gc, objects
from atoll.diloco.round import effects as fx
from atoll.diloco.round.decide import Decision, Look, Terms
from atoll.diloco.round.objects import (
    Checkpoint,
    DamagedObject,
    Departed,
    Manifest,
    Outcome,
    Rest,
    UploadHeader,
)
from atoll.diloco.round.pace import STAGGER_S, Pace

START_S = 10.0  # rank 0 creates the first checkpoint; others do if it has not by then
WAITING_S = 5.0  # a first round that takes longer says for whom it waits


class _Behind(Exception):
    """This replica cannot follow the run manifest by manifest: it joins again."""


class _Leave(Exception):
    """This replica was told to go, and its upload is stored."""


@dataclass
class _Draining:
    """What one that leaves has not uploaded yet: weights by fragment, and what to say of them."""

    offer: fx.Offer
    left: dict[int, float]


class RoundMachine:
    """One replica in the rounds of a run.

    `is_leaving` may be set at any moment, from a signal handler, too.
    """

    def __init__(
        self,
        config: fx.RoundConfig,
        memory: fx.LocalMemory,
        pace: Pace,
        ledger: Ledger | None = None,
    ) -> None:
        self.config, self.memory, self.pace = config, memory, pace
        self.is_leaving = False
        self.is_over: Callable[[fx.RunState], bool] = lambda _state: False  # no round follows it
        self.round = 0
        self.chain = objects.ZERO
        self.ledger = ledger
        self.last: Manifest | None = None  # of the round before
        self.steps, self.tokens = 0, 0.0  # the run's clock
        self.departed: tuple[Departed, ...] = ()
        self.needs_join = True
        # The offer whose round is not over: nobody may touch the row meanwhile.
        self.offer: fx.Offer | None = None
        self.header: UploadHeader | None = None  # as stored; None: no upload of it is
        self.uploads: list[str] = []  # all keys that its row was, or may have been, stored under
        self._serial = 0
        self._begun = ""  # digest of the manifest whose means are being applied
        self._is_current = False  # the last upload was in its round, so nothing was missed
        self._is_shared = False  # a committed round, or a checkpoint, has the ledger
        self._is_established = False  # was a member beside others since it was opened
        self._draining: _Draining | None = None
        self._joins = 0
        # A manifest that was not there though its round was over: it joined again.
        self._missed = ""
        self._opened = 0.0  # the store's time
        self._want, self._sums, self._next_s = 0, dict[str, str](), 0.0  # as last offered
        self._now = self._manifest_at = 0.0
        self._chains: dict[int, str] = {}  # since the join
        self._plans: dict[int, str] = {}
        self._saved = self._covered = 0  # rounds of checkpoints, as far as it is known

    @property
    def state(self) -> fx.RunState:
        return fx.RunState(
            *(self.round, self.chain, self.last, self.ledger, self.steps, self.tokens),
            is_pending=self.offer is not None,
            manifest_at=self._manifest_at,
            is_current=self._is_current,
        )

    # -- The calls ------------------------------------------------------------------------------

    def open(self) -> fx.Steps[fx.RoundResult]:
        """Check the store, and join the run."""
        config = self.config
        key = objects.probe_key(config.nonce)
        yield fx.Create(key, b"probe")
        if (yield fx.Create(key, b"probe")):
            raise fx.StoreIgnoresConditions(
                f"the store created {key} twice: it ignores conditional writes (If-None-Match), "
                "without which replicas cannot agree. Use a store or a gateway that has them"
            )
        self._opened = max(
            (time for each, time in (yield fx.List("probe/")) if each == key), default=0
        )
        marks = (objects.DONE, objects.FAILED, objects.LEFT)
        own = (objects.ended_key(config.launch, config.rank, how) for how in marks)
        yield fx.Delete((key, *own))
        yield from self._join()
        yield from self._commit_drained()
        return self._result(fx.DROPPED)

    def _commit_drained(self) -> fx.Steps[None]:
        """Where all were told to leave, nobody was there to commit what they uploaded."""
        try:
            while not self.is_leaving and (
                self._is_deserted or (yield from self._look({})).has_leaving
            ):
                yield from self._run(self._make_empty_offer())
        except BelowMinimumWorld as reason:
            yield fx.Log(f"what this replica uploaded is not committed yet: {reason}")

    @property
    def _is_deserted(self) -> bool:
        """Whether all members of the last round have left, and bring something to the next."""
        is_empty = self.last is not None and not self.last.present
        return is_empty and bool(decide.find_rests(self._terms))

    def prepare(self) -> fx.Steps[fx.RoundResult | None]:
        """Settle what is open, so that the row may be changed. None: nothing was."""
        result = None
        if self.needs_join or self.offer is not None:
            result = yield from self.run(None)
        if not self._is_current and not self.is_leaving:
            try:
                yield from self._catch_up()
            except _Behind as reason:
                yield from self._join(str(reason))
                result = yield from self._take_empty_round()
        return result

    def is_behind(self) -> fx.Steps[bool]:
        """Whether `prepare` would change the values, by what is known or in the store."""
        if self.needs_join or self.offer is not None:
            return True
        if self._is_current:
            return False
        return bool((yield from self._find_later_manifest(self.round - 1)))

    def run(self, offer: fx.Offer | None) -> fx.Steps[fx.RoundResult]:
        """Take an offer through one round; None: go on with the one before."""
        joins = self._joins
        result = yield from self._run(offer)
        return result if self._joins == joins else (yield from self._take_empty_round())

    def _take_empty_round(self) -> fx.Steps[fx.RoundResult]:
        """One that had to join again takes a round at once, unless the run is over.

        So the others wait for it next time: a slow one that trained first would stay behind.
        """
        result = self._result(fx.DROPPED)
        if not self.is_leaving and not self.is_over(self.state):
            result = yield from self._run(self._make_empty_offer())
        return result if result.fate == fx.LEFT else self._result(fx.DROPPED)

    def _run(self, offer: fx.Offer | None) -> fx.Steps[fx.RoundResult]:
        rows = self._draining
        if rows is not None:  # an earlier call has failed in the midst of it
            if offer is not None:
                rows.left[self.round % len(self.config.cells)] = offer.weight * offer.is_finite
                rows.offer = rows.offer.with_later(offer)
            return (yield from self.drain(None, ()))
        if offer is not None:
            self._take_offer(offer)
        try:
            if self.needs_join:
                raise _Behind("a join had failed")
            assert self.offer is not None, "there is nothing to continue from"
            manifest = yield from self._decide_round()
            refusal = decide.find_refusal(
                manifest, self.header, self.uploads, is_empty_handed=self._is_empty_handed
            )
            fate = yield from self._complete(manifest)
        except _Leave:
            if len(self.config.cells) == 1:  # else the other fragments are uploaded before it goes
                assert self.offer is not None
                return (yield from self.drain(None, (self.offer.weight,)))
            return self._result(fx.LEFT)
        except _Behind as reason:
            yield from self._join(str(reason))
            return self._result(fx.DROPPED)
        yield from self._tidy(manifest)
        if refusal and not self._is_established:
            raise decide.make_unlike(
                self.config.rank, self.config.rank, f"{refusal} (there: this replica)"
            )
        return self._result(fate)

    def drain(self, offer: fx.Offer | None, weights: tuple[float, ...]) -> fx.Steps[fx.RoundResult]:
        """Store the rows of all fragments, with these weights, and go.

        The round of the first of them commits the others, too: the members of the next rounds take
        them in. If the round is decided already, it is taken before, and the next one is brought
        what is left. It is looked at once more when all is stored, and whoever decides without
        that from then on finds it in the next round. `offer` says what came since the one that is
        pending, if there is one. Called again after an error, it goes on.
        """
        offer, count = offer or fx.Offer(0.0, 0), len(self.config.cells)
        if self._draining is None:
            left = {at: weight * offer.is_finite for at, weight in enumerate(weights)}
            if self.offer is not None:
                left[self.round % count] = self.offer.weight
                offer = self.offer.with_later(offer)
            self._draining = _Draining(offer, left)
        self.is_leaving, rows = True, self._draining
        is_stored = False
        try:
            while any(rows.left.values()) and not self.needs_join:
                manifest = (yield from self._read_manifest(self.round)) if self.uploads else None
                if manifest is None and is_stored:
                    return self._result(fx.LEFT)
                if manifest is None:
                    is_there = self.header is not None and count == 1
                    if not is_there:
                        yield from self._drain_rows(rows)
                    yield from self.leave(objects.LEFT)
                    if self.header is not None and not self.header.is_leaving:
                        # Nobody carries it over: one who had looked before it was stored decides.
                        yield fx.Sleep(STAGGER_S)
                    is_stored = True
                    continue
                member = manifest.member(self.config.rank)
                if member and self.config.nonce in member.upload:
                    is_early = member.upload not in self.uploads  # of a round before: of all rows
                    if is_early or member.rest or count == 1:
                        break
                fragment, is_stored = self.round % count, False
                fate = yield from self._complete(manifest)
                if fate == fx.DROPPED:
                    break
                if fate == fx.MEMBER and member:
                    rows.left[fragment] = 0.0
                    rows.offer = rows.offer.without(member)
        except _Behind as reason:
            yield fx.Log(f"rank {self.config.rank} leaves, and what it had is dropped: {reason}")
            self._drop()
            rows.left.clear()
        yield from self.leave(objects.LEFT)
        return self._result(fx.LEFT)

    def leave(self, how: str) -> fx.Steps[None]:
        """Tell the others not to wait for this rank: it is done, has failed or left."""
        key = objects.ended_key(self.config.launch, self.config.rank, how)
        yield fx.Put(key, f"{self.round} {self.chain}".encode())

    def finish(self) -> fx.Steps[list[fx.EndMark]]:
        """Take every round that is decided, say that this rank is done, and where others were."""
        if self.needs_join or self.offer is not None:
            yield from self.run(None)
        try:  # others may have gone on since the last round of this replica
            yield from self._catch_up()
        except _Behind as reason:
            yield from self._join(str(reason))
        yield from self.leave(objects.DONE)
        return (yield from self.find_ends())

    def find_ends(self) -> fx.Steps[list[fx.EndMark]]:
        """Where the other ranks that are done ended."""
        launch, rank = self.config.launch, self.config.rank
        found = {}
        for key, time in (yield fx.List(objects.ended_prefix(launch))):
            ended = objects.parse_ended(key, launch)
            if launch == fx.UNKNOWN_LAUNCH and time < self._opened:
                continue  # in an earlier life of the run
            if ended and ended[1] == objects.DONE and ended[0] != rank:
                found[key] = ended[0]
        bodies = (yield fx.GetAll(tuple(found))) if found else {}
        marks = ((rank, objects.read_ended(bodies[key])) for key, rank in found.items())
        return [fx.EndMark(rank, *where) for rank, where in marks if where is not None]

    def save(self) -> fx.Steps[bool]:
        """Save a checkpoint of this moment. A refused create is no error: that state is there."""
        config = self.config
        packed = ""
        if self.ledger is not None and self._is_shared:
            packed = ledgers.pack(self.ledger).decode()
        meta = Checkpoint(
            round=self.round,
            chain=self.chain,
            layout=config.layout,
            shards=config.shards,
            nonce=config.nonce,
            processes=config.processes,
            last=self.last,
            ledger=packed,
            steps=self.steps,
            tokens=self.tokens,
            departed=self.departed,
        )
        yield fx.SaveCheckpoint(objects.checkpoint_key(self.round, self.chain), meta)
        self._saved = max(self._saved, self.round)
        return True

    def share_data(self, terms: DataTerms) -> fx.Steps[None]:
        """The replicas share their data from now on, unless the run has a ledger already."""
        if self.ledger is None:
            self.ledger = ledgers.begin(terms, self.round)
        return
        yield

    # -- Joining --------------------------------------------------------------------------------

    def _join(self, reason: str = "") -> fx.Steps[None]:
        """Load the newest checkpoint and take every round since. What is owed is dropped."""
        self._drop()
        self._joins += 1
        if reason:
            yield fx.Log(f"rank {self.config.rank} joins again: {reason}")
        started = yield from self._sleep(0)
        while True:
            # Values may be half of one state and half of another until this is done.
            self.needs_join = True
            try:
                missing = yield from self._load_checkpoint()
                if not self.needs_join:
                    return (yield from self._catch_up())
            except _Behind as again:
                missing = str(again)
                self._drop()
            if self._now - started > self.config.timeout_s:
                raise fx.Stuck(f"checkpoint/ cannot be joined: {missing}")
            yield from self._sleep(self.pace.pause_s(self._now - started))

    def _drop(self) -> None:
        """Drop what is owed: nobody can know what of it was counted."""
        self.memory.drop()
        self._is_current = False
        self.offer = self.header = None
        self.uploads.clear()

    def _load_checkpoint(self) -> fx.Steps[str]:
        """Load the newest checkpoint that is whole; else say what is missing."""
        checkpoints = yield from gc.list_checkpoints()
        for each in checkpoints:
            if (yield from gc.is_contradicted(each)):
                continue  # nobody goes on from there
            key = objects.checkpoint_key(*each)
            meta: Checkpoint | None = yield fx.LoadCheckpoint(key)
            if meta is None:
                yield fx.Log(f"{key} is incomplete: an older checkpoint is used")
                continue
            self.round, self.chain, self.last = meta.round, meta.chain, meta.last
            self.steps, self.tokens, self.departed = meta.steps, meta.tokens, meta.departed
            self._load_ledger(meta)
            self._chains = {self.round: self.chain}
            self._plans = {}
            self._saved = self.round
            self._begun = ""
            self.needs_join = self._is_current = False
            return ""
        if checkpoints:
            return f"none of {len(checkpoints)} checkpoints is complete"
        if (yield from self._find_later_manifest(-1)):
            raise fx.Stuck("checkpoint/ has no object, but rounds were committed: restore it")
        if self.config.rank:
            started = yield from self._sleep(0)
            while self._now - started < START_S:
                yield from self._sleep(self.pace.pause_s(self._now - started))
                if (yield from gc.list_checkpoints()):
                    return "the first checkpoint"
        self.round, self.chain = 0, objects.ZERO
        yield from self.save()
        return "the first checkpoint"

    def _load_ledger(self, meta: Checkpoint) -> None:
        self._is_shared = bool(meta.ledger)
        if meta.ledger:
            self.ledger = ledgers.unpack(meta.ledger.encode())
        elif self.ledger is not None:
            self.ledger = ledgers.begin(self.ledger.terms, meta.round)

    def _catch_up(self) -> fx.Steps[None]:
        """Take every round that is decided, in order: none is passed over."""
        while True:
            manifest = yield from self._read_manifest(self.round)
            if manifest is None:
                later = yield from self._find_later_manifest(self.round)
                if not later:
                    return
                # The two requests may have seen two moments.
                manifest = yield from self._read_manifest(self.round)
                if manifest is None:
                    key = objects.manifest_key(self.round)
                    raise _Behind(f"{key} is missing, but {later} is there")
            yield from self._complete(manifest, is_new=False)

    # -- Upload and manifest --------------------------------------------------------------------

    def _decide_round(self) -> fx.Steps[Manifest]:
        """Store the upload, then wait for the manifest of the round, or decide it."""
        config, round = self.config, self.round
        if self.uploads and self.header is None:
            # An upload has failed, or seemed to: the round may have been decided with it.
            manifest = yield from self._read_manifest(round)
            if manifest is not None:
                return manifest
        if self.header is None:
            yield from self._upload()
        started = yield from self._sleep(0)
        first_s = self.pace.first_look_s("manifest")
        is_idle = self.offer is not None and not self.offer.weight
        turn = decide.find_turn(self.last, config.rank, config.world, is_idle=is_idle)
        turn_s = first_s + turn * STAGGER_S
        headers: dict[str, UploadHeader | None] = {}
        quorum_at: float | None = None
        has_saved = has_said = False
        looks = 0
        yield from self._sleep(first_s)
        while True:
            waited = self._now - started
            is_timeout = waited > config.timeout_s
            manifest = None
            # The first in turn asks now and then: somebody may have decided while it slept.
            if waited < turn_s or turn or looks % 4 == 3:
                manifest = yield from self._read_manifest(round)
            looks += 1
            decision = Decision(None, (), False)
            if manifest is None and (waited >= turn_s or is_timeout):
                look = yield from self._look(headers)
                if look.later:
                    manifest = yield from self._read_manifest(round)
                    if manifest is not None:
                        return manifest
                    yield from self._check_later(look, headers)
                if look.unlike:
                    yield from self._check_unlike(look)
                decision = self._decide(look, quorum_at, is_timeout=is_timeout)
                if decision.has_quorum and quorum_at is None:
                    quorum_at = self._now
                    decision = self._decide(look, quorum_at, is_timeout=is_timeout)
                waiting_s = min(WAITING_S, config.timeout_s / 4)
                is_slow = decision.ranks is None and waited >= waiting_s and not has_said
                if is_slow and self.last is None and config.together:
                    has_said = True
                    ranks = ", ".join(map(str, decision.missing))
                    count = len(config.together)
                    yield fx.Log(f"waiting for ranks {ranks} of {count} before the first round")
                if decision.ranks is not None:
                    manifest = yield from self._create_manifest(look, decision)
                elif waited > self.pace.straggler_grace_s:
                    if self.uploads[-1] not in look.keys and not is_timeout:
                        yield from self._upload()  # somebody has deleted it
                    elif not decision.has_quorum and not has_saved:
                        # Those who are missing may need this state to come back.
                        has_saved = yield from self.save()
            if manifest is not None:
                self.pace.note_wait("manifest", waited, looks)
                return manifest
            if is_timeout:
                raise decide.make_below_minimum(look, decision, round, config.timeout_s)
            yield from self._sleep(self.pace.pause_s(waited - first_s))

    def _upload(self, later: Sequence[float] = ()) -> fx.Steps[None]:
        """Store the row, and those of the next rounds, if they are uploaded with these weights.

        The key is new each time: a manifest may name any of them.
        """
        config, offer = self.config, self.offer
        assert offer is not None
        self._serial += 1
        key = objects.upload_key(self.round, config.rank, config.nonce, self._serial)
        rest = tuple(
            Rest(
                objects.rest_key(key, ahead),
                weight,
                config.cells[(self.round + ahead) % len(config.cells)],
            )
            for ahead, weight in enumerate(later, 1)
        )
        is_leaving = self.is_leaving
        # Without weight no mean reads the row, and the work in it is claimed when it is counted.
        is_counted = offer.weight or any(each.weight for each in rest)
        claim = offer.claim if is_counted or not offer.is_finite else ()
        header = UploadHeader(
            rank=config.rank,
            nonce=config.nonce,
            chain=self.chain,
            weight=offer.weight if offer.is_finite else 0.0,
            layout=config.layout,
            world=config.world,
            processes=config.processes,
            steps=offer.steps,
            tokens=offer.tokens,
            data="" if self.ledger is None else self.ledger.terms.digest,
            claim=claim,
            want=0 if is_leaving else offer.want,
            end=offer.end,
            sums=offer.sums,
            is_leaving=is_leaving and (self._draining is not None or len(config.cells) == 1),
            rest=rest,
        )
        self.uploads.append(key)
        self.header = yield fx.Upload(key, self.round, header)
        if is_leaving and self._draining is None:
            raise _Leave

    def _drain_rows(self, rows: _Draining) -> fx.Steps[None]:
        """One upload with the rows of all fragments, in the order of the rounds they belong to."""
        count = len(self.config.cells)
        order = [rows.left[(self.round + ahead) % count] for ahead in range(count)]
        self.header = None
        self.offer = rows.offer._replace(weight=order[0])
        yield from self._upload(order[1:])

    def _take_offer(self, offer: fx.Offer) -> None:
        assert self.offer is None, "prepare() comes first"
        self.offer = offer
        self._want, self._next_s = offer.want, offer.next_s or self._next_s
        self._sums = offer.sums or self._sums
        if not offer.is_finite:
            self.memory.drop()

    def _make_empty_offer(self) -> fx.Offer:
        """An offer of one that has not trained, and keeps the data that it holds."""
        return fx.Offer(0.0, 0, want=max(self._want, ranges.size(self.hold)), sums=self._sums)

    @property
    def _is_empty_handed(self) -> bool:
        """Whether the offer is one of nothing, which may be made before it is known what is due."""
        offer = self.offer
        return offer is not None and not offer.weight and not offer.claim

    def _check_unlike(self, look: Look) -> fx.Steps[None]:
        """Raise where another replica has other settings, in the first rounds of this one.

        Only if it has lived since this one was opened: what is left of an earlier life of the run,
        with other settings, must not keep it from going on. And nobody who is in the rounds with
        others ends for a newcomer's mistake.
        """
        if self._is_established or self._is_empty_handed:
            return
        for _, time, header in look.unlike:
            rank, failed_at = header.rank, look.ended_at.get(header.rank, -1.0)
            is_failed = look.ended.get(rank) == objects.FAILED and failed_at >= self._opened
            if rank != self.config.rank and (time >= self._opened or is_failed):
                yield from self.leave(objects.FAILED)  # so that the other one sees it, too
                reason = decide.find_difference(header, self._terms)
                raise decide.make_unlike(self.config.rank, rank, reason)

    def _look(self, headers: dict[str, UploadHeader | None]) -> fx.Steps[Look]:
        """List the uploads and read the headers that are new."""
        listing = yield fx.List("upload/", objects.from_round("upload", self.round - 1))
        if self.header is not None:
            headers[self.uploads[-1]] = self.header
        folder = objects.from_round("upload", self.round) + "/"
        keys = [key for key, _ in listing if key.startswith(folder)]
        keys += decide.find_left_over(listing, self.round, self.last)
        new = tuple(key for key in keys if key not in headers)
        if new:
            bodies = yield fx.Headers(new)
            headers.update(decide.read_headers(bodies))
        return decide.examine(listing, headers, self._terms, self.last, self.config.launch)

    def _check_later(self, look: Look, headers: dict[str, UploadHeader | None]) -> fx.Steps[None]:
        """Whoever has uploaded to a later round had this one's manifest, which is not there.

        It is folded where this replica slept: a join finds the state since. If it finds none, the
        manifest was deleted. An upload without a readable header says nothing.
        """
        if new := tuple(key for key in look.later if key not in headers):
            headers.update(decide.read_headers((yield fx.Headers(new))))
        later = [each for each in look.later if headers[each]]
        if not later:
            return
        key = objects.manifest_key(self.round)
        if self._missed == key:
            raise fx.Stuck(
                f"{key} is missing, but {later[0]} was stored after it: restore it from a copy of "
                "the store, or delete what is left of an earlier run under this run_id"
            )
        self._missed = key
        raise _Behind(f"{later[0]} was stored after {key}, which is not there")

    def _decide(self, look: Look, quorum_at: float | None, *, is_timeout: bool) -> Decision:
        config, last = self.config, self.last
        grace_s = self.pace.straggler_grace_s
        members = {each.rank for each in last.present} if last else {*range(config.world)}
        return decide.decide_manifest(
            look.there,
            {rank for rank in members | look.late if rank < config.world} | {config.rank},
            look.ended,
            config.quorum if last else max(config.quorum, config.first_quorum),
            config.world,
            together=len(config.together) if last is None else 0,
            is_grace_over=quorum_at is not None and self._now - quorum_at >= grace_s,
            is_timeout=is_timeout,
        )

    def _create_manifest(self, look: Look, decision: Decision) -> fx.Steps[Manifest]:
        if decision.missing:
            yield fx.Log(f"round {self.round} continues without ranks {list(decision.missing)}")
        manifest = decide.make_manifest(look, decision, self._terms, self.config, self._next_s)
        key = objects.manifest_key(self.round)
        if (yield fx.Create(key, objects.encode(manifest), objects.folders_before(manifest))):
            return manifest
        stored = yield from self._read_manifest(self.round)
        if stored is None:
            raise _Behind(f"{key} was created by another and is no longer there")
        return stored

    # -- Means and outer step -------------------------------------------------------------------

    def _complete(self, manifest: Manifest, *, is_new: bool = True) -> fx.Steps[str]:
        """Make the own means, apply all, and commit in memory. Answers what became of the offer."""
        if manifest.chain != self.chain:
            raise _Behind(f"round {manifest.round} continues from another state")
        if self._begun not in ("", manifest.digest):
            raise _Behind(f"round {manifest.round} has two manifests, and one is half applied")
        self._begun = manifest.digest
        self.memory.begin(manifest)
        outcomes: dict[str, Outcome] = {}
        rank = self.config.rank
        own = tuple(name for name in manifest.names if manifest.owner_of(name) == rank)
        started = self._manifest_at = yield from self._sleep(0)
        if own and is_new:  # of an old round they are there, as a rule
            yield from self._make_means(manifest, own, outcomes)
            made = yield from self._sleep(0)
            self.pace.note_make(made - started)
            if manifest.plan == objects.FLAT:
                yield from self._apply(manifest, own, outcomes)
        yield from self._apply_all(manifest, outcomes, is_new=is_new)
        return self._commit(manifest, outcomes)

    def _apply_all(
        self, manifest: Manifest, outcomes: dict[str, Outcome], *, is_new: bool
    ) -> fx.Steps[None]:
        """Apply the means of the others as they come, and make those that do not."""
        started, timeout_s = self._now, self.config.timeout_s
        first_s = self.pace.first_look_s("means") if is_new else 0.0
        tried: set[str] = set()
        looks = 0
        if len(outcomes) < len(manifest.names):
            yield from self._sleep(first_s)
        while missing := self._find_missing(manifest, outcomes):
            looks += 1
            is_direct = manifest.plan == objects.DIRECT
            # The slowest owner first: when its mean is there, the others' are, too.
            first = missing if is_direct else missing[:1]
            if (yield from self._apply(manifest, first, outcomes)):
                yield from self._apply(manifest, missing, outcomes)
            missing = self._find_missing(manifest, outcomes)
            if not missing:
                break
            if looks == 1 and not (is_new and manifest.member(self.config.rank)):
                yield from self._check_newer_checkpoint(manifest)  # it may be swept
            waited = self._now - started
            due = [name for name in missing if waited >= self._stand_in_s(manifest, name)]
            new = tuple(name for name in due if name not in tried)
            if new:
                tried.update(new)
                if (yield from self._find_later_manifest(manifest.round)):
                    yield from self._read_made(manifest, outcomes)
                else:
                    yield from self._make_means(manifest, new, outcomes)
                yield from self._sleep(0)
                continue
            if waited > self.pace.owner_grace_s + (self.config.world + 1) * STAGGER_S:
                yield from self._check_newer_checkpoint(manifest)
            if waited > timeout_s:
                needed = missing if is_direct else missing[:1]
                keys = " or ".join(manifest.key_of(name) for name in needed)
                raise fx.Stuck(f"{keys} is needed, but not there or damaged")
            yield from self._sleep(self.pace.pause_s(waited - first_s))
        if looks and is_new:
            self.pace.note_wait("means", self._now - started, looks)

    def _read_made(self, manifest: Manifest, outcomes: dict[str, Outcome]) -> fx.Steps[None]:
        """Apply the means of a round that others have built on: they are made, every one.

        One that is missing is not made again: that is another outcome than the one they have.
        """
        yield from self._apply(manifest, self._find_missing(manifest, outcomes), outcomes)
        if missing := self._find_missing(manifest, outcomes):
            key = manifest.key_of(missing[0])
            raise _Behind(f"{key} is missing or damaged, and the next round was decided with it")

    def _find_missing(self, manifest: Manifest, outcomes: dict[str, Outcome]) -> tuple[str, ...]:
        missing = [name for name in manifest.names if name not in outcomes]
        if len({manifest.owner_of(name) for name in missing}) == 1:
            self.pace.slowest_owner = manifest.owner_of(missing[0]) or 0
        slowest = self.pace.slowest_owner
        return tuple(sorted(missing, key=lambda name: manifest.owner_of(name) != slowest))

    def _stand_in_s(self, manifest: Manifest, name: str) -> float:
        """When this replica makes a mean that its owner has not made."""
        place = decide.find_turn_after(manifest, name, self.config.rank)
        grace_s = self.pace.owner_grace_s if place and manifest.present else 0.0
        return STAGGER_S * place + grace_s

    def _make_means(
        self, manifest: Manifest, names: tuple[str, ...], outcomes: dict[str, Outcome]
    ) -> fx.Steps[None]:
        made = yield fx.MakeMeans(manifest, names)
        lacking = tuple(name for name in names if made[name] is None)
        if not lacking:
            return
        # An input is gone. Perhaps because all is done and swept: then the mean is there, or more.
        yield from self._apply(manifest, lacking, outcomes)
        lacking = tuple(name for name in lacking if name not in outcomes)
        if lacking:
            if (yield from self._find_later_manifest(manifest.round)):
                raise _Behind(f"round {manifest.round} is over, and its uploads no longer exist")
            yield fx.MakeMeans(manifest, lacking, exclude_missing=True)

    def _apply(
        self, manifest: Manifest, names: tuple[str, ...], outcomes: dict[str, Outcome]
    ) -> fx.Steps[bool]:
        """Apply what is there. Answers whether all of it is."""
        new = tuple(name for name in names if name not in outcomes)
        found = (yield fx.ApplyMeans(manifest, new)) if new else {}
        for name, outcome in found.items():
            if outcome == fx.FOREIGN:
                raise _Behind(decide.describe_foreign(manifest, name))
            if outcome is not None:
                outcomes[name] = outcome
        return all(name in outcomes for name in names)

    def _check_newer_checkpoint(self, manifest: Manifest) -> fx.Steps[None]:
        """Those who could make what is missing may have gone on: follow them."""
        newest = (yield from gc.list_checkpoints())[:1]
        if newest and newest[0].round > manifest.round:
            raise _Behind(f"there is a checkpoint of {newest[0].round} rounds")

    def _commit(self, manifest: Manifest, outcomes: dict[str, Outcome]) -> str:
        """Fold the round into memory. Nothing waits here: it happens whole or not at all."""
        if manifest.data is not None or self.ledger is not None:
            self._fold_ledger(manifest)
        self.steps += max((member.steps for member in manifest.members), default=0)
        self.tokens += sum(member.tokens for member in manifest.members)
        self.departed = decide.fold_departed(self.departed, manifest)
        self.chain = objects.extend_chain(manifest, outcomes)
        self.round += 1
        self._begun = ""
        fate = self._settle(manifest, outcomes)
        self.memory.end()
        if fate == fx.DROPPED:
            self.memory.drop()
        self._is_current = fate == fx.MEMBER
        self._is_established |= fate == fx.MEMBER and len(manifest.present) > 1
        self.last = manifest
        self.offer = self.header = None
        self.uploads.clear()
        self._chains[self.round] = self.chain
        self._plans[manifest.round] = manifest.plan
        self.pace.note_manifest(manifest)
        return fate

    def _fold_ledger(self, manifest: Manifest) -> None:
        """The ledger is that of the rounds, whenever this replica came to have one."""
        if manifest.data is None:
            assert self.ledger is not None
            self.ledger = ledgers.begin(self.ledger.terms, self.round + 1)
            return
        if self.ledger is None or not self._is_shared:
            self.ledger = ledgers.begin(manifest.data, manifest.round)
        self._is_shared = True
        claims = decide.claims_of(manifest.members)
        if claims:
            self.ledger = ledgers.commit(self.ledger, claims, manifest.world)
        else:  # a round of those who left says nothing of data
            self.ledger = msgspec.structs.replace(self.ledger, seq=self.ledger.seq + 1)

    def _settle(self, manifest: Manifest, outcomes: dict[str, Outcome]) -> str:
        """What became of the row."""
        member = manifest.member(self.config.rank)
        fate, claim = fx.LATE, Ranges()
        if member is not None and member.upload in self.uploads:
            self.memory.settle(manifest, outcomes)
            fate, claim = fx.MEMBER, member.claim
        elif any(each.upload in self.uploads for each in manifest.refused):
            return fx.DROPPED
        elif member is not None and not member.has_left:
            return fx.DROPPED  # another process counted for this rank
        if self.ledger is None:
            return fate
        # Honesty: work on data that is no longer this rank's to train on must not be brought.
        is_honest = ranges.is_inside(ranges.minus(self.memory.fresh, claim), self.hold)
        return fate if is_honest else fx.DROPPED

    # -- After the round ------------------------------------------------------------------------

    def _tidy(self, manifest: Manifest) -> fx.Steps[None]:
        """Save and sweep, if this replica has decided the round. The round is over in any case."""
        config, round = self.config, self.round
        if manifest.decided_by != config.nonce:
            return
        try:
            every = config.checkpoint_every
            is_due = round % every == 0
            if not is_due and round - self._saved > every:  # others may have saved
                self._saved = max((c.round for c in (yield from gc.list_checkpoints())), default=0)
                is_due = round - self._saved > every
            if is_due:
                yield from self.save()
                self._forget()
                yield fx.Beside(self._sweep(self._taken, is_all=True))
            elif round % config.keep == 0 and objects.FLAT in self._plans.values():
                yield fx.Beside(self._sweep(self._taken, is_all=False))
        except (fx.StoreError, DamagedObject) as error:
            yield fx.Log(f"rank {config.rank} could not save after round {round}: {error}")

    def _sweep(self, taken: gc.Taken, *, is_all: bool) -> fx.Steps[None]:
        try:
            if not is_all:
                return (yield from gc.sweep_uploads(taken, self._covered))
            newest, self._covered = yield from gc.sweep(taken)
            self._saved = max(self._saved, newest)
        except (fx.StoreError, DamagedObject) as error:
            yield fx.Log(
                f"rank {self.config.rank} could not delete after round {taken.round}: {error}"
            )

    @property
    def _taken(self) -> gc.Taken:
        config = self.config
        uploads = (objects.parse_round(each.member.upload) for each in self.departed)
        needed = min((round for round in uploads if round is not None), default=self.round)
        return gc.Taken(
            *(self.round, config.keep, config.history_block),
            *(dict(self._chains), dict(self._plans), needed),
        )

    def _forget(self) -> None:
        """Nobody asks for the chains and plans of rounds that are covered."""
        for book in (self._chains, self._plans):
            for round in [each for each in book if each < self._covered]:
                del book[round]

    # -- Small things ---------------------------------------------------------------------------

    @property
    def hold(self) -> Ranges:
        return () if self.ledger is None else self.ledger.hold_of(self.config.rank)

    @property
    def _terms(self) -> Terms:
        config = self.config
        return Terms(
            *(self.round, self.chain, config.layout, config.world, self.ledger),
            *(config.cells, self.departed, self._sums, self._opened),
        )

    def _result(self, fate: str) -> fx.RoundResult:
        return fx.RoundResult(fate, self.round, self.chain, self.hold)

    def _sleep(self, seconds: float) -> fx.Steps[float]:
        """Wait, unless this replica is to leave and has uploaded what it has."""
        self._now = yield fx.Sleep(seconds)
        if self.is_leaving and self.header is not None and self._draining is None:
            raise _Leave
        return self._now

    def _read_manifest(self, round: int) -> fx.Steps[Manifest | None]:
        key = objects.manifest_key(round)
        body = yield fx.Get(key)
        if body is None:
            return None
        try:
            return decide.check_cut(objects.read_manifest(key, body), self.config.sizes)
        except DamagedObject as problem:
            again = yield fx.Get(key)  # bytes can be damaged on the way, too
            if again is not None and again != body:
                return decide.check_cut(objects.read_manifest(key, again), self.config.sizes)
            raise fx.Stuck(
                f"{key} has committed round {round}, and is damaged: {problem.reason}. Restore it "
                "from a copy of the store, or begin a new run from an export of the newest "
                "checkpoint"
            ) from problem

    def _find_later_manifest(self, round: int) -> fx.Steps[str]:
        """The first of a round after this one, or nothing. Other files there are no matter."""
        listing = yield fx.List("manifest/", objects.manifest_key(round) if round >= 0 else "")
        return next((key for key, _ in listing if objects.parse_round(key) is not None), "")
