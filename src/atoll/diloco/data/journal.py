"""The ledger of a run as one replica folds it from the rounds of all fragments, in their order.

Rounds of a fragment are read one after the other, but a replica that catches up reads fragment by
fragment: what came too early waits until the rounds before it are there.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from atoll.core.errors import DistributedError, ValidationError
from atoll.diloco.allreduce.note import DataNote, DataRound, ManifestData, UploadHeader, UploadNote
from atoll.diloco.data import ledger as ledgers
from atoll.diloco.data import ranges
from atoll.diloco.data.book import Book
from atoll.diloco.data.ledger import InvalidClaim, Ledger, Terms
from atoll.diloco.data.ranges import Ranges

log = logging.getLogger("atoll.diloco")


class Journal:
    """`book` is None until the replica says which data it trains on."""

    def __init__(self, rank: int, world: int, fragments: int) -> None:
        self.rank, self.world, self.fragments = rank, world, fragments
        self.ledger: Ledger | None = None
        self.book: Book | None = None
        self._queues: list[deque[DataRound]] = [deque() for _ in range(fragments)]

    def open(self, terms: Terms, seq: int, step: int) -> Book:
        """The replica trains on data with these terms; `seq` rounds were committed before.

        Raises ValidationError if the run has other data.
        """
        if self.ledger is None:
            self.ledger = ledgers.begin(terms, seq)
        else:
            check_terms(terms, self.ledger.terms)
        self.book = Book(self.ledger, self.rank, self.fragments, step)
        return self.book

    def add(
        self, fragment: int, rounds: Sequence[DataRound], checkpoint: Ledger | None = None
    ) -> None:
        """Committed rounds of a fragment, in order, after a checkpoint with this ledger."""
        if checkpoint is not None and (self.ledger is None or checkpoint.seq > self.ledger.seq):
            self._take(checkpoint)
        self._queues[fragment].extend(rounds)

    def fold(self, read_more: Callable[[int], None]) -> None:
        """Fold what is there. `read_more` adds the rounds of a fragment that are missing."""
        while any(self._queues):
            self._drop_old()
            if not any(self._queues):
                return
            if self.ledger is None:
                first = min((queue[0] for queue in self._queues if queue), key=lambda r: r.data.seq)
                self._take(ledgers.begin(first.data.terms, first.data.seq))
            assert self.ledger is not None
            seq = self.ledger.seq
            queue = next((q for q in self._queues if q and q[0].data.seq == seq), None)
            if queue is None:
                # A later round was decided on this one, so it is in the store.
                fragment = seq % self.fragments
                read_more(fragment)
                self._drop_old()
                if any(self._queues) and not self._queues[fragment]:
                    raise DistributedError(f"round {seq} of the data is not in the store")
                continue
            self._commit(queue.popleft())

    def problem(self, round: DataRound | None) -> str | None:
        """Why a manifest is not one of this ledger."""
        if self.book is None:
            return None
        return "it has no ledger" if round is None else self._check(round)

    def packed(self) -> str:
        return "" if self.ledger is None else ledgers.pack(self.ledger).decode()

    def after(self, round: DataRound) -> str:
        """The ledger after a round that is about to be folded, packed."""
        if self.ledger is None or self._check(round) is not None:
            return ""
        return ledgers.pack(ledgers.commit(self.ledger, round.claims, round.data.world)).decode()

    def _check(self, round: DataRound) -> str | None:
        if self.ledger is None or round.data.base != self.ledger.digest:
            return f"it was decided on ledger {round.data.base}"
        try:
            ledgers.commit(self.ledger, round.claims, round.data.world)
        except InvalidClaim as error:
            return str(error)
        return None

    def header(
        self,
        steps: int,
        tokens: float,
        took: Ranges = (),
        want: int = 0,
        end: int | None = None,
        idle_s: float = 0.0,
    ) -> UploadHeader:
        """What the replica says with an upload. `idle_s`: how long it waits if it has no claim."""
        if self.book is None:
            return UploadHeader(UploadNote(steps, tokens))
        ledger = self.book.ledger
        others = (h.ranges for rank, h in ledger.holds.items() if rank != self.rank and h.firm)
        waits_s = idle_s if not took and any(others) else 0.0
        data = DataNote(took, want, ledger.digest, end)
        return UploadHeader(UploadNote(steps, tokens, data), ledger.terms, waits_s)

    def data(self) -> ManifestData | None:
        if self.book is None:
            return None
        ledger = self.book.ledger
        return ManifestData(ledger.seq, ledger.digest, ledger.terms, self.world)

    def refuses(self, rank: int, data: DataNote) -> str | None:
        """Why an upload cannot be in the round that is decided on this ledger."""
        if self.book is None:
            return None
        ledger = self.book.ledger
        if data.base[:8] != ledger.digest[:8]:
            return "its claim was made on another ledger"
        if data.took is None or not ranges.is_inside(data.took, ledger.hold_of(rank)):
            return "it claims data that it does not hold"
        return None

    def _take(self, ledger: Ledger) -> None:
        self.ledger = ledger
        if self.book is not None:
            self.book.ledger = ledger

    def _drop_old(self) -> None:
        if self.ledger is None:
            return
        for queue in self._queues:
            while queue and queue[0].data.seq < self.ledger.seq:
                queue.popleft()

    def _commit(self, round: DataRound) -> None:
        problem = self._check(round)
        if problem is not None:
            raise DistributedError(f"a committed round does not fit the ledger: {problem}")
        assert self.ledger is not None
        self._take(ledgers.commit(self.ledger, round.claims, round.data.world))


def check_terms(ours: Terms, theirs: Terms) -> None:
    """Raises ValidationError naming what is not the run's."""
    other = ledgers.difference(ours, theirs)
    if other is not None:
        name, mine, value = other
        raise ValidationError(f"data.{name}", mine, f"the run's data has {value!r}")
