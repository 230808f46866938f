"""What one call of an all-reduce brings to its rounds, where their mean goes, how they went."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from atoll.diloco import packing
from atoll.diloco.allreduce import catchup
from atoll.diloco.allreduce.exchange import Exchange
from atoll.diloco.allreduce.feedback import Entry, Feedback, add_residual
from atoll.diloco.allreduce.layout import Layout
from atoll.diloco.allreduce.manifest import Manifest
from atoll.diloco.allreduce.note import UploadHeader
from atoll.diloco.allreduce.team import together
from atoll.diloco.allreduce.upload import Payload
from atoll.diloco.packing import Vector

log = logging.getLogger("atoll.allreduce")

Take = Callable[[int, Vector], None]  # where in the row, and the values from there on
Values = Callable[[Take], None]  # calls it with all of a row, part by part


@dataclass
class Work:
    """What one call of an all-reduce brings to its rounds."""

    payload: Payload
    feedback: Feedback
    out: Vector | None = None  # for the mean, perhaps the row of the cargo; None: it stays encoded
    bring: Callable[[], None] | None = None  # puts the values into the row again
    weight: float = 1.0
    note: str = ""  # a word for all members
    header: UploadHeader | None = None
    upload: str = ""
    uploads: list[str] = field(default_factory=list)  # of this round; all hold the same values
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        return self.payload.layout

    def bring_back(self) -> None:
        """The cargo has its values, even if a part of a mean is in their place."""
        if self.out is self.payload.row:
            assert self.bring is not None
            self.bring()
            self.payload.add(self.feedback.up)

    def bring_again(self, is_counted: Callable[[], bool], *, carries: bool) -> None:
        """Make ready for a later round, after one whose mean is gone.

        `is_counted` settles that round, and tells whether it has the rank's values: then only what
        is owed counts in the later one.
        """
        self.bring_back()
        residual = None if self.feedback.up is None else self.feedback.up.copy()
        if not is_counted():
            return
        if carries:
            self.payload.bring_only(self.feedback.up)
        else:
            self.payload.replace(residual, self.feedback.up)

    def entry(self, manifest: Manifest, pool: Executor) -> Entry:
        """What will be owed if the attempt of the manifest is committed."""
        payload = self.payload
        find = None if payload.codec.is_exact else partial(payload.left_out, pool)
        return Entry(manifest, self.upload, payload.rank, payload.share, find)

    def settle(self) -> None:
        """The round is committed, with the upload of this process."""
        self.feedback.settle()

    def carry(self) -> None:
        """The round is committed without this rank, which owes its values now."""
        self.feedback.carry(self.payload.row)

    def drop(self) -> None:
        """The round is committed, and the values of this process will never count."""

    def fail(self) -> None:
        """The call has failed: what was owed before is owed, until its attempt is settled."""
        self.feedback.keep()


@dataclass
class TensorWork(Work):
    """The values of tensors, which stay as they are until the call is over."""

    tensors: Sequence[Any] = ()

    @classmethod
    def of(
        cls,
        payload: Payload,
        feedback: Feedback,
        weight: float,
        tensors: Sequence[Any],
        out: Sequence[Any] | None,
        *,
        is_plain: bool,
    ) -> TensorWork:
        """`is_plain`: nothing is ever added to the values. So they are sent from where they lie,
        if that is one piece of memory, and the mean is made in `out` if that is one.
        """
        vector = packing.as_vector(tensors) if is_plain and feedback.up is None else None
        payload.hold(vector)
        if vector is None:
            packing.flatten(tensors, payload.row)
            payload.add(feedback.up)
        room = None if out is None else packing.as_vector(out)
        if room is None and out is not None:
            packing.refuse_shared(out)
        if room is not None and not packing.are_apart(room, tensors):
            room = None
        if room is None and out is not None and is_plain:
            room = payload.spare
        if room is None:
            room = np.empty(payload.share.size, np.float32)
        return cls(payload, feedback, room, weight=weight, tensors=tensors)

    def bring_back(self) -> None:
        if self.out is self.payload.row:
            packing.flatten(self.tensors, self.payload.row)


@dataclass
class JointWork(Work):
    """Values that are added to what is owed, in one row, for a codec that is not exact.

    From `of` until the call is over `feedback.up` is None: the row holds both. What the codec
    leaves out takes the place of the values when the round is committed. Where they do not count,
    what was owed comes back by subtraction if they can be had again, and else is forgotten.
    """

    again: Values | None = None
    has_values: bool = False

    @classmethod
    def of(cls, payload: Payload, feedback: Feedback, again: Values | None) -> JointWork:
        row, feedback.up = feedback.up, None
        payload.hold(np.zeros(payload.share.size, np.float32) if row is None else row)
        return cls(payload, feedback, again=again)

    def add(self, start: int, part: Vector) -> None:
        """Bring these values, from `start` on, too. Their memory is used."""
        self.has_values = True
        at = self.payload.row[start : start + part.size]
        add_residual(part, at)
        at[:] = part

    def subtract(self, start: int, part: Vector) -> None:
        at = self.payload.row[start : start + part.size]
        with np.errstate(invalid="ignore", over="ignore"):
            np.subtract(at, part, out=at)
        at[~np.isfinite(at)] = 0

    def bring_back(self) -> None:
        """No mean was ever in the place of the values."""

    def bring_again(self, is_counted: Callable[[], bool], *, carries: bool) -> None:
        is_over = is_counted()
        is_settled, self.feedback.up = self.feedback.up is not None, None
        if is_over and carries:
            if not is_settled:
                self._take_out()
            self.has_values = False
        elif is_settled:
            self.has_values = False
            if self.again is not None:
                self.again(self.add)

    def entry(self, manifest: Manifest, pool: Executor) -> Entry:
        payload = self.payload
        return Entry(
            manifest,
            self.upload,
            payload.rank,
            payload.share,
            lambda _: payload.left_out(pool, payload.row),
        )

    def carry(self) -> None:
        self.feedback.up = self.payload.row

    def drop(self) -> None:
        self._take_out()
        self.feedback.up = self.payload.row

    def fail(self) -> None:
        entry, payload = self.feedback.entry, self.payload
        if self.feedback.up is not None:  # the round was committed before the call failed
            return
        if entry is not None and entry.find_left_out is not None:
            values = None if self.again is None else payload.row.copy()
            entry.left_out, entry.find_left_out = entry.find_left_out(None), None
            payload.hold(np.empty(0, np.float32) if values is None else values)
        if self.again is None:
            log.info("what rank %d owed before the round is forgotten", payload.rank)
            return
        try:
            self._take_out()
        except Exception as error:
            log.warning("what was owed is forgotten: %s", error)
            payload.row.fill(0)
        self.feedback.up = payload.row

    def _take_out(self) -> None:
        """The row holds what was owed before."""
        if self.has_values and self.again is not None:
            self.again(self.subtract)
        elif self.has_values:
            self.payload.row.fill(0)


class EncodedMean:
    """The mean of a round, still encoded."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def visit(self, take: Take) -> None:
        """`take` gets all of it, part by part, once, from several threads."""
        self._exchange.visit(take)


def settle_failed(reader: catchup.Reader, feedback: Feedback) -> bool:
    """Whether the round in which an earlier try failed was committed with its upload."""
    entry = feedback.entry
    if entry is None:
        return False
    has_residuals = (
        entry.find_left_out is not None
        or entry.left_out is not None
        or entry.shards
        or feedback.up is not None
    )
    # Processes of a replica may differ in what is left out, and must not in what they ask.
    asks = any(together(reader.team, lambda: bool(has_residuals)))
    if asks and catchup.was_committed(reader, entry):
        feedback.settle()
        return True
    feedback.give_up()
    return False


def is_counted(reader: catchup.Reader, work: Work, manifest: Manifest) -> bool:
    """Whether the round of the manifest, whose mean cannot be read, has the rank's values."""
    if manifest.has(work.upload):
        return settle_failed(reader, work.feedback)
    return manifest.member(work.payload.rank) is not None


@dataclass(frozen=True)
class ReduceReport:
    """How one round went, as this replica saw it.

    `manifest`: rank to weight, of those whose tensors are in the mean. `is_member`: whether this
    replica's are. `missing`: ranks that were waited for and did not come. `skipped`: rounds that
    were decided and whose means this replica did not read; its caller catches up with `join()`.
    """

    round: int
    attempt: int
    members: dict[int, float]
    is_member: bool
    missing: list[int]
    skipped: list[int]
    bytes_up: int
    bytes_down: int
    requests: int
    seconds: dict[str, float] = field(default_factory=dict)
    notes: dict[int, str] = field(default_factory=dict)  # rank to the word of its upload
    committed: Manifest | None = None
