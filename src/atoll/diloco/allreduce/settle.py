"""Settling an attempt: wait for its roster, or decide it.

One rank lists the uploads, the others only read the roster's key. While nothing is decided, more
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
from atoll.diloco.allreduce import past, wire
from atoll.diloco.allreduce import roster as rosters
from atoll.diloco.allreduce.codecs import Codec
from atoll.diloco.allreduce.keys import Keys, UploadName, parse_left, parse_round, parse_upload
from atoll.diloco.allreduce.layout import Layout, difference
from atoll.diloco.allreduce.note import (
    DATA_ERROR,
    MemberNote,
    SaidUpload,
    Scribe,
    UploadNote,
    member_note,
    read_note,
    sift,
)
from atoll.diloco.allreduce.pace import History
from atoll.diloco.allreduce.roster import ROSTER, Member, PastRound, Roster
from atoll.diloco.allreduce.start import Start
from atoll.diloco.allreduce.upload import Blamed, read_footer
from atoll.diloco.blobs import Blobs

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
class Ballot:
    """The facts on which the roster of one attempt is decided."""

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
        self.scribe: Scribe | None = None
        self.last: Roster | None = None  # of the newest round this replica knows
        self.is_leaving = False  # it does not wait for anybody
        self.uploads: deque[str] = deque(maxlen=16)  # the last ones of this process
        self._since: datetime | None = None  # when it was there first, by the store's clock

    def first_ballot(self, number: int) -> Ballot:
        order, everyone = list(range(self.me.world_size)), set(range(self.me.world_size))
        if self.last is not None and self.last.members:
            # A run that goes on in a smaller world has members that cannot come.
            present = [m.rank for m in self.last.members if not m.is_gone]
            order = [rank for rank in present if rank < self.me.world_size]
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

    def settle(self, ballot: Ballot, layout: Layout, codec: Codec) -> Roster | PastRound | None:
        """The roster of the attempt, whichever rank decides it, or that its round is past.

        None: this rank's upload has to be made again before the ballot is settled on. Raises
        BelowMinimumWorld after the timeout.
        """
        return self._in_force(ballot, self._settle(ballot, layout, codec))

    def read_decided(self, ballot: Ballot) -> Roster | PastRound | None:
        """As `settle`, but nobody is waited for. None: nothing is decided."""
        key = self.keys.roster(ballot.number, ballot.attempt)
        return self._in_force(ballot, self.read(key))

    def _in_force(
        self, ballot: Ballot, roster: Roster | PastRound | None
    ) -> Roster | PastRound | None:
        if not isinstance(roster, Roster) or roster.error:
            return roster
        if sum(not member.is_gone for member in roster.members) > 1:
            return roster
        # One member alone could complete a roster that this process, or another, decided on
        # before it slept, and wrote after the true one was folded away. Nor does a void roster
        # count that somebody wrote who slept while the run went on.
        if not roster.members or past.is_past(self.blobs, self.keys, ballot.number):
            return self._past(ballot) or roster
        return roster

    def _settle(self, ballot: Ballot, layout: Layout, codec: Codec) -> Roster | PastRound | None:
        key = self.keys.roster(ballot.number, ballot.attempt)
        if ballot.started is None:
            ballot.started = time.monotonic()
            ballot.again_s = self.history.straggler_grace()
            ballot.says_at = min(FIRST_WORD_S, self.me.timeout / 4)
        started = ballot.started
        what = f"roster {layout.name}" if ballot.attempt == 0 else "next attempt"
        usual = self.history.usual(what)
        stagger = min(STAGGER_S, self.history.straggler_grace())
        if ballot.turn and usual > ballot.lead_s:  # a look before the usual time is in vain
            time.sleep(self._pause(ballot, 0.0, usual))
        while True:
            elapsed = time.monotonic() - started
            is_last_look = elapsed > self.me.timeout
            patience = max(0.0, usual - ballot.lead_s) if ballot.turn else 0.0
            is_looking = elapsed >= ballot.turn * stagger + patience
            is_looking = is_looking and elapsed >= ballot.idle_s
            is_looking = is_looking or is_last_look
            # The first in the order need not ask: others decide only if it was very slow itself.
            roster: Roster | PastRound | None = None
            if not is_looking or ballot.turn or elapsed > stagger:
                roster = self.read(key)
            if roster is None and is_looking:
                roster = self._propose(key, ballot, layout, codec, is_last_look=is_last_look)
            if roster is not None:
                if not ballot.is_first:
                    # When it was looked for: it may have been there before.
                    self.history.note_wait(what, ballot.lead_s + elapsed)
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
            if self.is_leaving:
                return None
            time.sleep(self._pause(ballot, elapsed, usual))

    def _pause(self, ballot: Ballot, elapsed_s: float, usual_s: float) -> float:
        if self.blobs.is_folder:
            return self.history.pause_s(elapsed_s, usual_s, is_cheap=True)
        # Uploads over one link take longer or shorter, and are all there at about the same time.
        return self.history.pause_s(ballot.lead_s + elapsed_s, usual_s, step=0.15)

    def read(self, key: str) -> Roster | None:
        """The roster at `key`, or None.

        Raises Permanent for an object that no replica wrote: its key cannot be used again.
        """
        problem: Exception | None = None
        for _ in range(3):
            try:
                body = wire.unseal(wire.ROSTER, wire.fence(key), self.blobs.get(key))
                roster = ROSTER.decode(body)
                self.history.note_advice(roster.owner_grace_s)
                return roster
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
    ) -> Roster | PastRound | None:
        late = self._look(ballot)
        if ballot.ahead > ballot.number:  # its roster is there, or folded
            decided = self.read(key) or self._past(ballot)
            if decided is not None:
                return decided
        foreign = [n for n in ballot.uploads.values() if n.layout != layout.fingerprint]
        if foreign:
            return self._refuse(key, ballot, layout, foreign)
        problem = self._sift(ballot, layout)
        if problem:
            void = self.void(ballot.number, ballot.attempt, DATA_ERROR + problem)
            return self.write(key, void)
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
        present = [m.rank for m in members if not m.is_gone]
        if not present:
            return None
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
                owners=rosters.owners(present, layout.shards, ballot.number),
                blamed=ballot.blamed,
                missing=missing,
                by=self.me.nonce,
                spread_s=0.0 if missing else waited,
                data=(self.scribe and self.scribe.data()) or msgspec.UNSET,
                owner_grace_s=self.history.advice(),
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
        ballot.ahead = max((name.round for _, _, name in listing), default=-1)
        launch = self.start.launch
        marks = [] if launch is None else [parse_left(blob.key, launch) for blob in blobs]
        own = [modified for key, modified, _ in listing if key in self.uploads]
        if self._since is None and own:
            self._since = min(own)
        ballot.left = {
            mark[0]: mark[1]
            for mark, blob in zip(marks, blobs, strict=False)
            if mark is not None
            and mark[0] not in ballot.uploads
            and self._counts(mark[1], blob.modified)
        }
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

    def _sift(self, ballot: Ballot, layout: Layout) -> str:
        """Leave out the uploads whose claims are not good; returns why nobody may go on."""

        def says(name: UploadName) -> Callable[[], bytes]:
            def read() -> bytes:
                try:
                    return read_footer(self.blobs, name.key, name.size, layout).says
                except Blamed as problem:
                    raise ValueError(problem.reason) from problem

            return read

        uploads = [
            SaidUpload(rank, read_note(name.says), says(name))
            for rank, name in ballot.uploads.items()
        ]
        sifted = sift(self.scribe, uploads, self.me.rank)
        ballot.notes = sifted.notes
        for rank, reason in sifted.refused.items():
            key = ballot.uploads[rank].key
            if key not in ballot.refused:
                log.warning("the upload of rank %d is left out: %s", rank, reason)
                ballot.refused.add(key)
        ballot.uploads = {r: n for r, n in ballot.uploads.items() if r in sifted.notes}
        return sifted.error

    def _members(
        self, ballot: Ballot, ranks: list[int], layout: Layout, codec: Codec
    ) -> list[Member] | None:
        """The roster's members; None if an upload is bad: it is blamed, and the ballot goes on."""
        names = [ballot.uploads[rank] for rank in ranks]
        weights = rosters.bounded({name.rank: name.weight for name in names})
        for name in names:
            if weights[name.rank] < name.weight:
                log.warning(
                    "round %d: the weight of rank %d counts as %g instead of %g, %d times the "
                    "median: do all replicas count the same thing?",
                    ballot.number,
                    name.rank,
                    weights[name.rank],
                    name.weight,
                    rosters.HEAVIEST,
                )
        if codec.is_exact:
            return [
                Member(n.rank, n.key, weights[n.rank], said=self._said(ballot, n.rank))
                for n in names
            ]
        footers = [self.pool.submit(read_footer, self.blobs, n.key, n.size, layout) for n in names]
        members = []
        for name, footer in zip(names, footers, strict=True):
            try:
                sections, said = footer.result().sections, self._said(ballot, name.rank)
                members.append(Member(name.rank, name.key, weights[name.rank], sections, said))
            except Blamed as problem:
                log.warning("upload of rank %d left out: %s", name.rank, problem)
                ballot.blamed.append(problem.upload)
        return members if len(members) == len(names) else None

    def _said(self, ballot: Ballot, rank: int) -> MemberNote | msgspec.UnsetType:
        note = ballot.notes.get(rank)
        return msgspec.UNSET if note is None else member_note(note)

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

    def _past(self, ballot: Ballot) -> PastRound | None:
        """Where the run is, as the roster of the ballot is no longer there; None: nowhere later."""
        later = self.blobs.find(self.keys.rosters(), self.keys.roster(ballot.number, 9999))
        if not later:
            return None
        last = past.read_round(self.blobs, self.keys, ballot.number)[-1:]
        roster = last[0] if last else self.void(ballot.number, ballot.attempt)
        return PastRound(max(parse_round(blob.key) or 0 for blob in later), roster)

    def _no_quorum(self, ballot: Ballot) -> BelowMinimumWorld:
        self._look(ballot)
        ready, needs = len(ballot.uploads), self._needs(ballot)
        everyone = set(range(ballot.together or self.me.world_size))
        groups = {
            "missing": everyone - ballot.there,
            "finished": {rank for rank, how in ballot.left.items() if how == DONE},
            "failed": {rank for rank, how in ballot.left.items() if how == FAILED},
        }
        words = [f"{word}: ranks {sorted(ranks)}" for word, ranks in groups.items() if ranks]
        return BelowMinimumWorld(
            f"round {ballot.number}: {ready} of at least {needs} ranks "
            f"uploaded within {self.me.timeout:g} s; {'; '.join(words)}",
            ready=ready,
            required_min=needs,
            timeout=self.me.timeout,
        )


def refuse_foreign(roster: Roster, mine: Layout, rank: int) -> None:
    """Raises ValidationError if the roster was decided for tensors unlike this replica's.

    A replica that is in time makes such a round void for everybody instead.
    """
    if roster.layout == mine.pack():
        return
    theirs = Layout.unpack(roster.layout)
    if theirs != mine:
        raise ValidationError(
            "tensors",
            f"of rank {rank}",
            f"round {roster.round} went on without it with others: {difference(mine, theirs)}",
        )
