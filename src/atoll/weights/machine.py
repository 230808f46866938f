"""The weight channel as a pure machine: generators that yield requests and are sent the answers.

A `Reader` goes from version to version; a `PublisherMachine` makes them and deletes what nobody
needs. Neither knows tensors, threads, clocks or a network: `HostCopy` and `Source` are what they
know of values, and a StoreError is what they know of faults; a List is answered with Rows. The
numbers of the rules in comments are those of docs/decisions/026; tests/sim/weights breaks each of
them once.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from atoll.core.errors import AtollError
from atoll.files.writing import Buffer
from atoll.objectstore.effects import Create, Delete, Get, List, Put, StoreError
from atoll.weights.records import (
    SEAL,
    Claim,
    Damaged,
    FullCopy,
    Part,
    Record,
    Row,
    Try,
    VersionRecord,
    lease_key,
    log_key,
    log_number,
    looks_like_claim,
    read_lease,
    read_record,
    read_try,
    seal,
    try_folder,
    unseal,
)

R = TypeVar("R")
Steps = Generator[Put | Create | Get | List | Delete, Any, R]
Pieces = Sequence[Buffer]

# A lease outlives a slow request and its retries (60 s of patience) several times over.
LEASE_LIFE_S = 300.0
RENEW_S = 60.0
# A lease that old belongs to nobody: a follower that froze for so long begins with a new one.
DEAD_LEASE_S = 10 * LEASE_LIFE_S


class Superseded(AtollError):
    """Another publisher has claimed the channel: this one can never publish again."""


class Change(Protocol):
    """A delta that fits: what to write where, and the state that comes of it."""

    @property
    def state(self) -> str: ...


class HostCopy(Protocol):
    """The tensors of one version in host memory."""

    @property
    def state(self) -> str: ...

    def prepare(self, parts: Sequence[Buffer], removed: Sequence[str]) -> Any:
        """A Change, with nothing touched yet. Raises Damaged."""

    def apply(self, change: Any) -> None: ...

    def files(self) -> Iterable[tuple[str, Pieces]]:
        """The files of a full copy."""


class Delta(Protocol):
    """Parts one after the other; then what the record says of them."""

    def __iter__(self) -> Iterator[Buffer]: ...

    @property
    def state(self) -> str: ...

    @property
    def removed(self) -> Sequence[str]: ...

    @property
    def changed(self) -> int: ...


class Source(Protocol):
    """What the caller publishes. Its memory is read once: one of the two is called, once."""

    def copy(self) -> HostCopy: ...

    def delta(self, base: Any) -> Delta: ...


def sha256_of(pieces: Pieces) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def read_log(number: int) -> Steps[Record | None]:
    """The record of this number; None if it is not there or not readable."""
    data = yield Get(log_key(number))
    try:
        return None if data is None else read_record(data, number)
    except Damaged:
        return None


def read_full_copy(folder: str) -> Steps[FullCopy | None]:
    data = yield Get(f"{folder}/{SEAL}")
    try:
        return None if data is None else unseal(data)
    except Damaged:
        return None


def counts(copy: Try, content: FullCopy | None, record: Record | None) -> bool:
    """Whether a full copy is one of its version (rule 8)."""
    return (
        content is not None
        and isinstance(record, VersionRecord)
        and (record.publisher, record.state) == (copy.who, content.state)
    )


def numbers_in(log: Iterable[Row]) -> list[int]:
    return [number for row in log if (number := log_number(row.key)) is not None]


class Reader:
    """Follows the versions of a channel; `copy` is what it holds, and `record` says which it is.

    `load` makes a HostCopy of the files of a full copy. `position`: up to this number all records
    were read, one after the other. `deltas`: so many were applied since the last full copy.
    """

    def __init__(
        self,
        follower: str,
        load: Callable[[Mapping[str, Buffer]], HostCopy],
        clock: Callable[[], float],
    ) -> None:
        self.follower = follower
        self.copy: HostCopy | None = None
        self.record: VersionRecord | None = None
        self.position = 0
        self.deltas = 0
        self._load = load
        self._clock = clock
        self._lease_key = ""  # the newest
        self._leases = set[str]()  # that may be in the store
        self._renewed_at = 0.0

    @property
    def number(self) -> int:
        return self.record.number if self.record else 0

    def advance(self, limit: int | None = None) -> Steps[None]:
        """Go to the newest version, or as far as `limit`; never back, and never past a hole."""
        yield from self._lease(self.number)
        while not (yield from self._follow(limit)):
            if not (yield from self._reload(limit)):
                break
        if self.record is not None and self._key_of(self.number) != self._lease_key:
            yield from self._lease(self.number)

    def leave(self) -> Steps[None]:
        """Drop the lease."""
        if self._leases:
            yield Delete(tuple(self._leases))
            self._leases.clear()

    def _key_of(self, number: int) -> str:
        return lease_key(self.follower, number, is_joining=self.record is None)

    def _lease(self, number: int) -> Steps[None]:
        """Keep from deletion what comes after this number (rule 13)."""
        self._lease_key = self._key_of(number)
        yield from self._renew()
        # A later one stays: a List that passed the new one's place before it came finds that.
        if old := {key for key in self._leases if key < self._lease_key}:
            yield Delete(tuple(old))
            self._leases -= old

    def _renew(self) -> Steps[None]:
        self._leases.add(self._lease_key)  # also if no answer comes
        self._renewed_at = self._clock()
        yield Put(self._lease_key, b"")

    def _follow(self, limit: int | None) -> Steps[bool]:
        """Take record after record. False: from here on only a full copy helps (rule 11)."""
        if self.record is None:
            return False
        self.position = self.number
        for row in (yield List("log/", log_key(self.number))):
            number = log_number(row.key)
            if number is None:
                continue
            if limit is not None and number > limit:
                break
            if number != self.position + 1:
                return False
            if not looks_like_claim(row.size):
                record = yield from read_log(number)
                if record is None:
                    return False
                if isinstance(record, VersionRecord) and not (yield from self._take(record)):
                    return False
            self.position = number
        return True

    def _take(self, record: VersionRecord) -> Steps[bool]:
        """Apply a delta. False: it does not fit, or is not there as it was written (rule 12)."""
        if self.copy is None or record.parent != self.number:
            return False
        parts = []
        for part in record.parts:
            body = yield from self._read(part.key, part.sha256)
            if body is None:
                return False
            parts.append(body)
        try:
            change = self.copy.prepare(parts, record.removed)
        except Damaged:
            return False
        if change.state != record.state:
            return False
        copy, self.copy, self.record = self.copy, None, None  # it has no version while it changes
        copy.apply(change)
        self.copy, self.record = copy, record
        self.deltas += 1
        return True

    def _reload(self, limit: int | None) -> Steps[bool]:
        """Load the newest full copy that is newer than what is held."""
        keys = yield List("full/")
        copies = {copy for key, *_ in keys if key.endswith(f"/{SEAL}") and (copy := read_try(key))}
        for copy in sorted(copies, key=lambda copy: (copy.number, copy.folder), reverse=True):
            if copy.number <= self.number:
                break
            if limit is not None and copy.number > limit:
                continue
            if self.record is None:  # others need not stay: there may always be one that joins
                yield from self._lease(copy.number - 1)
            if (yield from self._load_copy(copy)):
                return True
        return False

    def _load_copy(self, copy: Try) -> Steps[bool]:
        content = yield from read_full_copy(copy.folder)
        record = yield from read_log(copy.number)
        if content is None or not counts(copy, content, record):
            return False
        files: dict[str, Buffer] = {}
        for name, digest in content.files.items():
            body = yield from self._read(f"{copy.folder}/{name}", digest)
            if body is None:
                return False
            files[name] = body
        try:
            values = self._load(files)
        except Damaged:
            return False
        if values.state != content.state:
            return False
        assert isinstance(record, VersionRecord)
        self.copy, self.record, self.position, self.deltas = values, record, copy.number, 0
        return True

    def _read(self, key: str, digest: str) -> Steps[Buffer | None]:
        """The object if it has this SHA-256."""
        if self._clock() - self._renewed_at > RENEW_S:
            yield from self._renew()
        body: Buffer | None = yield Get(key)
        return body if body is not None and sha256_of([body]) == digest else None


@dataclass
class Pending:
    """A record whose create may not have been answered. `move` makes its version the base."""

    record: VersionRecord
    body: bytes
    move: Callable[[], None]


class BaseOwner(Protocol):
    base: Any


def move_base(
    owner: BaseOwner, base: HostCopy, parts: Sequence[Buffer], removed: Sequence[str], state: str
) -> None:
    """Bring the base to this state, by decoding what was put: the caller's memory has moved on
    (rule 5).

    The owner has no base while it changes: after an exception, such as Ctrl-C, it may be half of
    each. Does nothing when it is called again, after that or when it is done.
    """
    if owner.base is not base or base.state == state:
        return
    owner.base = None
    base.apply(base.prepare(parts, removed))
    owner.base = base


@dataclass
class PublisherMachine:
    """Publishes versions as `who`, after `open`. `base` is the version `parent` as others have it;
    without it, the next version is full.

    `head`: the newest number of the log, as far as this publisher may go on from it.
    """

    who: str
    load: Callable[[Mapping[str, Buffer]], HostCopy]
    clock: Callable[[], float]
    full_every: int = 25
    keep: int = 8
    claim: int = 0
    head: int = 0
    parent: int = 0
    base: HostCopy | None = None
    pending: Pending | None = None
    attempt: int = 0
    since_full: int = 0  # versions since the newest full copy
    is_gc_due: bool = False
    successor: int = 0  # the number at which another publisher was found
    records: dict[int, Record] = field(default_factory=dict)

    # -- Open

    def open(self, *, reads_base: bool = True) -> Steps[None]:
        """Claim the channel and read the base: every publisher before is fenced from here on."""
        yield from self._claim()
        if reads_base:
            yield from self._read_base()
        self._check_newest((yield List("log/", log_key(self.head))))  # rule 2

    def _claim(self) -> Steps[None]:
        """Create a claim at the end of the log (rule 1)."""
        while True:
            numbers = numbers_in((yield List("log/")))
            self.claim = self.head = max(numbers, default=0) + 1
            body = seal(Claim(number=self.claim, publisher=self.who))
            if (yield from self._create(self.claim, body)) and not (yield from self._is_past()):
                return

    def _is_past(self) -> Steps[bool]:
        """Whether the claim took the number of a deleted version, so that it fences nobody.

        Raises Superseded if somebody claimed after it (rule 2).
        """
        later = numbers_in((yield List("log/", log_key(self.claim))))
        for number in later:
            if not isinstance((yield from read_log(number)), VersionRecord):
                self._supersede(number)
        return bool(later)

    def _read_base(self) -> Steps[None]:
        """Read the last version before the claim; else the first version is full (rule 9)."""
        reader = Reader(self.who, self.load, self.clock)
        yield from reader.advance(self.claim - 1)
        if reader.position == self.claim - 1:
            self.base, self.parent, self.since_full = reader.copy, reader.number, reader.deltas
        yield from reader.leave()

    def _check_newest(self, later: list[Row]) -> None:
        for number in numbers_in(later):
            self._supersede(number)

    def _supersede(self, number: int) -> None:
        self.successor = number
        raise Superseded(
            f"publisher {self.who}: another publisher has taken number {number} of this channel; "
            "open a new Publisher if this process is to publish again"
        )

    def _create(self, number: int, body: bytes) -> Steps[bool]:
        """Create a record. False: something else has the number (rule 4)."""
        while not (yield Create(log_key(number), body)):
            data = yield Get(log_key(number))
            if data is not None:
                return self._is_same(bytes(data), body)
        return True

    def _is_same(self, data: bytes, body: bytes) -> bool:
        return data == body

    # -- Publish

    def publish(self, source: Source, step: int | None = None) -> Steps[VersionRecord]:
        """Publish what `source` has; returns when the version is committed.

        After a StoreError it is unknown whether it is: the next call, or `settle`, finds out first.
        """
        yield from self.begin()
        pending = yield from (
            self._write_full(source, step) if self.base is None else self._write(source, step)
        )
        yield from self.commit(pending)
        yield from self.finish()
        return pending.record

    def begin(self) -> Steps[None]:
        """Learn what became of the publish before; from here on there is a new try."""
        if self.successor:
            self._supersede(self.successor)
        yield from self.settle()
        self.attempt += 1

    def _write(self, source: Source, step: int | None) -> Steps[Pending]:
        """Put the parts of a delta, each try under keys of its own (rule 7)."""
        base = self.base
        assert base is not None
        delta = source.delta(base)
        bodies, parts = [], list[Part]()
        for body in delta:
            part = self.part(len(parts), body)
            yield Put(part.key, body)
            bodies.append(body)
            parts.append(part)

        record = self.record(
            step, delta.state, parts=tuple(parts), removed=delta.removed, changed=delta.changed
        )
        move = partial(move_base, self, base, bodies, record.removed, record.state)
        return Pending(record, seal(record), move)

    def part(self, index: int, body: Buffer) -> Part:
        folder = self.folder("delta", self.head + 1)
        size = memoryview(body).nbytes
        return Part(key=f"{folder}/{index}", size=size, sha256=sha256_of([body]))

    def folder(self, kind: str, number: int) -> str:
        return try_folder(kind, number, self.who, self.attempt)

    def record(
        self,
        step: int | None,
        state: str,
        *,
        parts: tuple[Part, ...] = (),
        removed: Sequence[str] = (),
        changed: int = 0,
        is_full: bool = False,
        size: int = 0,
    ) -> VersionRecord:
        return VersionRecord(
            number=self.head + 1,
            publisher=self.who,
            step=step,
            state=state,
            parent=None if is_full else self.parent,
            parts=parts,
            removed=tuple(removed),
            changed=changed,
            bytes=size or sum(part.size for part in parts),
        )

    def _write_full(self, source: Source, step: int | None) -> Steps[Pending]:
        copy = source.copy()
        size = yield from self._put_full(copy, self.head + 1)
        record = self.record(step, copy.state, is_full=True, size=size)

        def move() -> None:
            self.base = copy

        return Pending(record, seal(record), move)

    def _put_full(self, copy: HostCopy, number: int) -> Steps[int]:
        """Put a full copy, its seal last (rule 8); returns its bytes."""
        folder, digests, size = self.folder("full", number), dict[str, str](), 0
        for name, pieces in copy.files():
            digests[name] = sha256_of(pieces)
            size += sum(memoryview(piece).nbytes for piece in pieces)
            yield Put(f"{folder}/{name}", pieces)
        yield Put(f"{folder}/{SEAL}", seal(FullCopy(state=copy.state, files=digests)))
        return size

    def commit(self, pending: Pending) -> Steps[None]:
        self.pending = pending
        yield from self.settle()

    def settle(self) -> Steps[None]:
        """Create the record that waits for its answer; only then the base moves (rules 4, 5)."""
        pending = self.pending
        if pending is None:
            return
        if not (yield from self._create(pending.record.number, pending.body)):
            self.pending = None
            self._lose(pending.record.number)
            return
        pending.move()
        self.head = self.parent = pending.record.number
        self.records[self.head] = pending.record
        is_full = pending.record.parent is None
        self.since_full = 0 if is_full else self.since_full + 1
        self.is_gc_due = self.is_gc_due or is_full
        self.pending = None  # last: after a Ctrl-C on the way all of this is done again

    def _lose(self, number: int) -> None:
        """The number that was to be a version is somebody else's."""
        self._supersede(number)

    def finish(self) -> Steps[None]:
        """Now and then a full copy, then gc. If that fails, the next publish does it (rule 10)."""
        try:
            if self.since_full >= self.full_every:
                yield from self._renew_full()
        except StoreError:
            return
        yield from self.gc_if_due()

    def gc_if_due(self) -> Steps[None]:
        """gc if it is due; one that fails stays due."""
        try:
            if self.is_gc_due:
                yield from self.gc()
                self.is_gc_due = False
        except StoreError:
            pass

    def _renew_full(self) -> Steps[None]:
        assert self.base is not None
        self.attempt += 1
        yield from self._put_full(self.base, self.head)
        self.since_full, self.is_gc_due = 0, True

    # -- gc

    def gc(self) -> Steps[None]:
        """Delete what no version and no follower needs."""
        log = yield List("log/")
        copies = yield List("full/")
        parts = yield List("delta/")
        leases = yield List("lease/")  # last: who comes later finds the newest full copy (rule 14)
        numbers = numbers_in(log)
        if max(numbers, default=0) > self.head:
            return  # superseded, as the next create will say
        uncertain = self._find_uncertain(log, copies) | self._find_uncertain(log, parts)
        yield from self._read_records(sorted(uncertain))
        sealed = yield from self._find_sealed(copies, uncertain)
        newest = max((copy.number for copy in sealed), default=0)
        ages = self._ages(log, leases)
        floor = min(newest, self.head - self.keep, *self._fresh(ages))
        edge = min(newest, floor + 1)
        seals, objects = list[str](), list[str]()
        for key, *_ in copies:
            copy = read_try(key)
            if copy and (copy.number < edge or self._is_leftover(copy, copy in sealed, numbers)):
                (seals if key.endswith(f"/{SEAL}") else objects).append(key)
        for key, *_ in parts:
            part = read_try(key)
            if part is None:
                continue
            is_certain = part.number in numbers and part.number not in uncertain
            is_used = is_certain or self._has_part(part, key)
            if part.number <= floor or self._is_leftover(part, is_used, numbers):
                objects.append(key)
        objects += (log_key(number) for number in self._doomed_records(log, edge))
        objects += (key for key, age_s in ages.items() if age_s > DEAD_LEASE_S)
        for keys in (seals, objects):  # a copy without files has no seal
            if keys:
                yield Delete(tuple(keys))
        for number in [number for number in self.records if number < edge]:
            if not isinstance(self.records[number], Claim):
                del self.records[number]

    def _find_uncertain(self, log: Iterable[Row], objects: Iterable[Row]) -> set[int]:
        """Numbers in the log of which it takes the record to know what a try is.

        Those are few: one try beside a version is that version's, or stays until it goes with it.
        Other records are not read, as there are many while a lease holds them.
        """
        sizes = {number: row.size for row in log if (number := log_number(row.key)) is not None}
        tries = Counter(each.number for each in {read_try(row.key) for row in objects} if each)
        return {
            number
            for number, count in tries.items()
            if number in sizes and (count > 1 or looks_like_claim(sizes[number]))
        }

    def _read_records(self, numbers: Iterable[int]) -> Steps[None]:
        for number in numbers:
            if number not in self.records and (record := (yield from read_log(number))):
                self.records[number] = record

    def _find_sealed(self, copies: Iterable[Row], uncertain: set[int]) -> Steps[set[Try]]:
        """The full copies that count. Those before the newest do if they are alone."""
        sealed, newest = set[Try](), 0
        tries = {copy for key, *_ in copies if key.endswith(f"/{SEAL}") and (copy := read_try(key))}
        for copy in sorted(tries, key=lambda copy: -copy.number):
            if copy.number < newest and copy.number not in uncertain:
                sealed.add(copy)
                continue
            yield from self._read_records([copy.number])
            content = yield from read_full_copy(copy.folder)
            if counts(copy, content, self.records.get(copy.number)):
                sealed.add(copy)
                newest = max(newest, copy.number)
        return sealed

    def _ages(self, log: Sequence[Row], leases: Sequence[Row]) -> dict[str, float]:
        """How old each lease is by the store's clock, which is at its newest object (rule 16)."""
        now = max(row.time for row in (*log, *leases))
        return {row.key: now - row.time for row in leases}

    def _fresh(self, ages: Mapping[str, float]) -> list[int]:
        return [
            lease.number
            for key, age_s in ages.items()
            if age_s <= LEASE_LIFE_S and (lease := read_lease(key))
        ]

    def _doomed_records(self, log: Iterable[Row], edge: int) -> list[int]:
        """Versions alone: a claim is the fence of the publisher before it (rule 3)."""
        return [
            number
            for row in log
            if (number := log_number(row.key)) is not None
            and number < edge
            and not looks_like_claim(row.size)
        ]

    def _has_part(self, part: Try, key: str) -> bool:
        record = self.records.get(part.number)
        return isinstance(record, VersionRecord) and any(key == each.key for each in record.parts)

    def _is_leftover(self, attempt: Try, is_used: bool, numbers: Sequence[int]) -> bool:
        """Whether a try is not what its version is made of, and nobody is at it (rule 17)."""
        if is_used or (attempt.number in numbers and attempt.number not in self.records):
            return False  # a record that cannot be read may name it
        # Who claimed earlier tries numbers up to this claim, who claims later only those after it.
        return attempt.number <= (self.head if attempt.who == self.who else self.claim)
