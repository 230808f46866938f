"""Settling an attempt: wait for its manifest, or decide it.

One rank lists the uploads, the others only read the manifest's key. While nothing is decided, more
ranks begin to list, one after the other, so that no single rank is needed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from datetime import datetime

import msgspec

from atoll.core.errors import BackendError, BelowMinimumWorld, NotFound, Permanent, ValidationError
from atoll.diloco.allreduce import manifest as manifests
from atoll.diloco.allreduce import past, wire
from atoll.diloco.allreduce.keys import Keys, UploadName, parse_left, parse_round, parse_upload
from atoll.diloco.allreduce.layout import Layout, difference
from atoll.diloco.allreduce.manifest import MANIFEST, Manifest, Member, PastRound
from atoll.diloco.allreduce.note import (
    DATA_ERROR,
    LedgerWriter,
    MemberNote,
    SaidUpload,
    UploadNote,
    member_note,
    read_note,
    sift,
)
from atoll.diloco.allreduce.pace import History
from atoll.diloco.allreduce.start import Start
from atoll.diloco.allreduce.upload import DamagedUpload, read_footer
from atoll.diloco.codecs import Codec
from atoll.objectstore import ObjectStore

log = logging.getLogger("atoll.allreduce")

STAGGER_S = 1.5  # between the ranks that begin to look at the uploads
FIRST_WORD_S = 3.0  # until a rank says whom it waits for in the first round
NEXT_WORD_S = 30.0
DONE, FAILED, LEFT = LEAVING = ("done", "failed", "left")


class Left(Exception):
    """This replica was told to go. Its upload is whole: the round can do without the process."""


@dataclass(frozen=True)
class Me:
    """One process in one slot of a run. A restart has another nonce."""

    rank: int
    world_size: int
    min_replicas: int
    nonce: str
    timeout: float


@dataclass
class Decision:
    """The facts on which the manifest of one attempt is decided."""

    number: int
    attempt: int
    turn: int
    expected: set[int]
    blamed: list[str] = field(default_factory=list)
    quorum_at: float | None = None
    started: float | None = None  # when it was first settled on
    lead_s: float = 0.0  # since the upload was begun, when it was first settled on
    again_s: float = 0.0  # after so many seconds without this rank, it uploads again
    is_blamed: bool = False  # this rank's upload may not be used
    uploads: dict[int, UploadName] = field(default_factory=dict)
    needs: int = 1  # this many ranks must be in
    together: int | None = None  # once so many are there, nobody else is waited for
    is_first: bool = False  # of the run: they are waited for until the timeout
    left: dict[int, str] = field(default_factory=dict)  # how ranks that have ended left
    says_at: float = 0.0
    ahead: int = -1  # somebody has uploaded to this round
    idle_s: float = 0.0  # so long this rank leaves the decision to those who train
    notes: dict[int, UploadNote | None] = field(default_factory=dict)  # of the uploads
    refused: set[str] = field(default_factory=set)  # uploads whose claims are not good

    @property
    def there(self) -> set[int]:
        """The ranks of which nothing more is waited for."""
        return {*self.uploads, *self.left}


class Decider:
    """Reads or decides the manifests of a run."""

    def __init__(
        self,
        blobs: ObjectStore,
        keys: Keys,
        me: Me,
        history: History,
        pool: Executor,
        start: Start | None = None,
    ) -> None:
        self.blobs = blobs
        self.start = start or Start(me.min_replicas)
        self.keys = keys
        self.me = me
        self.history = history
        self.pool = pool
        self.ledger_writer: LedgerWriter | None = None
        self.last: Manifest | None = None  # of the newest round this replica knows
        self.is_leaving = False  # it does not wait for anybody
        self.uploads: deque[str] = deque(maxlen=16)  # the last ones of this process
        self._since: datetime | None = None  # when it was there first, by the store's clock

    def first_ballot(self, number: int) -> Decision:
        order, everyone = list(range(self.me.world_size)), set(range(self.me.world_size))
        if self.last is not None and self.last.members:
            # A run that goes on in a smaller world has members that cannot come.
            present = [m.rank for m in self.last.members if not m.has_left]
            order = [rank for rank in present if rank < self.me.world_size]
            everyone = {*order, self.me.rank}
        turn = manifests.turn(self.me.rank, order, self.me.world_size)
        start, decision = (
            self.start,
            Decision(number, 0, turn, everyone, needs=self.me.min_replicas),
        )
        if self.last is None:
            decision.together = start.together
            if not start.is_begun:
                decision.needs, decision.is_first = start.quorum, start.together is not None
        return decision

    def next_decision(self, manifest: Manifest, damage: wire.Damage) -> Decision:
        """The ballot after `manifest` was given up. The rank that gave it up decides first."""
        out = {m.rank for m in manifest.members if m.upload in damage.uploads}
        ranks = [m.rank for m in manifest.members if m.rank not in out]
        turn = manifests.turn(self.me.rank, ranks, self.me.world_size) + 1
        return Decision(
            manifest.round,
            manifest.attempt + 1,
            0 if damage.by == self.me.rank else turn,
            set(ranks),
            sorted({*manifest.blamed, *damage.uploads}),
            needs=self.me.min_replicas,
        )

    def settle(
        self, decision: Decision, layout: Layout, codec: Codec
    ) -> Manifest | PastRound | None:
        """The manifest of the attempt, whichever rank decides it, or that its round is past.

        None: this rank's upload has to be made again before the ballot is settled on. Raises
        BelowMinimumWorld after the timeout.
        """
        return self._in_force(decision, self._settle(decision, layout, codec))

    def read_decided(self, decision: Decision) -> Manifest | PastRound | None:
        """As `settle`, but nobody is waited for. None: nothing is decided."""
        key = self.keys.manifest(decision.number, decision.attempt)
        return self._in_force(decision, self.read(key))

    def _in_force(
        self, decision: Decision, manifest: Manifest | PastRound | None
    ) -> Manifest | PastRound | None:
        if not isinstance(manifest, Manifest) or manifest.error:
            return manifest
        if sum(not member.has_left for member in manifest.members) > 1:
            return manifest
        # One member alone could complete a manifest that this process, or another, decided on
        # before it slept, and wrote after the true one was folded away. Nor does a void manifest
        # count that somebody wrote who slept while the run went on.
        if not manifest.members or past.is_past(self.blobs, self.keys, decision.number):
            return self._past(decision) or manifest
        return manifest

    def _settle(
        self, decision: Decision, layout: Layout, codec: Codec
    ) -> Manifest | PastRound | None:
        key = self.keys.manifest(decision.number, decision.attempt)
        if decision.started is None:
            decision.started = time.monotonic()
            decision.again_s = self.history.straggler_grace()
            decision.says_at = min(FIRST_WORD_S, self.me.timeout / 4)
        started = decision.started
        what = f"manifest {layout.name}" if decision.attempt == 0 else "next attempt"
        usual = self.history.usual(what)
        stagger = min(STAGGER_S, self.history.straggler_grace())
        if decision.turn and usual > decision.lead_s:  # a look before the usual time is in vain
            time.sleep(self._pause(decision, 0.0, usual))
        while True:
            elapsed = time.monotonic() - started
            is_last_check = elapsed > self.me.timeout
            patience = max(0.0, usual - decision.lead_s) if decision.turn else 0.0
            is_looking = elapsed >= decision.turn * stagger + patience
            is_looking = is_looking and elapsed >= decision.idle_s
            is_looking = is_looking or is_last_check
            # The first in the order need not ask: others decide only if it was very slow itself.
            manifest: Manifest | PastRound | None = None
            if not is_looking or decision.turn or elapsed > stagger:
                manifest = self.read(key)
            if manifest is None and is_looking:
                manifest = self._propose(key, decision, layout, codec, is_last_check=is_last_check)
            if manifest is not None:
                if not decision.is_first:
                    # When it was looked for: it may have been there before.
                    self.history.note_wait(what, decision.lead_s + elapsed)
                return manifest
            if decision.is_first and is_looking and elapsed >= decision.says_at:
                decision.says_at = elapsed + NEXT_WORD_S
                self._say(decision)
            # This rank's upload is damaged or deleted: a quorum would have gone on by now.
            is_lost = (
                is_looking
                and self.me.rank not in decision.uploads
                and elapsed > 2 * decision.again_s
            )
            # Or this rank was given up on and nobody goes on without it: it says that it is alive.
            is_alive = decision.is_blamed and elapsed > decision.again_s
            if is_last_check:
                raise self._no_quorum(decision)
            if is_lost or is_alive:
                decision.is_blamed = False
                decision.again_s = elapsed
                return None
            if self.is_leaving:
                return None
            time.sleep(self._pause(decision, elapsed, usual))

    def _pause(self, decision: Decision, elapsed_s: float, usual_s: float) -> float:
        if self.blobs.is_folder:
            return self.history.pause_s(elapsed_s, usual_s, is_cheap=True)
        # Uploads over one link take longer or shorter, and are all there at about the same time.
        return self.history.pause_s(decision.lead_s + elapsed_s, usual_s, step=0.15)

    def read(self, key: str) -> Manifest | None:
        """The manifest at `key`, or None.

        Raises Permanent for an object that no replica wrote: its key cannot be used again.
        """
        problem: Exception | None = None
        for _ in range(3):
            try:
                body = wire.unseal(wire.MANIFEST, wire.fence(key), self.blobs.get(key))
                manifest = MANIFEST.decode(body)
                self.history.note_advice(manifest.owner_grace_s)
                return manifest
            except NotFound:
                return None
            except (wire.Corrupt, msgspec.MsgspecError) as error:
                problem = error
        raise Permanent(f"{self.blobs.uri}: {key} is not a manifest: {problem}")

    def write(self, key: str, manifest: Manifest) -> Manifest:
        """The manifest in force: this one, or the one that was written first."""
        sealed = wire.seal(wire.MANIFEST, wire.fence(key), msgspec.json.encode(manifest))
        if self.blobs.create(key, sealed):
            return manifest
        first = self.read(key)
        if first is None:
            raise Permanent(f"{self.blobs.uri}: {key} can neither be created nor read")
        return first

    def void(self, number: int, attempt: int, error: str = "") -> Manifest:
        return Manifest(
            self.keys.run, number, attempt, b"", [], [], [], [], self.me.nonce, error=error
        )

    def come(self) -> None:
        """No mark says that this rank has left."""
        if self.start.launch is not None:
            marks = {*self._marks, FAILED}
            keys = [self.keys.left(self.start.launch, self.me.rank, how) for how in sorted(marks)]
            self.blobs.delete(keys)

    def leave(self, how: str) -> None:
        """Mark this rank as one that has left. The store may fail: others wait longer then."""
        if self.start.launch is None or how not in {*self._marks, FAILED}:
            return
        try:
            self.blobs.put(self.keys.left(self.start.launch, self.me.rank, how), how.encode())
        except BackendError as error:
            log.warning("the others cannot know that rank %d has left: %s", self.me.rank, error)

    @property
    def _marks(self) -> tuple[str, ...]:
        return LEAVING if self.start.tells_ends else (LEFT,)

    def _counts(self, how: str, modified: datetime) -> bool:
        """Whether a mark tells of a rank that is not to be waited for.

        Where nothing tells one launch from the next, one that failed may be of a launch before, and
        the rank on its way again: only a failure that came while this replica was there counts.
        """
        if how in self._marks:
            return True
        return how == FAILED and self._since is not None and modified > self._since

    def _say(self, decision: Decision) -> None:
        assert decision.together is not None
        missing = sorted(set(range(decision.together)) - decision.there)
        log.warning(
            "waiting for ranks %s of %d before the first round",
            ", ".join(map(str, missing)),
            decision.together,
        )

    def _expected(self, decision: Decision) -> set[int]:
        """The ranks to wait for, without those that have left."""
        if decision.together is None:
            return decision.expected - set(decision.left)
        # Which ranks found room is not known, only how many.
        is_complete = len(decision.there) >= decision.together
        return set() if is_complete else set(range(decision.together)) - set(decision.left)

    def _needs(self, decision: Decision) -> int:
        """How many must be in: the last ranks of a run finish without those that are done."""
        done = {rank for rank, how in decision.left.items() if how == DONE}
        if not done:
            return decision.needs
        known = {*decision.expected, *decision.uploads, *range(decision.together or 0)}
        return min(decision.needs, max(1, len(known - done)))

    def _propose(
        self, key: str, decision: Decision, layout: Layout, codec: Codec, *, is_last_check: bool
    ) -> Manifest | PastRound | None:
        late = self._look(decision)
        if decision.ahead > decision.number:  # its manifest is there, or folded
            decided = self.read(key) or self._past(decision)
            if decided is not None:
                return decided
        foreign = [n for n in decision.uploads.values() if n.layout != layout.fingerprint]
        if foreign:
            return self._refuse(key, decision, layout, foreign)
        problem = self._sift(decision, layout)
        if problem:
            void = self.void(decision.number, decision.attempt, DATA_ERROR + problem)
            return self.write(key, void)
        now = time.monotonic()
        needs, expected = self._needs(decision), self._expected(decision) | late
        if len(decision.uploads) >= needs and decision.quorum_at is None:
            decision.quorum_at = now
        waited = 0.0 if decision.quorum_at is None else now - decision.quorum_at
        is_grace_over = not decision.is_first and waited >= self.history.straggler_grace()
        verdict = manifests.decide(
            decision.uploads, expected, needs, is_grace_over=is_grace_over or is_last_check
        )
        if verdict.members is None:
            return None
        members = self._members(decision, verdict.members, layout, codec)
        if members is None:
            return None
        ranks = [m.rank for m in members]
        present = [m.rank for m in members if not m.has_left]
        if not present:
            return None
        missing = sorted(expected - set(ranks))
        if missing:
            log.warning("round %d goes on without ranks %s", decision.number, missing)
        return self.write(
            key,
            Manifest(
                run=self.keys.run,
                round=decision.number,
                attempt=decision.attempt,
                layout=layout.pack(),
                members=members,
                owners=manifests.owners(present, layout.shards, decision.number),
                blamed=decision.blamed,
                missing=missing,
                by=self.me.nonce,
                spread_s=0.0 if missing else waited,
                data=(self.ledger_writer and self.ledger_writer.data()) or msgspec.UNSET,
                owner_grace_s=self.history.advice(),
            ),
        )

    def _look(self, decision: Decision) -> set[int]:
        """Fill `ballot.uploads`; returns the ranks that were too late for the round before."""
        after = self.keys.uploads(decision.number - 1) if decision.number else None
        blobs = self.blobs.list(self.keys.uploads(), after)
        listing = [
            (blob.key, blob.modified, name)
            for blob in blobs
            if (name := parse_upload(blob.key, blob.size))
        ]
        decision.uploads = manifests.check(listing, decision.number, decision.blamed)
        decision.ahead = max((name.round for _, _, name in listing), default=-1)
        launch = self.start.launch
        marks = [] if launch is None else [parse_left(blob.key, launch) for blob in blobs]
        own = [modified for key, modified, _ in listing if key in self.uploads]
        if self._since is None and own:
            self._since = min(own)
        decision.left = {
            mark[0]: mark[1]
            for mark, blob in zip(marks, blobs, strict=False)
            if mark is not None
            and mark[0] not in decision.uploads
            and self._counts(mark[1], blob.modified)
        }
        last = self.last
        if last is None or last.round != decision.number - 1 or decision.attempt:
            return set()
        before = [(key, modified, n) for key, modified, n in listing if n.round == last.round]
        on_time = [modified for key, modified, _ in before if last.has(key)]
        late = [(modified, n.rank) for key, modified, n in before if not last.has(key)]
        late = [(modified, rank) for modified, rank in late if last.member(rank) is None]
        if on_time and late:
            behind = max(late)[0] - max(on_time)
            self.history.note_late(last.round, behind.total_seconds())
        return {rank for _, rank in late}

    def _sift(self, decision: Decision, layout: Layout) -> str:
        """Leave out the uploads whose claims are not good; returns why nobody may go on."""

        def header(name: UploadName) -> Callable[[], bytes]:
            def read() -> bytes:
                try:
                    return read_footer(self.blobs, name.key, name.size, layout).header
                except DamagedUpload as problem:
                    raise ValueError(problem.reason) from problem

            return read

        uploads = [
            SaidUpload(rank, read_note(name.header), header(name))
            for rank, name in decision.uploads.items()
        ]
        sifted = sift(self.ledger_writer, uploads, self.me.rank)
        decision.notes = sifted.notes
        for rank, reason in sifted.refused.items():
            key = decision.uploads[rank].key
            if key not in decision.refused:
                log.warning("the upload of rank %d is left out: %s", rank, reason)
                decision.refused.add(key)
        decision.uploads = {r: n for r, n in decision.uploads.items() if r in sifted.notes}
        return sifted.error

    def _members(
        self, decision: Decision, ranks: list[int], layout: Layout, codec: Codec
    ) -> list[Member] | None:
        """The manifest's members; None if an upload is bad: it is damaged, and deciding goes on."""
        names = [decision.uploads[rank] for rank in ranks]
        weights = manifests.bounded({name.rank: name.weight for name in names})
        for name in names:
            if weights[name.rank] < name.weight:
                log.warning(
                    "round %d: the weight of rank %d counts as %g instead of %g, %d times the "
                    "median: do all replicas count the same thing?",
                    decision.number,
                    name.rank,
                    weights[name.rank],
                    name.weight,
                    manifests.HEAVIEST,
                )
        if codec.is_exact:
            return [
                Member(n.rank, n.key, weights[n.rank], header=self._said(decision, n.rank))
                for n in names
            ]
        footers = [self.pool.submit(read_footer, self.blobs, n.key, n.size, layout) for n in names]
        members = []
        for name, footer in zip(names, footers, strict=True):
            try:
                sections, header = footer.result().sections, self._said(decision, name.rank)
                members.append(Member(name.rank, name.key, weights[name.rank], sections, header))
            except DamagedUpload as problem:
                log.warning("upload of rank %d left out: %s", name.rank, problem)
                decision.blamed.append(problem.upload)
        return members if len(members) == len(names) else None

    def _said(self, decision: Decision, rank: int) -> MemberNote | msgspec.UnsetType:
        note = decision.notes.get(rank)
        return msgspec.UNSET if note is None else member_note(note)

    def _refuse(
        self, key: str, decision: Decision, layout: Layout, foreign: list[UploadName]
    ) -> Manifest | None:
        """A void manifest that tells everyone which tensor differs."""
        name = foreign[0]
        try:
            theirs = Layout.unpack(read_footer(self.blobs, name.key, name.size, layout).layout)
            if not theirs.cells:
                raise DamagedUpload(name.key, "it is of an older version of atoll")
        except (DamagedUpload, ValueError) as problem:
            log.warning("upload of rank %d left out: %s", name.rank, problem)
            decision.blamed.append(name.key)
            return None
        error = (
            f"the tensors of rank {name.rank} differ from those of rank {self.me.rank}: "
            f"{difference(layout, theirs)} (there: rank {name.rank}, here: rank {self.me.rank})"
        )
        return self.write(key, self.void(decision.number, decision.attempt, error))

    def _past(self, decision: Decision) -> PastRound | None:
        """Where the run is, as the manifest is no longer there; None: nowhere later."""
        later = self.blobs.list(self.keys.manifests(), self.keys.manifest(decision.number, 9999))
        if not later:
            return None
        last = past.read_round(self.blobs, self.keys, decision.number)[-1:]
        manifest = last[0] if last else self.void(decision.number, decision.attempt)
        return PastRound(max(parse_round(blob.key) or 0 for blob in later), manifest)

    def _no_quorum(self, decision: Decision) -> BelowMinimumWorld:
        self._look(decision)
        ready, needs = len(decision.uploads), self._needs(decision)
        everyone = set(range(decision.together or self.me.world_size))
        groups = {
            "missing": everyone - decision.there,
            "finished": {rank for rank, how in decision.left.items() if how == DONE},
            "failed": {rank for rank, how in decision.left.items() if how == FAILED},
        }
        messages = [
            f"{message}: ranks {sorted(ranks)}" for message, ranks in groups.items() if ranks
        ]
        return BelowMinimumWorld(
            f"round {decision.number}: {ready} of at least {needs} ranks "
            f"uploaded within {self.me.timeout:g} s; {'; '.join(messages)}",
            ready=ready,
            required_min=needs,
            timeout=self.me.timeout,
        )


def refuse_foreign(manifest: Manifest, mine: Layout, rank: int) -> None:
    """Raises ValidationError if the manifest was decided for tensors unlike this replica's.

    A replica that is in time makes such a round void for everybody instead.
    """
    if manifest.layout == mine.pack():
        return
    theirs = Layout.unpack(manifest.layout)
    if theirs != mine:
        raise ValidationError(
            "tensors",
            f"of rank {rank}",
            f"round {manifest.round} went on without it with others: {difference(mine, theirs)}",
        )
