"""Settling an attempt: wait for its roster, or decide it.

One rank lists the uploads, the others only read the roster's key. While nothing is decided, more
ranks begin to list, one after the other, so that no single rank is needed.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import Executor
from dataclasses import dataclass, field

import msgspec

from atoll.core.errors import BackendError, BelowMinimumWorld, NotFound, Permanent
from atoll.diloco.allreduce import roster as rosters
from atoll.diloco.allreduce import wire
from atoll.diloco.allreduce.codecs import Codec
from atoll.diloco.allreduce.keys import Keys, UploadName, parse_left, parse_upload
from atoll.diloco.allreduce.layout import Layout, difference
from atoll.diloco.allreduce.pace import History, poll_pause
from atoll.diloco.allreduce.roster import Member, Roster
from atoll.diloco.allreduce.start import Start
from atoll.diloco.allreduce.upload import Blamed, read_footer
from atoll.diloco.blobs import Blobs

log = logging.getLogger("atoll.allreduce")

STAGGER_S = 1.5  # between the ranks that begin to look at the uploads
FIRST_WORD_S = 3.0  # until a rank says whom it waits for in the first round
NEXT_WORD_S = 30.0
DONE, FAILED = LEAVING = ("done", "failed")


@dataclass(frozen=True)
class Me:
    """One process in one slot of a run. A restart has another nonce."""

    rank: int
    world_size: int
    min_replicas: int
    nonce: str
    timeout: float


@dataclass
class Ballot:
    """The facts on which the roster of one attempt is decided."""

    number: int
    attempt: int
    turn: int
    expected: set[int]
    blamed: list[str] = field(default_factory=list)
    quorum_at: float | None = None
    started: float | None = None  # when it was first settled on
    again_s: float = 0.0  # after so many seconds without this rank, it uploads again
    is_blamed: bool = False  # this rank's upload may not be used
    uploads: dict[int, UploadName] = field(default_factory=dict)
    needs: int = 1  # this many ranks must be in
    together: int | None = None  # once so many are there, nobody else is waited for
    is_first: bool = False  # of the run: they are waited for until the timeout
    left: dict[int, str] = field(default_factory=dict)  # how ranks that have ended left
    says_at: float = 0.0

    @property
    def there(self) -> set[int]:
        """The ranks of which nothing more is waited for."""
        return {*self.uploads, *self.left}


class Settler:
    """Reads or decides the rosters of a run."""

    def __init__(
        self,
        blobs: Blobs,
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
        self.last: Roster | None = None  # of the newest round this replica knows

    def first_ballot(self, number: int) -> Ballot:
        order, everyone = list(range(self.me.world_size)), set(range(self.me.world_size))
        if self.last is not None and self.last.members:
            order = [m.rank for m in self.last.members]
            everyone = {*order, self.me.rank}
        turn = rosters.turn(self.me.rank, order, self.me.world_size)
        start, ballot = self.start, Ballot(number, 0, turn, everyone, needs=self.me.min_replicas)
        if self.last is None:
            ballot.together = start.together
            if not start.is_begun:
                ballot.needs, ballot.is_first = start.quorum, start.together is not None
        return ballot

    def next_ballot(self, roster: Roster, blame: wire.Blame) -> Ballot:
        """The ballot after `roster` was given up. The rank that gave it up decides first."""
        out = {m.rank for m in roster.members if m.upload in blame.uploads}
        ranks = [m.rank for m in roster.members if m.rank not in out]
        turn = rosters.turn(self.me.rank, ranks, self.me.world_size) + 1
        return Ballot(
            roster.round,
            roster.attempt + 1,
            0 if blame.by == self.me.rank else turn,
            set(ranks),
            sorted({*roster.blamed, *blame.uploads}),
            needs=self.me.min_replicas,
        )

    def settle(self, ballot: Ballot, layout: Layout, codec: Codec) -> Roster | None:
        """The roster of the attempt, whichever rank decides it.

        None: this rank's upload has to be made again before the ballot is settled on. Raises
        BelowMinimumWorld after the timeout.
        """
        key = self.keys.roster(ballot.number, ballot.attempt)
        if ballot.started is None:
            ballot.started = time.monotonic()
            ballot.again_s = self.history.straggler_grace()
            ballot.says_at = min(FIRST_WORD_S, self.me.timeout / 4)
        started = ballot.started
        what = f"roster {layout.name}" if ballot.attempt == 0 else "next attempt"
        usual = self.history.usual(what)
        stagger = min(STAGGER_S, self.history.straggler_grace())
        while True:
            elapsed = time.monotonic() - started
            is_last_look = elapsed > self.me.timeout
            is_looking = elapsed >= ballot.turn * stagger + (usual if ballot.turn else 0)
            is_looking = is_looking or is_last_look
            # The first in the order need not ask: others decide only if it was very slow itself.
            roster = None
            if not is_looking or ballot.turn or elapsed > stagger:
                roster = self.read(key)
            if roster is None and is_looking:
                roster = self._propose(key, ballot, layout, codec, is_last_look=is_last_look)
            if roster is not None:
                if not ballot.is_first:
                    self.history.note_wait(what, time.monotonic() - started)
                return roster
            if ballot.is_first and is_looking and elapsed >= ballot.says_at:
                ballot.says_at = elapsed + NEXT_WORD_S
                self._say(ballot)
            # This rank's upload is damaged or deleted: a quorum would have gone on by now.
            is_lost = (
                is_looking and self.me.rank not in ballot.uploads and elapsed > 2 * ballot.again_s
            )
            # Or this rank was given up on and nobody goes on without it: it says that it is alive.
            is_alive = ballot.is_blamed and elapsed > ballot.again_s
            if is_last_look:
                raise self._no_quorum(ballot)
            if is_lost or is_alive:
                ballot.is_blamed = False
                ballot.again_s = elapsed
                return None
            time.sleep(poll_pause(elapsed, usual))

    def read(self, key: str) -> Roster | None:
        """The roster at `key`, or None.

        Raises Permanent for an object that no replica wrote: its key cannot be used again.
        """
        problem: Exception | None = None
        for _ in range(3):
            try:
                body = wire.unseal(wire.ROSTER, wire.fence(key), self.blobs.get(key))
                return msgspec.json.decode(body, type=Roster)
            except NotFound:
                return None
            except (wire.Corrupt, msgspec.MsgspecError) as error:
                problem = error
        raise Permanent(f"{self.blobs.name}: {key} is not a roster: {problem}")

    def write(self, key: str, roster: Roster) -> Roster:
        """The roster in force: this one, or the one that was written first."""
        sealed = wire.seal(wire.ROSTER, wire.fence(key), msgspec.json.encode(roster))
        if self.blobs.create(key, sealed):
            return roster
        first = self.read(key)
        if first is None:
            raise Permanent(f"{self.blobs.name}: {key} can neither be created nor read")
        return first

    def void(self, number: int, attempt: int, error: str = "") -> Roster:
        return Roster(
            self.keys.run, number, attempt, b"", [], [], [], [], self.me.nonce, error=error
        )

    def come(self) -> None:
        """No mark says that this rank has left."""
        if self.start.launch is not None:
            keys = [self.keys.left(self.start.launch, self.me.rank, how) for how in LEAVING]
            self.blobs.delete(keys)

    def leave(self, how: str) -> None:
        """Mark this rank as one that has left. The store may fail: others wait longer then."""
        if self.start.launch is None:
            return
        try:
            self.blobs.put(self.keys.left(self.start.launch, self.me.rank, how), how.encode())
        except BackendError as error:
            log.warning("the others cannot know that rank %d has left: %s", self.me.rank, error)

    def _say(self, ballot: Ballot) -> None:
        assert ballot.together is not None
        missing = sorted(set(range(ballot.together)) - ballot.there)
        log.warning(
            "waiting for ranks %s of %d before the first round",
            ", ".join(map(str, missing)),
            ballot.together,
        )

    def _expected(self, ballot: Ballot) -> set[int]:
        """The ranks to wait for, without those that have left."""
        if ballot.together is None:
            return ballot.expected - set(ballot.left)
        # Which ranks found room is not known, only how many.
        is_complete = len(ballot.there) >= ballot.together
        return set() if is_complete else set(range(ballot.together)) - set(ballot.left)

    def _needs(self, ballot: Ballot) -> int:
        """How many must be in: the last ranks of a run finish without those that are done."""
        done = {rank for rank, how in ballot.left.items() if how == DONE}
        if not done:
            return ballot.needs
        known = {*ballot.expected, *ballot.uploads, *range(ballot.together or 0)}
        return min(ballot.needs, max(1, len(known - done)))

    def _propose(
        self, key: str, ballot: Ballot, layout: Layout, codec: Codec, *, is_last_look: bool
    ) -> Roster | None:
        late = self._look(ballot)
        foreign = [n for n in ballot.uploads.values() if n.layout != layout.fingerprint]
        if foreign:
            return self._refuse(key, ballot, layout, foreign)
        now = time.monotonic()
        needs, expected = self._needs(ballot), self._expected(ballot) | late
        if len(ballot.uploads) >= needs and ballot.quorum_at is None:
            ballot.quorum_at = now
        waited = 0.0 if ballot.quorum_at is None else now - ballot.quorum_at
        is_grace_over = not ballot.is_first and waited >= self.history.straggler_grace()
        verdict = rosters.decide(
            ballot.uploads, expected, needs, is_grace_over=is_grace_over or is_last_look
        )
        if verdict.members is None:
            return None
        members = self._members(ballot, verdict.members, layout, codec)
        if members is None:
            return None
        ranks = [m.rank for m in members]
        missing = sorted(expected - set(ranks))
        if missing:
            log.warning("round %d goes on without ranks %s", ballot.number, missing)
        return self.write(
            key,
            Roster(
                run=self.keys.run,
                round=ballot.number,
                attempt=ballot.attempt,
                layout=layout.pack(),
                members=members,
                owners=rosters.owners(ranks, layout.shards, ballot.number),
                blamed=ballot.blamed,
                missing=missing,
                by=self.me.nonce,
                spread_s=0.0 if missing else waited,
            ),
        )

    def _look(self, ballot: Ballot) -> set[int]:
        """Fill `ballot.uploads`; returns the ranks that were too late for the round before."""
        after = self.keys.uploads(ballot.number - 1) if ballot.number else None
        blobs = self.blobs.find(self.keys.uploads(), after)
        listing = [
            (blob.key, blob.modified, name)
            for blob in blobs
            if (name := parse_upload(blob.key, blob.size))
        ]
        ballot.uploads = rosters.look(listing, ballot.number, ballot.blamed)
        launch = self.start.launch
        marks = [] if launch is None else [parse_left(blob.key, launch) for blob in blobs]
        ballot.left = {rank: how for rank, how in filter(None, marks) if rank not in ballot.uploads}
        last = self.last
        if last is None or last.round != ballot.number - 1 or ballot.attempt:
            return set()
        before = [(key, modified, n) for key, modified, n in listing if n.round == last.round]
        on_time = [modified for key, modified, _ in before if last.has(key)]
        late = [(modified, n.rank) for key, modified, n in before if not last.has(key)]
        late = [(modified, rank) for modified, rank in late if last.member(rank) is None]
        if on_time and late:
            behind = max(late)[0] - max(on_time)
            self.history.note_late(last.round, behind.total_seconds())
        return {rank for _, rank in late}

    def _members(
        self, ballot: Ballot, ranks: list[int], layout: Layout, codec: Codec
    ) -> list[Member] | None:
        """The roster's members; None if an upload is bad: it is blamed, and the ballot goes on."""
        names = [ballot.uploads[rank] for rank in ranks]
        if codec.is_exact:
            return [Member(n.rank, n.key, n.weight) for n in names]
        footers = [self.pool.submit(read_footer, self.blobs, n.key, n.size, layout) for n in names]
        members = []
        for name, footer in zip(names, footers, strict=True):
            try:
                members.append(Member(name.rank, name.key, name.weight, footer.result().sections))
            except Blamed as problem:
                log.warning("upload of rank %d left out: %s", name.rank, problem)
                ballot.blamed.append(problem.upload)
        return members if len(members) == len(names) else None

    def _refuse(
        self, key: str, ballot: Ballot, layout: Layout, foreign: list[UploadName]
    ) -> Roster | None:
        """A void roster that tells everyone which tensor differs."""
        name = foreign[0]
        try:
            theirs = Layout.unpack(read_footer(self.blobs, name.key, name.size, layout).layout)
            if not theirs.cells:
                raise Blamed(name.key, "it is of an older version of atoll")
        except (Blamed, ValueError) as problem:
            log.warning("upload of rank %d left out: %s", name.rank, problem)
            ballot.blamed.append(name.key)
            return None
        error = (
            f"the tensors of rank {name.rank} differ from those of rank {self.me.rank}: "
            f"{difference(layout, theirs)} (there: rank {name.rank}, here: rank {self.me.rank})"
        )
        return self.write(key, self.void(ballot.number, ballot.attempt, error))

    def _no_quorum(self, ballot: Ballot) -> BelowMinimumWorld:
        self._look(ballot)
        ready, needs = len(ballot.uploads), self._needs(ballot)
        missing = sorted(set(range(ballot.together or self.me.world_size)) - set(ballot.uploads))
        ended = f" (ended: {sorted(ballot.left)})" if ballot.left else ""
        return BelowMinimumWorld(
            f"round {ballot.number}: {ready} of at least {needs} ranks "
            f"uploaded within {self.me.timeout:g} s; missing: ranks {missing}{ended}",
            ready=ready,
            required_min=needs,
            timeout=self.me.timeout,
        )
