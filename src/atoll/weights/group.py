"""Several trainer processes publish together: each encodes and uploads its share of the tensors.

Every process takes part in each step of the iterator (`full_tensor()` is a collective) and keeps
the base of its own tensors. The leader, process 0, owns the channel; what came of its create is
broadcast, so all bases move or none. Collectives run on the caller's thread. The first version of
a group is full: what share a process had before is not known.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from atoll.core.errors import AtollError
from atoll.objectstore.effects import StoreError
from atoll.weights.machine import Pending, PublisherMachine, Source, Superseded, move_base
from atoll.weights.records import Share, VersionRecord, seal, share_key, try_folder
from atoll.weights.shares import put_delta, put_files, put_index

R = TypeVar("R")
Steps = Generator[Any, Any, R]


@dataclass(frozen=True, slots=True)
class Gather:
    """Bring a value to all processes of the group. Answer: what each brought, by rank."""

    value: Any


class TorchProcesses:
    """A process group of torch."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def gather(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values


class Owners:
    """Which process has which tensor: each new one goes to whoever has the fewest bytes so far."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._loads, self._owners = rank, [0] * size, dict[str, int]()

    def select(self, tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """The tensors of this process."""
        for name, tensor in tensors:
            if name not in self._owners:
                owner = self._loads.index(min(self._loads))
                self._owners[name] = owner
                self._loads[owner] += getattr(tensor, "nbytes", 0)  # what is none is refused later
            if self._owners[name] == self._rank:
                yield name, tensor


@dataclass
class Contribution:
    """What one process brings to a version, or the error that it ended with."""

    share: Share | None = None
    rows: list[list[Any]] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    error: Exception | None = None


@dataclass
class Turn:
    """What the leader tells the others at the start of a publish, and after its create."""

    number: int = 0
    attempt: int = 0
    who: str = ""
    is_full: bool = False
    record: VersionRecord | None = None
    has_moved: bool | None = None  # None: nothing was pending, or it is still unknown
    error: Exception | None = None

    def folder(self, *, is_full: bool) -> str:
        return try_folder("full" if is_full else "delta", self.number, self.who, self.attempt)


class GroupMachine:
    """One process of a group that publishes. `machine` is the leader's.

    `state_of`: the state of a version with these rows, which are those of all processes.
    """

    def __init__(
        self,
        rank: int,
        machine: PublisherMachine | None,
        state_of: Callable[[Iterable[list[Any]]], str],
    ) -> None:
        self._rank, self._machine, self._state_of = rank, machine, state_of
        self.base: Any = None
        self._draft: Any = None  # the own values of a full copy that is not committed yet
        self._move: Callable[[], None] | None = None

    def open(self, check: Callable[[], None]) -> Steps[None]:
        """Check the store and claim the channel, in the leader; all raise if it fails."""
        yield from self._broadcast(self._claim(check))

    def publish(
        self, source: Source, step: int | None, drain: Callable[[], None]
    ) -> Steps[VersionRecord]:
        """Publish what the sources of all processes have; each of them calls it.

        `drain` reads to the end what the source has not: the others wait in each step of it.
        """
        turn = yield from self._broadcast(self._begin())
        own, move = Contribution(), None
        try:
            move = yield from self._write(turn, source, own)
        except Exception as error:
            own.error = _portable(error)
        drain()
        brought: list[Contribution] = yield Gather(own)
        _raise_first(brought)
        self._move = move
        record = (yield from self._broadcast(self._commit(turn, brought, step))).record
        assert record is not None
        yield from self._finish(record)
        return record

    def settle(self) -> Steps[None]:
        """Learn what became of a publish that was not answered."""
        yield from self._broadcast(self._settle())

    # -- The leader's steps, and what they say to the others

    def _broadcast(self, work: Steps[Turn]) -> Steps[Turn]:
        """Do it in the leader; all move their base, or raise, as it came out."""
        turn = Turn()
        if self._machine is not None:
            try:
                turn = yield from work
            except Exception as error:
                has_moved = False if isinstance(error, Superseded) else None
                turn = Turn(has_moved=has_moved, error=_portable(error))
        turns: list[Turn] = yield Gather(turn)
        turn = turns[0]
        if turn.has_moved is not None:
            if turn.has_moved and self._move is not None:
                self._move()
            self._move = None
        if turn.error is not None:
            raise turn.error
        return turn

    @property
    def _leader(self) -> PublisherMachine:
        assert self._machine is not None
        return self._machine

    def _claim(self, check: Callable[[], None]) -> Steps[Turn]:
        check()
        yield from self._leader.open(reads_base=False)
        return Turn()

    def _settle(self) -> Steps[Turn]:
        has_pending = self._leader.pending is not None
        if not self._leader.successor:
            yield from self._leader.settle()
        return Turn(has_moved=True if has_pending else None)

    def _begin(self) -> Steps[Turn]:
        machine = self._leader
        has_pending = machine.pending is not None
        yield from machine.begin()
        return Turn(
            machine.head + 1,
            machine.attempt,
            machine.who,
            is_full=machine.parent == 0,
            has_moved=True if has_pending else None,
        )

    def _commit(self, turn: Turn, brought: list[Contribution], step: int | None) -> Steps[Turn]:
        machine, shares = self._leader, [each.share for each in brought if each.share]
        state = self._state_of(row for each in brought for row in each.rows)
        size = sum(share.size for share in shares)
        if turn.is_full:
            folder = turn.folder(is_full=True)
            size += yield from put_index(folder, self._draft, state, shares)
        record = machine.record(
            step,
            state,
            parts=tuple(part for share in shares for part in share.parts),
            removed=sorted(name for each in brought for name in each.removed),
            changed=sum(share.changed for share in shares),
            is_full=turn.is_full,
            size=size,
        )
        yield from machine.commit(Pending(record, seal(record), lambda: None))
        return Turn(record=record, has_moved=True)

    # -- What every process does

    def _write(self, turn: Turn, source: Source, own: Contribution) -> Steps[Callable[[], None]]:
        """Put the own share; what is returned moves the own base to it."""
        key = share_key(turn.folder(is_full=turn.is_full), self._rank, turn.who, turn.attempt)
        if turn.is_full:
            copy: Any = source.copy()
            self._draft = copy
            own.share = yield from put_files(key, copy)
            own.rows = copy.rows()

            def take() -> None:
                self.base = copy

            return take
        base = self.base
        if base is None:
            raise AtollError(
                f"process {self._rank} was interrupted as its base changed: make a new Publisher"
            )
        delta: Any = source.delta(base)
        bodies, own.share = yield from put_delta(key, delta)
        own.rows, own.removed = delta.rows(), list(delta.removed)
        return partial(move_base, self, base, bodies, own.removed, own.share.state)

    def _finish(self, record: VersionRecord) -> Steps[None]:
        """A full copy when it is due, then gc; if that fails, the next publish does it."""
        machine = self._machine
        turn = Turn(record.number, who=record.publisher)
        if machine is not None and machine.since_full >= machine.full_every:
            machine.attempt += 1
            turn.attempt, turn.is_full = machine.attempt, True
        turn = (yield Gather(turn))[0]
        if turn.is_full:
            own = Contribution()
            try:
                key = share_key(turn.folder(is_full=True), self._rank, turn.who, turn.attempt)
                own.share = yield from put_files(key, self.base)
            except Exception as error:
                own.error = _portable(error)
            brought: list[Contribution] = yield Gather(own)
            if machine is None or any(each.error for each in brought):
                return
            shares = [each.share for each in brought if each.share]
            try:
                yield from put_index(turn.folder(is_full=True), self.base, record.state, shares)
            except StoreError:
                return  # the seal may still come: what it seals is not for gc yet
            machine.since_full, machine.is_gc_due = 0, True
        if machine is not None:
            yield from machine.gc_if_due()


def _raise_first(brought: Iterable[Contribution]) -> None:
    for each in brought:
        if each.error is not None:
            raise each.error


def _portable(error: Exception) -> Exception:
    """The error as other processes can read it."""
    if isinstance(error, StoreError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
