"""The data of a run, as the outer loop deals with it: claims with what is sent, commits with what
comes back, and what has to be thrown away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Protocol

from atoll.core.checks import check_int
from atoll.core.errors import ValidationError
from atoll.diloco.allreduce.note import UploadHeader
from atoll.diloco.allreduce.team import Team
from atoll.diloco.data import ranges, report
from atoll.diloco.data.journal import Journal
from atoll.diloco.data.ledger import make_terms
from atoll.diloco.data.ranges import Ranges
from atoll.diloco.data.shard import OpenAt, Shard
from atoll.diloco.outer import Fragment
from atoll.diloco.stream import Commit, Joined, Stream

log = logging.getLogger("atoll.diloco")

_MAX_VALUE = 2**62
_IDLE_S = 3.0  # how long a replica without data leaves the decision to others, at least


class SharingLoop(Protocol):
    """What the data needs of the outer loop."""

    fragments: list[Fragment]
    steps: int

    def end_period(self) -> None: ...

    def read_more(self, at: int) -> None: ...

    def catch_up(self) -> None: ...

    def throw_away(self) -> None: ...

    def forget_late_work(self) -> None: ...


class SharedData:
    """Does nothing until the script calls `shard()`, but for reading what the run says."""

    def __init__(self, loop: SharingLoop, rank: int, world: int, team: Team) -> None:
        self._loop, self._team = loop, team
        self.journal = Journal(rank, world, len(loop.fragments))
        self.shard: Shard | None = None
        self._bad = 0  # movements in a row that were no numbers
        self.dropped = 0
        self._saved: list[Ranges] | None = None
        self._has_saved = False
        self._sent_at: float | None = None
        self._usual_s = 0.0  # from one send to the next

    def open(
        self,
        dataset: Any,
        stream: OpenAt | None,
        seed: int,
        shuffle: bool,
        epochs: int,
        batch: int,
        fingerprint: str,
        part: tuple[int, int] | None,
    ) -> Shard:
        if self.shard is not None:
            raise ValidationError("shard", "a second one", "a run has one set of data")
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
            check_int("part[1]", part[1], 1, self._team.processes)
            check_int("part[0]", part[0], 0, part[1] - 1)
        loop = self._loop
        length = None if stream is not None else read_length(dataset)
        terms = make_terms(
            length,
            period=loop.fragments[0].period,
            world=self.journal.world,
            fragments=len(loop.fragments),
            epochs=epochs,
            seed=seed,
            shuffle=bool(shuffle),
            fingerprint=str(fingerprint),
        )
        seq = sum(fragment.rounds for fragment in loop.fragments)
        book = self.journal.open(terms, seq, loop.steps)
        self._restore()
        self.shard = Shard(loop, book, self._team, batch=batch, stream=stream, part=part)
        return self.shard

    def save(self) -> list[Ranges]:
        """What the late work that each fragment carries was trained on."""
        book, count = self.journal.book, len(self._loop.fragments)
        return [] if book is None else [book.carried(at) for at in range(count)]

    def load(self, carried: list[Ranges] | None) -> None:
        """A state with late work was loaded; None: a state that does not know of data."""
        self._saved, self._has_saved = carried, True
        if self.journal.book is not None:
            self._restore()

    def _restore(self) -> None:
        """Late work of a saved state counts if all that it was trained on is still held."""
        if not self._has_saved:
            return
        self._has_saved = False
        carried, book = self._saved, self.journal.book
        assert book is not None
        if carried is not None and not any(carried):
            return  # nothing but what a codec left out
        # With several fragments a part of it may have come in with another one.
        is_good = carried is not None and len(carried) == 1
        if not (is_good and carried and book.restore(0, carried[0], self._loop.steps)):
            log.warning("late work of the saved state is dropped: others may have its data")
            self._loop.forget_late_work()

    def check_epochs(self, epochs: int) -> None:
        """Raises ValidationError unless the data has so many."""
        book = self.journal.book
        if book is None or book.ledger.terms.length is None:
            raise ValidationError(
                "epochs", epochs, "expected rounds=, steps= or tokens=: epochs need diloco.shard(n)"
            )
        most = book.ledger.terms.epochs
        if epochs > most:
            raise ValidationError("epochs", epochs, f"the data has {most}: diloco.shard(epochs=…)")

    def add(self, at: int, read: Joined | None) -> None:
        """What was read of the rounds of a fragment."""
        if read is not None:
            self.journal.add(at, read.rounds, read.ledger)

    def fold(self) -> None:
        self.journal.fold(self._loop.read_more)

    def after_step(self, step: int) -> None:
        if self.shard is not None:
            self.shard.after_step(step)

    def before_send(self) -> None:
        """All rounds so far are known, and what the replica would bring may be claimed."""
        if self.shard is None:
            if self.journal.ledger is not None:
                raise ValidationError(
                    "data", "of this replica", "the run shares its data: call diloco.shard(…)"
                )
            return
        self.shard.gather()
        self._loop.catch_up()
        self._be_honest()

    def header(
        self, at: int, steps: int, tokens: float, *, is_bad: bool, is_left: bool
    ) -> UploadHeader:
        """What an upload of the fragment says."""
        shard, book = self.shard, self.journal.book
        if shard is None or book is None:
            return self.journal.header(steps, tokens)
        self._bad = self._bad + 1 if is_bad else 0
        # Data that makes a movement of no numbers is trained on a second time, not for ever.
        claim = () if self._bad == 1 else book.claim(at)
        if self._bad > 1:
            self.dropped += ranges.size(claim)
            log.warning(
                "%d positions are dropped: what they train is no number", ranges.size(claim)
            )
        now = time.monotonic()
        if self._sent_at is not None and claim:
            self._usual_s = now - self._sent_at
        self._sent_at = now
        want = 0 if is_left else shard.want(self._loop.fragments[at].period)
        idle_s = max(_IDLE_S, 2 * self._usual_s)
        return self.journal.header(steps, tokens, claim, want, shard.end, idle_s)

    def take(self, at: int, commit: Commit, claimed: Ranges, *, is_emptied: bool) -> None:
        """A round of the fragment came back."""
        self.add(at, commit.read)
        self.fold()
        book = self.journal.book
        if book is None:
            return
        if commit.is_behind:
            self._discard_all("the run went on without it")
            return
        if commit.is_member:
            book.was_member(at, claimed)
        else:
            book.was_left_out(at, claimed, is_carried=commit.is_carried)
        if is_emptied:
            book.empty(at, self._loop.steps)
        self._be_honest()
        self._plan()

    def discard(self) -> None:
        """The global values are loaded: nothing that was trained on is anywhere."""
        if self.journal.book is not None:
            self.journal.book.discard(self._loop.steps)
            self._plan()

    def report(self, streams: Sequence[Stream]) -> report.DataReport:
        rounds = [
            report.RoundRead(fragment, number, read)
            for fragment, stream in enumerate(streams)
            for number, read in stream.data_rounds()
        ]
        shard = self.shard
        return report.make(
            self.journal.ledger,
            rounds,
            skipped=0 if shard is None else shard.skipped,
            dropped=self.dropped,
            in_vain=0 if self.journal.book is None else self.journal.book.in_vain,
        )

    def _be_honest(self) -> None:
        book = self.journal.book
        if book is not None and not book.is_honest:
            self._discard_all("others have the data it trained on")

    def _discard_all(self, reason: str) -> None:
        """Throw away all that was trained and not committed: it could count twice."""
        book = self.journal.book
        assert book is not None
        log.warning("%d positions were trained on in vain: %s", ranges.size(book.fresh), reason)
        self._loop.throw_away()
        book.discard(self._loop.steps)
        self._plan()

    def _plan(self) -> None:
        if self.shard is not None:
            self.shard.plan()


def took(header: UploadHeader) -> Ranges:
    """What an upload claims."""
    data = header.note.data
    return () if data is None or data.took is None else data.took


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
            "expected a length, or a dataset with one; a stream is diloco.shard(stream=open_at)",
        ) from error
    check_int("len(dataset)", length, 1, _MAX_VALUE)
    return length
