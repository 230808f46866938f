"""The data of a replica: batches of what it holds, and what of them was trained on.

A position is trained on when an optimiser step came after its batch was handed to the loop. What a
loader has fetched ahead is not, and neither is the rest of an unfinished accumulation.
"""

from __future__ import annotations

import logging
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from atoll.core.checks import check_int
from atoll.core.errors import ValidationError
from atoll.diloco.data import permutation, ranges
from atoll.diloco.data.lease import DataLease
from atoll.diloco.data.ledger import Terms, make_terms
from atoll.diloco.data.ranges import Ranges
from atoll.diloco.group import Processes, gather

log = logging.getLogger("atoll.diloco")

OpenAt = Callable[[int], Iterator[Any]]

_MAX_VALUE = 2**62


class DataHost(Protocol):
    """The outer loop that the data belongs to."""

    @property
    def steps(self) -> int:
        """Optimiser steps of this process."""

    def end_period(self) -> None:
        """A round at once, with what was trained so far."""

    def receive(self) -> None:
        """Wait for the round that is on its way, if there is one."""

    def step_tail(self) -> None:
        """A step of the optimisers with the gradients of batches that no step came after."""


class IndexBatch(list[int]):
    """Indexes into the data, and the `positions` of the run's line that they stand for."""

    def __init__(self, indexes: Iterable[int], positions: Iterable[int]) -> None:
        super().__init__(indexes)
        self.positions = list(positions)

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexBatch, (list(self), self.positions)


class DataSampler:
    """What `diloco.data()` returns.

        data = diloco.data(dataset, seed=0, batch=32)
        loader = data.loader(DataLoader(dataset, batch_sampler=data.sampler, num_workers=4))
        for batch in loader: ...

    Iterating over it gives batches of indexes, or of what a stream holds.
    """

    def __init__(
        self,
        host: DataHost,
        lease: DataLease,
        group: Processes,
        *,
        batch: int,
        stream: OpenAt | None = None,
        part: tuple[int, int] | None = None,
        read: Callable[[Iterable[Any]], Iterator[Any]] = iter,
    ) -> None:
        """`read` iterates over the batches on their way to the loop."""
        self._host, self._lease, self._group = host, lease, group
        self.read = read
        self._batch = batch
        self._part, self._parts = part or (group.process, group.processes)
        self._stream = None if stream is None else _StreamReader(stream)
        self.sampler = LeasedBatches(self)
        self._pool: Ranges = ()
        # Handed to a loader: what of it is this process's, and what all of the replica have of it.
        self._ahead: deque[tuple[Ranges, Ranges]] = deque()
        self._in_loop: list[Ranges] = []  # handed to the loop, and no step since
        self._new: list[tuple[int, Ranges]] = []  # trained since the other processes were told
        self._others_ahead: Ranges = ()
        self._dealt: Ranges = ()  # to all processes of the replica, since they told each other
        self._per_step = 1  # batches, as in the largest accumulation so far
        self._prefetch = 0
        self._periods = 1  # that are held at once
        self.end: int | None = None  # where this replica met the end of the stream
        self.skipped = 0
        self.plan()

    @property
    def epoch(self) -> int:
        """The run's: everything before it is used."""
        return self._lease.ledger.epoch

    @property
    def left(self) -> int | None:
        """How many positions of the run are not used yet; None: nobody knows."""
        total = self._lease.ledger.total
        return None if total is None else total - self._lease.ledger.used

    def trained(self, positions: Iterable[int]) -> None:
        """The next optimiser step trains on these positions of the run.

        For loops that take their batches from `sampler` themselves, which hands out lists with
        `positions`.
        """
        self._in_loop.append(self._read_positions(positions))

    def skip(self, positions: Iterable[int]) -> None:
        """These cannot be read: they count as trained on, and are told of in the report."""
        part = self._read_positions(positions)
        self.skipped += ranges.size(part)
        self._in_loop.append(part)

    def _read_positions(self, positions: Iterable[int]) -> Ranges:
        try:
            part = ranges.of(map(operator.index, positions))
        except TypeError as error:
            raise ValidationError("positions", positions, "expected whole numbers") from error
        if not ranges.is_inside(part, self._lease.hold):
            raise ValidationError("positions", list(part)[:3], "expected some that are held")
        return part

    def loader(self, loader: Any) -> LeasedLoader:
        """`loader`, a DataLoader over `sampler`, with its batches counted as they come."""
        if getattr(loader, "batch_sampler", None) is not self.sampler:
            raise ValidationError(
                "loader",
                type(getattr(loader, "batch_sampler", loader)).__name__,
                "expected DataLoader(dataset, batch_sampler=data.sampler, …)",
            )
        if not getattr(loader, "in_order", True):
            expected = "expected True: batches are counted in the order in which they are asked for"
            raise ValidationError("loader.in_order", False, expected)
        workers = int(getattr(loader, "num_workers", 0) or 0)
        self._prefetch = workers * int(getattr(loader, "prefetch_factor", None) or 0)
        return LeasedLoader(self, loader)

    def check_batches(self, batches: Any) -> None:
        """Raises ValidationError for a DataLoader that was not given to `loader()`: no batch of it
        counts as used. One with `sampler=` and a batch size makes batches of batches."""
        if hasattr(batches, "batch_sampler"):
            raise ValidationError(
                "batches",
                type(batches).__name__,
                "expected data.loader(DataLoader(dataset, batch_sampler=data.sampler)), with the "
                "data that diloco.data() returned: else no batch counts as used",
            )

    def fetch_ahead(self, batches: int) -> None:
        """A loader of the caller's own has up to so many batches that the loop has not seen.

        Such a loader ends where nothing is free, and its trainer may end with it. A replica that
        comes late for a round gets nothing in it, so it holds a second period.
        """
        self._prefetch, self._periods = batches, 2

    @property
    def is_ahead(self) -> bool:
        """Whether a loader has batches that the loop has not seen."""
        return bool(self._ahead)

    def __iter__(self) -> Iterator[Any]:
        if self._stream is not None:
            return self.read(self._read_stream(self._stream))
        return self.read(self._read_indexes())

    # What the outer loop asks.

    def after_step(self, step: int) -> None:
        """An optimiser step came: what was handed to the loop before it is trained on."""
        if not self._in_loop:
            return
        part = ranges.union(*self._in_loop)
        self._per_step = max(self._per_step, len(self._in_loop))
        self._in_loop = []
        self._lease.train(ranges.minus(part, self._lease.fresh), step)
        self._new.append((step, part))

    def gather(self) -> None:
        """All processes of the replica know what each trained on, and has fetched ahead."""
        if self._group.processes == 1:
            self._new = []
            return
        messages = gather(self._group, lambda: (self._new, self._waiting(), self.end))
        self._new = []
        for process, (trained, _, end) in enumerate(messages):
            if end is not None:
                self.end = end if self.end is None else min(end, self.end)
            if process != self._group.process:
                for step, part in trained:
                    self._lease.train(ranges.minus(part, self._lease.fresh), step)
        others = [
            message
            for process, (_, message, _) in enumerate(messages)
            if process != self._group.process
        ]
        self._others_ahead = ranges.union(*others)
        self._dealt = ()

    def want(self, period: int) -> int:
        """How many positions the replica wants to hold for a period of so many steps."""
        batches = period * self._per_step * self._periods + self._prefetch
        return batches * self._batch * self._parts

    def plan(self) -> None:
        """The ledger has changed: these positions may be handed out."""
        free = self._lease.free
        if self.end is not None:
            free = ranges.below(free, self.end)
        # What others trained on since then looks free here, and all must see the same pool.
        taken = ranges.union(self._waiting(), self._others_ahead, self._dealt)
        self._pool = ranges.minus(free, taken)

    # Handing out.

    def _next_chunk(self) -> Ranges:
        """What all processes of the replica train on next; the same in each of them."""
        chunk, self._pool = ranges.take(self._pool, self._batch * self._parts)
        if self._group.processes > 1:
            self._dealt = ranges.union(self._dealt, chunk)
        return chunk

    def _part_of(self, chunk: Ranges) -> Ranges:
        count, size = self._parts, ranges.size(chunk)
        if count == 1:
            return chunk
        if size < count:  # every process needs something to do in the last step
            return ranges.of([ranges.positions(chunk)[self._part % size]])
        first, last = size * self._part // count, size * (self._part + 1) // count
        return ranges.take(ranges.take(chunk, last)[0], first)[1]

    def _make_batch(self, part: Ranges) -> IndexBatch:
        terms, positions = self._lease.ledger.terms, ranges.positions(part)
        if terms.length is None:
            return IndexBatch(positions, positions)
        indexes = permutation.indexes(
            positions, terms.length, terms.seed, is_shuffled=terms.shuffle
        )
        return IndexBatch(indexes.tolist(), positions)

    def begin_loader(self) -> None:
        """A loader starts: what an earlier one had fetched ahead is handed out again."""
        self._ahead.clear()
        self.plan()

    def hand_to_loader(self) -> IndexBatch | None:
        chunk = self._next_chunk()
        if not chunk:
            return None
        part = self._part_of(chunk)
        self._ahead.append((part, chunk))
        return self._make_batch(part)

    def hand_to_loop(self) -> bool:
        """Whether the batch that the loader gives may be trained on."""
        part, chunk = self._ahead.popleft()
        # If others have a part of it now: all processes of the replica go past it, or none.
        is_good = ranges.is_inside(chunk, self._lease.free)
        if is_good:
            self._in_loop.append(part)
        return is_good

    def has_more(self, *, steps_tail: bool = True) -> bool:
        """Whether there is something to train on; goes through rounds until there is, or never.

        `steps_tail`: the batches of an accumulation that no step came after get one, when nothing
        else is left to train on.
        """
        idle = 0
        while not self._lease.ledger.is_used_up:
            self.plan()
            if self._pool:
                return True
            if idle > 2 and self._lease.ledger.idle > 2:
                # Nobody took anything, twice, with all that the absent held given back.
                log.warning(
                    "%s positions of the data stay unused: they were handed out, and no step of an "
                    "optimiser came after them",
                    self.left,
                )
                return False
            seq = self._lease.ledger.seq
            if idle and steps_tail and self._in_loop:
                self._host.step_tail()
            # Others end with the round that uses up the data: one more would be without them.
            self._host.receive()
            if self._lease.ledger.seq == seq:
                idle += 1
                self._host.end_period()
        return False

    def _waiting(self) -> Ranges:
        """Handed out and not trained on."""
        return ranges.union(*self._in_loop, *(part for part, _ in self._ahead))

    def _read_indexes(self) -> Iterator[IndexBatch]:
        while self.has_more():
            while chunk := self._next_chunk():
                part = self._part_of(chunk)
                self._in_loop.append(part)
                yield self._make_batch(part)

    def _read_stream(self, stream: _StreamReader) -> Iterator[list[Any]]:
        while self.has_more():
            while chunk := self._next_chunk():
                part = self._part_of(chunk)
                items, read = stream.read(part)
                is_short = read != part
                if not items and self._parts > 1:
                    # The stream may end in the part of another process, which has a step to make.
                    items, read = stream.read(ranges.take(chunk, 1)[0])
                if items:
                    self._in_loop.append(read)
                if is_short:
                    self.end = stream.end
                    self.plan()
                if items:
                    yield items


class LeasedBatches:
    """The `batch_sampler` of a DataLoader: lists of indexes that this replica holds."""

    def __init__(self, data: DataSampler) -> None:
        self._data = data

    def __iter__(self) -> LeasedBatches:
        self._data.begin_loader()
        return self

    def __next__(self) -> IndexBatch:
        """Stops when nothing is free. It goes on after the next round, if it is asked again."""
        batch = self._data.hand_to_loader()
        if batch is None:
            raise StopIteration
        return batch


class LeasedLoader:
    """The batches of a loader, each counted when an optimiser step came after it.

    It ends when all data of the run is used.
    """

    def __init__(self, data: DataSampler, loader: Any) -> None:
        self._data, self._loader = data, loader

    def __iter__(self) -> Iterator[Any]:
        return self._data.read(self._batches())

    def _batches(self) -> Iterator[Any]:
        try:
            while self._data.has_more():
                for batch in self._loader:
                    if self._data.hand_to_loop():
                        yield batch
        finally:
            self._data.begin_loader()


class _StreamReader:
    """Reads a stream position by position, and opens it again where it has to jump."""

    def __init__(self, open_at: OpenAt) -> None:
        self._open_at = open_at
        self._items: Iterator[Any] | None = None
        self._next = -1
        self.end: int | None = None

    def read(self, part: Ranges) -> tuple[list[Any], Ranges]:
        """What the stream holds there, and which of the positions there are."""
        items: list[Any] = []
        done: list[tuple[int, int]] = []
        for start, stop in part:
            if self._items is None or self._next != start:
                self._items, self._next = iter(self._open_at(start)), start
            for at in range(start, stop):
                try:
                    items.append(next(self._items))
                except StopIteration:
                    self.end = at if self.end is None else min(at, self.end)
                    self._items = None
                    return items, ranges.join([*done, (start, at)])
                self._next = at + 1
            done.append((start, stop))
        return items, ranges.join(done)


def read_terms(
    dataset: Any,
    stream: OpenAt | None,
    sizes: tuple[int, int, int, int],
    *,
    seed: int,
    shuffle: bool,
    epochs: int,
    batch: int,
    fingerprint: str,
    part: tuple[int, int] | None,
) -> Terms:
    """The terms of the data that a script shares. Raises ValidationError for what does not fit.

    `sizes`: of the world, the replica in processes, the model in fragments, and steps of a period.
    """
    world, processes, fragments, period = sizes
    if (dataset is None) == (stream is None):
        raise ValidationError("dataset", dataset, "expected a dataset, a length or stream=")
    check_int("seed", seed, 0, _MAX_VALUE)
    check_int("epochs", epochs, 1, 10**9)
    check_int("batch", batch, 1, 10**9)
    if stream is not None and epochs != 1:
        raise ValidationError("epochs", epochs, "a stream is read once: expected 1")
    if stream is not None and not callable(stream):
        raise ValidationError("stream", stream, "expected a function of a position")
    if part is not None:
        if not isinstance(part, list | tuple) or len(part) != 2:
            raise ValidationError("part", part, "expected (number, count), as (0, 1) for all of it")
        check_int("part[1]", part[1], 1, processes)
        check_int("part[0]", part[0], 0, part[1] - 1)
    return make_terms(
        None if stream is not None else read_length(dataset),
        period=period,
        world=world,
        fragments=fragments,
        epochs=epochs,
        seed=seed,
        shuffle=shuffle,
        fingerprint=fingerprint,
    )


def refuse_other_data(ours: Terms, theirs: Terms) -> None:
    """Raises ValidationError naming what is not that of the run."""
    for name in ("length", "seed", "shuffle", "epochs", "fingerprint"):
        mine, value = getattr(ours, name), getattr(theirs, name)
        if mine != value:
            raise ValidationError(f"data.{name}", mine, f"the run's data has {value!r}")


def read_length(dataset: Any) -> int:
    """The length of the data. Raises ValidationError if it has none."""
    if isinstance(dataset, int) and not isinstance(dataset, bool):
        check_int("dataset", dataset, 1, _MAX_VALUE)
        return dataset
    try:
        length = len(dataset)
    except TypeError as error:
        raise ValidationError(
            "dataset",
            type(dataset).__name__,
            "expected a length, or a dataset with one; a stream is diloco.data(stream=open_at)",
        ) from error
    check_int("len(dataset)", length, 1, _MAX_VALUE)
    return length
