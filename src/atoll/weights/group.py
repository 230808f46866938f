"""Several trainer processes publish together: each encodes and uploads its share of the tensors.

Every process takes part in each step of the iterator (`full_tensor()` is a collective) and keeps
the base of its own tensors. The leader, process 0, owns the channel; what came of its create is
broadcast, so all bases move or none. Collectives run on the caller's thread. The first version of
a group is full: what share a process had before is not known.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from atoll.files.writing import Buffer
from atoll.objectstore.effects import Put, StoreError
from atoll.weights.machine import Pending, PublisherMachine, Superseded, sha256_of
from atoll.weights.records import SEAL, FullCopy, Part, VersionRecord, seal, try_folder
from atoll.weights.state import (
    INDEX,
    Run,
    Tensors,
    TensorsDelta,
    TensorValue,
    state_of,
    tensor_files,
)

Drive = Callable[[Generator[Any, Any, Any]], Any]


class Processes(Protocol):
    """The processes of a trainer, as `torch.distributed` has them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, value: Any) -> list[Any]: ...


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


@dataclass
class Share:
    """What one process brings to a version, or the error that it ended with."""

    parts: list[Part] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    weight_map: dict[str, str] = field(default_factory=dict)
    rows: list[list[Any]] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    changed: int = 0
    size: int = 0
    error: Exception | None = None


@dataclass
class Turn:
    """What the leader tells the others at the start of a publish, and after its create."""

    number: int = 0
    attempt: int = 0
    who: str = ""
    is_full: bool = False
    has_moved: bool | None = None  # None: nothing was pending, or it is still unknown
    error: Exception | None = None


class GroupPublisher:
    """One process of a group that publishes. `machine` is the leader's."""

    def __init__(
        self,
        processes: Processes,
        machine: PublisherMachine | None,
        drive: Drive,
        extra: Mapping[str, bytes],
        run: Run,
    ) -> None:
        self._processes, self._machine, self._drive = processes, machine, drive
        self._extra, self._run = extra, run
        self.base: Tensors | None = None
        self._move: Callable[[], None] | None = None
        self._owners: dict[str, int] = {}
        self._loads = [0] * processes.size

    def publish(
        self,
        gathered: Iterator[tuple[str, Any]],
        convert: Callable[[str, Any], TensorValue],
        step: int | None,
    ) -> VersionRecord:
        turn = self._broadcast(self._begin)
        share = Share()
        try:
            values = ((name, convert(name, each)) for name, each in self._own(gathered))
            self._write(turn, values, share)
        except Exception as error:
            share.error = _portable(error)
        for _ in gathered:  # the others wait in each step of it
            pass
        shares: list[Share] = self._processes.gather(share)
        for each in shares:
            if each.error is not None:
                self._move = None
                raise each.error
        record: VersionRecord | None = None

        def commit() -> Turn:
            nonlocal record
            record = self._commit(turn, shares, step)
            return Turn(has_moved=True)

        self._broadcast(commit)
        record = self._processes.gather(record)[0]
        assert record is not None
        self._finish(record)
        return record

    def open(self, check: Callable[[], None]) -> None:
        """Check the store and claim the channel, in the leader; all raise if it fails."""

        def claim() -> Turn:
            check()
            self._drive(self._leader().open(reads_base=False))
            return Turn()

        self._broadcast(claim)

    def settle(self) -> None:
        """Learn what became of a publish that was not answered."""
        self._broadcast(self._settle)

    # -- The leader's steps, and what they say to the others

    def _broadcast(self, work: Callable[[], Turn]) -> Turn:
        """Do it in the leader; all move their base, or raise, as it came out."""
        turn = Turn()
        if self._machine is not None:
            try:
                turn = work()
            except Exception as error:
                has_moved = False if isinstance(error, Superseded) else None
                turn = Turn(has_moved=has_moved, error=_portable(error))
        turns: list[Turn] = self._processes.gather(turn)
        turn = turns[0]
        if turn.has_moved is not None:
            if turn.has_moved and self._move is not None:
                self._move()
            self._move = None
        if turn.error is not None:
            raise turn.error
        return turn

    def _settle(self) -> Turn:
        machine = self._leader()
        has_pending = machine.pending is not None
        if not machine.successor:
            self._drive(machine.settle())
        return Turn(has_moved=True if has_pending else None)

    def _begin(self) -> Turn:
        machine = self._leader()
        has_pending = machine.pending is not None
        self._drive(machine.begin())
        return Turn(
            machine.head + 1,
            machine.attempt,
            machine.who,
            machine.parent == 0,
            True if has_pending else None,
        )

    def _commit(self, turn: Turn, shares: list[Share], step: int | None) -> VersionRecord:
        machine = self._leader()
        rows = [row for share in shares for row in share.rows]
        state = state_of(rows)
        size = sum(share.size for share in shares)
        if turn.is_full:
            folder = try_folder("full", turn.number, turn.who, turn.attempt)
            self._drive(self._seal(folder, state, shares))
            record = machine.record(step, state, is_full=True, size=size)
        else:
            record = machine.record(
                step,
                state,
                parts=tuple(part for share in shares for part in share.parts),
                removed=sorted(name for share in shares for name in share.removed),
                changed=sum(share.changed for share in shares),
            )
        self._drive(machine.commit(Pending(record, seal(record), lambda: None)))
        return record

    def _finish(self, record: VersionRecord) -> None:
        """A full copy when it is due, then gc; if that fails, the next publish does it."""
        machine = self._machine
        is_due = machine is not None and machine.since_full >= machine.full_every
        attempt = 0
        if machine is not None and is_due:
            machine.attempt += 1
            attempt = machine.attempt
        is_due, attempt, who = self._processes.gather((is_due, attempt, record.publisher))[0]
        if is_due:
            share, base = Share(), self.base
            assert base is not None
            folder = try_folder("full", record.number, who, attempt)
            try:
                self._put_files(folder, base, share)
            except Exception as error:
                share.error = error
            shares: list[Share] = self._processes.gather(share)
            if machine is not None and not any(each.error for each in shares):
                try:
                    self._drive(self._seal(folder, record.state, shares))
                    machine.since_full, machine.is_gc_due = 0, True
                except Exception:
                    pass
        if machine is not None:
            self._drive(_gc_only(machine))

    def _leader(self) -> PublisherMachine:
        assert self._machine is not None
        return self._machine

    # -- What every process does

    def _own(self, gathered: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """The tensors of this process: each goes to whoever has the fewest bytes so far."""
        for name, tensor in gathered:
            if name not in self._owners:
                owner = min(range(self._processes.size), key=lambda rank: (self._loads[rank], rank))
                self._owners[name] = owner
                self._loads[owner] += tensor.nbytes
            if self._owners[name] == self._processes.rank:
                yield name, tensor

    def _write(self, turn: Turn, tensors: Iterator[tuple[str, TensorValue]], share: Share) -> None:
        if turn.is_full or self.base is None:
            values = {name: each._replace(data=each.data.copy()) for name, each in tensors}
            copy = Tensors(values, {}, self._run)
            self._put_files(try_folder("full", turn.number, turn.who, turn.attempt), copy, share)
            share.rows = copy.rows()

            def take() -> None:
                self.base = copy

            self._move = take
            return
        base = self.base
        delta = TensorsDelta(base, tensors, self._run)
        folder = try_folder("delta", turn.number, turn.who, turn.attempt)
        bodies = list[Buffer]()
        for body in delta:
            key = f"{folder}/{self._processes.rank}.{len(bodies)}"
            size = memoryview(body).nbytes
            self._drive(_put(key, body))
            bodies.append(body)
            share.parts.append(Part(key=key, size=size, sha256=sha256_of([body])))
        share.rows, share.removed, share.changed = delta.rows(), delta.removed, delta.changed

        def move() -> None:
            base.apply(base.prepare(bodies, delta.removed))

        self._move = move

    def _put_files(self, folder: str, copy: Tensors, share: Share) -> None:
        rank = self._processes.rank
        for name, pieces in tensor_files(copy.tensors, is_adapter=False):
            if not name.endswith(".safetensors"):
                continue  # the leader makes one index of all
            file = name.replace("model", f"model-p{rank:05d}", 1)
            share.files[file] = sha256_of(pieces)
            share.size += sum(memoryview(piece).nbytes for piece in pieces)
            self._drive(_put(f"{folder}/{file}", pieces))
            header = json.loads(bytes(pieces[0])[8:])
            share.weight_map |= dict.fromkeys(header.keys() - {"__metadata__"}, file)

    def _seal(self, folder: str, state: str, shares: list[Share]) -> Generator[Any, Any, None]:
        digests = {name: digest for share in shares for name, digest in share.files.items()}
        weight_map = {name: file for share in shares for name, file in share.weight_map.items()}
        total = sum(share.size for share in shares)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        for name, body in {INDEX: json.dumps(index).encode(), **self._extra}.items():
            digests[name] = sha256_of([body])
            yield Put(f"{folder}/{name}", body)
        yield Put(f"{folder}/{SEAL}", seal(FullCopy(state=state, files=digests)))


def _portable(error: Exception) -> Exception:
    """The error as other processes can read it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _put(key: str, body: Any) -> Generator[Any, Any, None]:
    yield Put(key, body)


def _gc_only(machine: PublisherMachine) -> Generator[Any, Any, None]:
    try:
        if machine.is_gc_due:
            yield from machine.gc()
            machine.is_gc_due = False
    except StoreError:
        pass
