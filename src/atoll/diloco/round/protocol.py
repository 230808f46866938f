"""The outer round as a pure machine: upload, manifest, means, outer step.

Creating the manifest commits a round. The mean of each shard is created once, by its owner or by
whoever stands in, so all replicas end a round with the same bits. `RoundMachine` has four
generators of effects: `open`, `prepare`, `run` and `leave`. What the store fails to do is thrown
into them; the next `prepare` or `run(None)` goes on where they stopped.
"""

from __future__ import annotations

from atoll.diloco.data import ledger as ledgers
from atoll.diloco.data import ranges
from atoll.diloco.data.ledger import Ledger
from atoll.diloco.data.ranges import Ranges
from atoll.diloco.round import decide, gc, objects
from atoll.diloco.round.decide import Decision, Look, Terms
from atoll.diloco.round.effects import (
    DROPPED,
    FOREIGN,
    LATE,
    LEFT,
    MEMBER,
    ApplyMeans,
    BelowMinimum,
    Create,
    Delete,
    Get,
    Headers,
    List,
    LoadCheckpoint,
    LocalMemory,
    Log,
    MakeMeans,
    Offer,
    Put,
    RoundConfig,
    RoundResult,
    SaveCheckpoint,
    Sleep,
    Steps,
    StoreError,
    StoreIgnoresConditions,
    Stuck,
    Upload,
)
from atoll.diloco.round.objects import Checkpoint, DamagedObject, Manifest, Outcome, UploadHeader
from atoll.diloco.round.pace import STAGGER_S, Pace

START_S = 10.0  # rank 0 creates the first checkpoint; others do if it has not by then


class _Behind(Exception):
    """This replica cannot follow the run manifest by manifest: it joins again."""


class _Leave(Exception):
    """This replica was told to go, and its upload is stored."""


class RoundMachine:
    """One replica in the rounds of a run.

    `is_leaving` may be set at any moment, from a signal handler, too.
    """

    def __init__(
        self, config: RoundConfig, memory: LocalMemory, pace: Pace, ledger: Ledger | None = None
    ) -> None:
        self.config, self.memory, self.pace = config, memory, pace
        self.is_leaving = False
        self.round = 0
        self.chain = objects.ZERO
        self.ledger = ledger
        self.last: Manifest | None = None  # of the round before
        self.needs_join = True
        # The offer whose round is not over: nobody may touch the row meanwhile.
        self.offer: Offer | None = None
        self.header: UploadHeader | None = None  # as stored; None: no upload of it is
        self.uploads: list[str] = []  # all keys that its row was, or may have been, stored under
        self._serial = 0
        self._begun = ""  # digest of the manifest whose means are being applied
        self._is_current = False  # the last upload was in its round, so nothing was missed
        self._now = 0.0
        self._chains: dict[int, str] = {}  # since the join
        self._plans: dict[int, str] = {}
        self._saved = self._covered = 0  # rounds of checkpoints, as far as it is known

    @property
    def is_pending(self) -> bool:
        """Whether an offer was made and it is not known yet what became of it."""
        return self.offer is not None

    # -- The four calls -------------------------------------------------------------------------

    def open(self) -> Steps[RoundResult]:
        """Check the store, and join the run."""
        config = self.config
        key = objects.probe_key(config.nonce)
        yield Create(key, b"probe")
        if (yield Create(key, b"probe")):
            raise StoreIgnoresConditions(
                f"the store created {key} twice: it ignores conditional writes (If-None-Match), "
                "without which replicas cannot agree. Use a store or a gateway that has them"
            )
        marks = (objects.DONE, objects.FAILED, objects.LEFT)
        own = (objects.ended_key(config.launch, config.rank, how) for how in marks)
        yield Delete((key, *own))
        yield from self._join()
        return self._result(DROPPED)

    def prepare(self) -> Steps[RoundResult | None]:
        """Settle what is open, so that the row may be changed. None: nothing was."""
        result = None
        if self.needs_join or self.is_pending:
            result = yield from self.run(None)
        if not self._is_current and not self.is_leaving:
            try:
                yield from self._catch_up()
            except _Behind as reason:
                yield from self._join(str(reason))
                result = self._result(DROPPED)
        return result

    def run(self, offer: Offer | None) -> Steps[RoundResult]:
        """Take an offer through one round; None: go on with the one before."""
        if offer is not None:
            assert not self.is_pending, "prepare() comes first"
            self.offer = offer
            if not offer.is_finite:
                self.memory.drop()
        try:
            if self.needs_join:
                raise _Behind("a join had failed")
            assert self.is_pending, "there is nothing to go on with"
            manifest = yield from self._decide_round()
            fate = yield from self._complete(manifest)
        except _Leave:
            yield from self.leave(objects.LEFT)
            return self._result(LEFT)
        except _Behind as reason:
            yield from self._join(str(reason))
            return self._result(DROPPED)
        yield from self._tidy(manifest)
        return self._result(fate)

    def leave(self, how: str) -> Steps[None]:
        """Tell the others not to wait for this rank: it is done, has failed or left."""
        yield Put(objects.ended_key(self.config.launch, self.config.rank, how), how.encode())

    # -- Joining --------------------------------------------------------------------------------

    def _join(self, reason: str = "") -> Steps[None]:
        """Load the newest checkpoint and take every round since. What is owed is dropped."""
        self._drop()
        if reason:
            yield Log(f"rank {self.config.rank} joins again: {reason}")
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
                raise Stuck("checkpoint/", f"cannot be joined: {missing}")
            yield from self._sleep(self.pace.pause_s(self._now - started))

    def _drop(self) -> None:
        """Drop what is owed: nobody can know what of it was counted."""
        self.memory.drop()
        self.offer = self.header = None
        self.uploads.clear()

    def _load_checkpoint(self) -> Steps[str]:
        """Load the newest checkpoint that is whole; else say what is missing."""
        checkpoints = yield from gc.list_checkpoints()
        for each in checkpoints:
            if (yield from gc.is_contradicted(each)):
                continue  # nobody goes on from there
            key = objects.checkpoint_key(*each)
            meta: Checkpoint | None = yield LoadCheckpoint(key)
            if meta is None:
                yield Log(f"{key} is not whole: an older checkpoint is taken")
                continue
            self.round, self.chain, self.last = meta.round, meta.chain, meta.last
            if self.ledger is not None and meta.ledger:
                self.ledger = ledgers.unpack(meta.ledger.encode())
            self._chains = {self.round: self.chain}
            self._plans = {}
            self._saved = self.round
            self._begun = ""
            self.needs_join = self._is_current = False
            return ""
        if checkpoints:
            return f"none of {len(checkpoints)} checkpoints is whole"
        if (yield List("manifest/")):
            raise Stuck("checkpoint/", "has no object, but rounds were committed: restore it")
        if self.config.rank:
            started = yield from self._sleep(0)
            while self._now - started < START_S:
                yield from self._sleep(self.pace.pause_s(self._now - started))
                if (yield from gc.list_checkpoints()):
                    return "the first checkpoint"
        self.round, self.chain = 0, objects.ZERO
        yield from self._save()
        return "the first checkpoint"

    def _catch_up(self) -> Steps[None]:
        """Take every round that is decided, in order: none is passed over."""
        while True:
            manifest = yield from self._read_manifest(self.round)
            if manifest is None:
                if not (yield from self._has_later_manifest(self.round)):
                    return
                # The two requests may have seen two moments.
                manifest = yield from self._read_manifest(self.round)
                if manifest is None:
                    raise _Behind(f"the manifest of round {self.round} is no longer there")
            yield from self._complete(manifest, is_new=False)

    # -- Upload and manifest --------------------------------------------------------------------

    def _decide_round(self) -> Steps[Manifest]:
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
        turn_s = first_s + self._place * STAGGER_S
        headers: dict[str, UploadHeader | None] = {}
        quorum_at: float | None = None
        has_saved = False
        looks = 0
        yield from self._sleep(first_s)
        while True:
            waited = self._now - started
            is_timeout = waited > config.timeout_s
            manifest = None
            # The first in turn asks now and then: somebody may have decided while it slept.
            if waited < turn_s or self._place or looks % 4 == 3:
                manifest = yield from self._read_manifest(round)
            looks += 1
            decision = Decision(None, (), False)
            if manifest is None and (waited >= turn_s or is_timeout):
                look = yield from self._look(headers)
                if look.has_later:
                    manifest = yield from self._read_manifest(round)
                    if manifest is None:
                        raise _Behind(f"round {round} was decided, and its manifest is gone")
                    return manifest
                decision = self._decide(look, quorum_at, is_timeout=is_timeout)
                if decision.has_quorum and quorum_at is None:
                    quorum_at = self._now
                    decision = self._decide(look, quorum_at, is_timeout=is_timeout)
                if decision.ranks is not None:
                    manifest = yield from self._create_manifest(look, decision)
                elif waited > self.pace.straggler_grace_s:
                    if self.uploads[-1] not in look.keys and not is_timeout:
                        yield from self._upload()  # somebody has deleted it
                    elif not decision.has_quorum and not has_saved:
                        # Those who are missing may need this state to come back.
                        has_saved = yield from self._save()
            if manifest is not None:
                self.pace.note_wait("manifest", waited, looks)
                return manifest
            if is_timeout:
                raise BelowMinimum(round, len(look.there), config.quorum, decision.missing)
            yield from self._sleep(self.pace.pause_s(waited - first_s))

    def _upload(self) -> Steps[None]:
        """Store the row. The key is new each time: a manifest may name any of them."""
        config, offer = self.config, self.offer
        assert offer is not None
        self._serial += 1
        key = objects.upload_key(self.round, config.rank, config.nonce, self._serial)
        is_leaving = self.is_leaving
        # Without weight no mean reads the row, and the work in it is claimed when it is counted.
        claim = offer.claim if offer.weight or not offer.is_finite else ()
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
            claim=claim,
            want=0 if is_leaving else offer.want,
            end=offer.end,
            sums=offer.sums,
            is_leaving=is_leaving,
        )
        self.uploads.append(key)
        self.header = yield Upload(key, self.round, header)
        if is_leaving:
            raise _Leave

    @property
    def _place(self) -> int:
        is_idle = self.offer is not None and not self.offer.steps
        return decide.find_turn(self.last, self.config.rank, self.config.world, is_idle=is_idle)

    def _look(self, headers: dict[str, UploadHeader | None]) -> Steps[Look]:
        """List the uploads and read the headers that are new."""
        listing = yield List("upload/", objects.from_round("upload", self.round - 1))
        if self.header is not None:
            headers[self.uploads[-1]] = self.header
        folder = objects.from_round("upload", self.round) + "/"
        new = tuple(key for key, _ in listing if key.startswith(folder) and key not in headers)
        if new:
            bodies = yield Headers(new)
            headers.update(decide.read_headers(bodies))
        return decide.examine(listing, headers, self._terms, self.last, self.config.launch)

    def _decide(self, look: Look, quorum_at: float | None, *, is_timeout: bool) -> Decision:
        config, last = self.config, self.last
        members = {each.rank for each in last.present} if last else {*range(config.world)}
        expected = {rank for rank in members | look.late if rank < config.world} | {config.rank}
        grace_s = self.pace.straggler_grace_s
        return decide.decide_manifest(
            look.there,
            expected,
            look.ended,
            config.quorum,
            config.world,
            together=config.together if last is None else (),
            is_grace_over=quorum_at is not None and self._now - quorum_at >= grace_s,
            is_timeout=is_timeout,
        )

    def _create_manifest(self, look: Look, decision: Decision) -> Steps[Manifest]:
        config = self.config
        manifest = decide.make_manifest(
            look,
            decision,
            self._terms,
            shards=config.shards,
            cells=config.cells[self.round % len(config.cells)],
            has_direct=config.has_direct,
            needs=config.quorum,
            nonce=config.nonce,
        )
        key = objects.manifest_key(self.round)
        if (yield Create(key, objects.encode(manifest))):
            return manifest
        stored = yield from self._read_manifest(self.round)
        if stored is None:
            raise _Behind(f"{key} was created by another and is no longer there")
        return stored

    # -- Means and outer step -------------------------------------------------------------------

    def _complete(self, manifest: Manifest, *, is_new: bool = True) -> Steps[str]:
        """Make the own means, apply all, and commit in memory. Answers what became of the offer."""
        if manifest.chain != self.chain:
            raise _Behind(f"round {manifest.round} goes on from another state")
        if self._begun not in ("", manifest.digest):
            raise _Behind(f"round {manifest.round} has two manifests, and one is half applied")
        self._begun = manifest.digest
        self.memory.begin(manifest)
        outcomes: dict[str, Outcome] = {}
        rank = self.config.rank
        own = tuple(name for name in manifest.names if manifest.owner_of(name) == rank)
        started = yield from self._sleep(0)
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
    ) -> Steps[None]:
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
                yield from self._make_means(manifest, new, outcomes)
                yield from self._sleep(0)
                continue
            if waited > self.pace.owner_grace_s + (self.config.world + 1) * STAGGER_S:
                yield from self._check_newer_checkpoint(manifest)
            if waited > timeout_s:
                key = objects.mean_key if manifest.plan == objects.FLAT else objects.receipt_key
                raise Stuck(key(manifest.round, missing[0]), "is needed, but not there or damaged")
            yield from self._sleep(self.pace.pause_s(waited - first_s))
        if looks and is_new:
            self.pace.note_wait("means", self._now - started, looks)

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
    ) -> Steps[None]:
        made = yield MakeMeans(manifest, names)
        lacking = tuple(name for name in names if made[name] is None)
        if not lacking:
            return
        # An input is gone. Perhaps because all is done and swept: then the mean is there, or more.
        yield from self._apply(manifest, lacking, outcomes)
        lacking = tuple(name for name in lacking if name not in outcomes)
        if lacking:
            if (yield from self._has_later_manifest(manifest.round)):
                raise _Behind(f"round {manifest.round} is over, and its uploads are gone")
            yield MakeMeans(manifest, lacking, exclude_missing=True)

    def _apply(
        self, manifest: Manifest, names: tuple[str, ...], outcomes: dict[str, Outcome]
    ) -> Steps[bool]:
        """Apply what is there. Answers whether all of it is."""
        new = tuple(name for name in names if name not in outcomes)
        found = (yield ApplyMeans(manifest, new)) if new else {}
        for name, outcome in found.items():
            if outcome == FOREIGN:
                raise _Behind(f"the mean {name} of round {manifest.round} is not of this replica")
            if outcome is not None:
                outcomes[name] = outcome
        return all(name in outcomes for name in names)

    def _check_newer_checkpoint(self, manifest: Manifest) -> Steps[None]:
        """Those who could make what is missing may have gone on: follow them."""
        newest = (yield from gc.list_checkpoints())[:1]
        if newest and newest[0].round > manifest.round:
            raise _Behind(f"there is a checkpoint of {newest[0].round} rounds")

    def _commit(self, manifest: Manifest, outcomes: dict[str, Outcome]) -> str:
        """Fold the round into memory. Nothing waits here: it happens whole or not at all."""
        if self.ledger is not None:
            claims = [decide.claim_of(member) for member in manifest.members]
            self.ledger = ledgers.commit(self.ledger, claims, manifest.world)
        self.chain = objects.extend_chain(manifest, outcomes)
        self.round += 1
        self._begun = ""
        fate = self._settle(manifest, outcomes)
        self.memory.end(manifest)
        if fate == DROPPED:
            self.memory.drop()
        self._is_current = fate == MEMBER
        self.last = manifest
        self.offer = self.header = None
        self.uploads.clear()
        self._chains[self.round] = self.chain
        self._plans[manifest.round] = manifest.plan
        self.pace.note_manifest(manifest)
        return fate

    def _settle(self, manifest: Manifest, outcomes: dict[str, Outcome]) -> str:
        """What became of the row."""
        member = manifest.member(self.config.rank)
        fresh = self.memory.fresh
        if member is not None and member.upload in self.uploads:
            self.memory.settle(manifest, outcomes)
            fate, fresh = MEMBER, ranges.minus(fresh, member.claim)
        elif member is not None or any(each.upload in self.uploads for each in manifest.refused):
            return DROPPED  # another process counted for this rank, or the upload was refused
        else:
            fate = LATE
        # Honesty: work on data that is no longer this rank's to train on must not be brought.
        is_honest = self.ledger is None or ranges.is_inside(fresh, self.hold)
        return fate if is_honest else DROPPED

    # -- After the round ------------------------------------------------------------------------

    def _tidy(self, manifest: Manifest) -> Steps[None]:
        """Save and sweep, if this replica has decided the round. The round is over in any case."""
        config, round = self.config, self.round
        if manifest.decided_by != config.nonce:
            return
        try:
            every = config.checkpoint_every
            if round % every == 0 or (yield from self._is_overdue()):
                yield from self._save()
                self._saved, self._covered = yield from gc.sweep(self._taken)
                self._forget()
            elif round % config.keep == 0 and objects.FLAT in self._plans.values():
                yield from gc.sweep_uploads(self._taken, self._covered)
        except (StoreError, DamagedObject) as error:
            yield Log(f"rank {config.rank} could not save or sweep after round {round}: {error}")

    def _is_overdue(self) -> Steps[bool]:
        every = self.config.checkpoint_every
        if self.round - self._saved > every:
            self._saved = max((c.round for c in (yield from gc.list_checkpoints())), default=0)
        return self.round - self._saved > every

    def _save(self) -> Steps[bool]:
        """Save the state. A refused create is no error: that state is there."""
        config = self.config
        packed = "" if self.ledger is None else ledgers.pack(self.ledger).decode()
        meta = Checkpoint(
            round=self.round,
            chain=self.chain,
            layout=config.layout,
            shards=config.shards,
            nonce=config.nonce,
            processes=config.processes,
            last=self.last,
            ledger=packed,
        )
        yield SaveCheckpoint(objects.checkpoint_key(self.round, self.chain), meta)
        self._saved = max(self._saved, self.round)
        return True

    @property
    def _taken(self) -> gc.Taken:
        config = self.config
        return gc.Taken(self.round, config.keep, config.history_block, self._chains, self._plans)

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
        return Terms(self.round, self.chain, config.layout, config.world, self.ledger)

    def _result(self, fate: str) -> RoundResult:
        return RoundResult(fate, self.round, self.chain, self.hold)

    def _sleep(self, seconds: float) -> Steps[float]:
        """Wait, unless this replica is to leave and has handed in what it has."""
        self._now = yield Sleep(seconds)
        if self.is_leaving and self.header is not None:
            raise _Leave
        return self._now

    def _read_manifest(self, round: int) -> Steps[Manifest | None]:
        key = objects.manifest_key(round)
        body = yield Get(key)
        return None if body is None else objects.read_manifest(key, body)

    def _has_later_manifest(self, round: int) -> Steps[bool]:
        return bool((yield List("manifest/", objects.manifest_key(round))))
