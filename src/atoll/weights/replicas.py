"""Replicas of a DiLoCo run publish together: all have the same bits, so each uploads a share.

After a round, the manifest says who is in it. One of them leads: it has claimed the channel for the
run. Each member puts its share of the next version where the leader finds it; the leader makes what
does not come, and creates the record. A member whose wait runs out claims the channel, and leads.
Followers and gc see a channel like any other: a claim fences the leader before, however late it
wakes up.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from atoll.objectstore.effects import Get, List, Put
from atoll.weights.machine import (
    HostCopy,
    Pending,
    PublisherMachine,
    Reader,
    read_log,
)
from atoll.weights.records import (
    Claim,
    Damaged,
    Record,
    Row,
    Share,
    VersionRecord,
    log_key,
    log_number,
    looks_like_claim,
    read_share_key,
    seal,
    share_key,
    try_folder,
    unseal_share,
)
from atoll.weights.shares import Shards, put_delta, put_files, put_index

R = TypeVar("R")
Steps = Generator[Any, Any, R]


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait. Answer: None."""

    seconds: float


class RoundValues(Shards, HostCopy, Protocol):
    """The values that all replicas have after a round. They become the base of the next."""

    def share(self, index: int, count: int) -> Any:
        """Those of one of `count` shares, which every replica cuts alike; nothing is copied."""

    def delta(self, base: Any) -> Any:
        """A Delta of these tensors against those of the base."""

    def names(self) -> set[str]: ...


class Round(NamedTuple):
    """What a version is published for. `members`: who is in the round, the same in all of them.

    `patience_s`: so long a leader waits for shares, and twice as long others wait for a leader.
    """

    round: int
    members: tuple[str, ...]
    step: int | None = None
    patience_s: float = 120.0

    def order(self, who: str) -> int:
        return self.members.index(who) if who in self.members else len(self.members)


@dataclass
class ReplicaMachine(PublisherMachine):
    """One replica of the run `run`, which publishes as `who`. Every `full_every`th number is full.

    `leader`: whoever publishes for the run now; empty: nobody does. `newest`: the last version.
    `poll_s`: how often a replica that waits asks.
    """

    run: str = ""
    poll_s: float = 1.0
    leader: str = ""
    newest: VersionRecord | None = None
    is_joined: bool = False  # the run had the channel when this replica last saw it
    serial: int = 0
    reader: Reader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = Reader(self.who, self.load, self.clock)

    def publish_round(self, values: RoundValues, what: Round) -> Steps[VersionRecord | None]:
        """The version of this round, whoever committed it; None: a later round has one.

        `values` belong to this machine from here on. After a StoreError it is unknown whether there
        is a version; the next call, of this round or a later one, has everything.
        """
        if self.successor:
            self._supersede(self.successor)
        yield from self.settle()
        if not self._is_done(what):
            yield from self._read_log()
        since, first, helped = self.clock(), self.leader, (0, "")
        while not self._is_done(what):
            is_waited_for = self.leader != "" and not self._is_gone(first, what)
            turns = what.order(self.who) + 2 * is_waited_for
            if self.leader == self.who:
                yield from self._lead(values, what)
            elif self.clock() - since >= turns * what.patience_s:
                yield from self._claim_next()
            elif is_waited_for and helped != (self.head + 1, self.leader):
                helped = (self.head + 1, self.leader)
                yield from self._help(values, what)
                since = self.clock()
            else:
                yield Sleep(self.poll_s)
            if not self._is_done(what):
                before = self.leader
                yield from self._read_log()
                since = since if self.leader == before else self.clock()
        newest = self.newest
        if newest is None or newest.round != what.round:
            return None
        if newest.state == values.state:
            self._hold(values, newest)  # nothing is to be downloaded
        if self.leader == self.who:
            yield from self.finish()
        return newest

    def _is_gone(self, first: str, what: Round) -> bool:
        """Whether the leader is the one of before this call, and not in the round."""
        return self.leader == first and first not in (what.members or (first,))

    def _is_done(self, what: Round) -> bool:
        newest = self.newest
        return newest is not None and newest.run == self.run and newest.round >= what.round

    # -- The log

    def _read_log(self) -> Steps[None]:
        """Learn who leads, and what is published."""
        rows = [
            (number, row)
            for row in (yield List("log/", log_key(self.head)))
            if (number := log_number(row.key)) is not None
        ]
        if not rows:
            return
        last = rows[-1][0]
        record = yield from read_log(last)
        # The newest record alone says who publishes: a claim may have come late, into the past.
        is_ours = record is not None and record.run == self.run
        if self.is_joined and record is not None and not is_ours:
            self._supersede(last)
        self.newest = (yield from self._find_version(rows, record)) or self.newest
        if isinstance(record, Claim) and record.publisher == self.who:
            self.claim = last
        self.leader = record.publisher if is_ours and record is not None else ""
        self.is_joined = self.is_joined or is_ours
        self.head = last

    def _read_base(self) -> Steps[None]:
        """Bring the base to the newest version; without it, the next version is full.

        After the claim: else one that publishes often is never caught up with.
        """
        if self.reader.position < self.head:
            yield from self.reader.advance(self.head)
            yield from self.reader.leave()
        is_read = self.reader.position == self.head and self.reader.number > 0
        self.base = self.reader.copy if is_read else None
        self.parent = self.reader.number if is_read else 0

    def _hold(self, values: RoundValues, record: VersionRecord) -> None:
        reader = self.reader
        reader.copy, reader.record, reader.position = values, record, record.number

    def _find_version(
        self, rows: Sequence[tuple[int, Row]], last: Record | None
    ) -> Steps[VersionRecord | None]:
        if isinstance(last, VersionRecord):
            return last
        for number, row in reversed(rows):
            if not looks_like_claim(row.size):
                record = yield from read_log(number)
                if isinstance(record, VersionRecord):
                    return record
        return None

    def _claim_next(self) -> Steps[None]:
        """Claim the channel, if nobody else just did; the log tells whether it counts."""
        body = seal(Claim(number=self.head + 1, publisher=self.who, run=self.run))
        yield from self._create(self.head + 1, body)

    # -- Shares

    def _help(self, values: RoundValues, what: Round) -> Steps[None]:
        """Put the own share where the leader finds it; its description comes last."""
        index = what.order(self.who)
        if index == len(what.members):
            return
        yield from self._read_base()
        share = yield from self._put_share(values, what, index)
        folder = self._folder(what)
        yield Put(f"{share_key(folder, index, self.who, self.serial)}.json", seal(share))

    def _put_share(self, values: RoundValues, what: Round, index: int) -> Steps[Share]:
        self.serial += 1
        share, folder = values.share(index, max(len(what.members), 1)), self._folder(what)
        key = share_key(folder, index, self.who, self.serial)
        if self._is_full():
            return (yield from put_files(key, share))
        _, done = yield from put_delta(key, share.delta(self.base))
        return done

    def _is_full(self) -> bool:
        return self.base is None or (self.head + 1) % self.full_every == 0

    def _folder(self, what: Round) -> str:
        kind = "full" if self._is_full() else "delta"
        return try_folder(kind, self.head + 1, self.leader, what.round)

    def _lead(self, values: RoundValues, what: Round) -> Steps[None]:
        """Bring the shares of all together, and commit the version."""
        yield from self._read_base()
        count, own = max(len(what.members), 1), what.order(self.who)
        shares: dict[int, Share] = {}
        if self.who in what.members:
            shares[own] = yield from self._put_share(values, what, own)
        until = self.clock() + what.patience_s
        while True:
            if len(shares) < count and what.members:
                yield from self._collect(values, what, shares)
            if len(shares) == count:
                break
            if self.clock() < until and what.members:
                yield Sleep(self.poll_s)
                continue
            for index in range(count):
                if index not in shares:
                    shares[index] = yield from self._put_share(values, what, index)
        yield from self.commit(
            (yield from self._complete(values, what, [shares[each] for each in range(count)]))
        )

    def _collect(self, values: RoundValues, what: Round, shares: dict[int, Share]) -> Steps[None]:
        """Take the shares that have come; one of other values than the own does not count."""
        for row in (yield List(f"{self._folder(what)}/")):
            match = read_share_key(row.key)
            if match is None or match[0] in shares or match[0] >= len(what.members):
                continue
            index, who = match
            data = yield Get(row.key)
            try:
                share = None if data is None else unseal_share(data)
            except Damaged:
                continue
            state = values.share(index, len(what.members)).state
            if share is not None and who == what.members[index] and share.state == state:
                shares[index] = share

    def _complete(
        self, values: RoundValues, what: Round, shares: Sequence[Share]
    ) -> Steps[Pending]:
        size = sum(share.size for share in shares)
        is_full = self._is_full()
        if is_full:
            size += yield from put_index(self._folder(what), values, values.state, shares)
            self.since_full = 0
        names = set[str]() if is_full else self.base.names()  # type: ignore[union-attr]
        record = VersionRecord(
            number=self.head + 1,
            publisher=self.who,
            step=what.step,
            state=values.state,
            parent=None if is_full else self.parent,
            parts=tuple(part for share in shares for part in share.parts),
            removed=tuple(sorted(names - values.names())),
            changed=sum(share.changed for share in shares),
            bytes=size,
            run=self.run,
            round=what.round,
        )

        def move() -> None:
            self._hold(values, record)
            self.base, self.newest = values, record

        return Pending(record, seal(record), move)

    def _lose(self, number: int) -> None:
        """The log says to whom: another of the run leads, or another run has the channel."""

    def _renew_full(self) -> Steps[None]:
        """Nothing: every `full_every`th number is a full copy."""
        return
        yield
