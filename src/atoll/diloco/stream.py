"""A stream takes one fragment through the rounds: agree on a mean, step, catch up with the others.

Every fragment is a run of its own in the store, so its rounds follow one another whatever the
other fragments do. `Alone` is a world of one: it has no store and sends nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from atoll.core.errors import BackendError, Gone, NotFound, ValidationError
from atoll.core.model import msgpack_decoder
from atoll.diloco import saved
from atoll.diloco.allreduce import ObjectStoreAllReduce, catchup, past
from atoll.diloco.allreduce.exchange import Behind
from atoll.diloco.allreduce.keys import COMPLETE, parse_round
from atoll.diloco.allreduce.layout import Layout, cells_of
from atoll.diloco.allreduce.manifest import Manifest
from atoll.diloco.allreduce.note import (
    DataRound,
    LedgerWriter,
    UploadHeader,
    UploadNote,
    claim_of,
    member_note,
)
from atoll.diloco.allreduce.share import Share
from atoll.diloco.allreduce.team import Solo, Team, lead, together
from atoll.diloco.allreduce.work import EncodedMean, JointWork, Values
from atoll.diloco.data import ledger as ledgers
from atoll.diloco.data.ledger import Ledger
from atoll.diloco.outer import Floats, Fragment, Slot
from atoll.diloco.packing import TensorSpec
from atoll.diloco.replica_config import ReplicaConfig, check_fragments, fragment_run
from atoll.diloco.spill import SpillFile
from atoll.objectstore import ObjectStore

log = logging.getLogger("atoll.diloco")

_COMPLETE = msgpack_decoder(bytes)
_POLL_S = 0.1
_PATIENCE_S = 600.0
_FIRST_RANK_S = 10.0  # how long the others leave it to rank 0 to say where all start
_DIGEST_BYTES = 32  # before a start that is in one object


class Commit(NamedTuple):
    """One committed round: the same on every replica, but for the byte counts."""

    round: int
    members: tuple[int, ...]
    bytes_up: int = 0
    bytes_down: int = 0
    requests: int = 0
    notes: Mapping[int, str] = {}  # rank to its word for all the others
    is_member: bool = True
    is_behind: bool = False  # the values were brought to no round: the run was further
    is_carried: bool = False  # the round went on without them, and they come with the next one
    read: Joined | None = None
    committed: Manifest | None = None  # None: without a store


class PseudoGradient(NamedTuple):
    """How far a replica has moved: in a row, or added to what it owes.

    The memory of the row is used for the mean, too; `again` writes the movement into it anew, and
    is None where the model trains on meanwhile.
    """

    note: str  # a word for all members of the round
    is_bad: bool  # it is not finite, and not in the row
    row: Floats | None = None
    again: Callable[[], None] | None = None
    joint: JointWork | None = None


class Joined(NamedTuple):
    """What was read of the run's data: the ledger of a checkpoint, and the rounds after it."""

    ledger: Ledger | None = None
    rounds: tuple[DataRound, ...] = ()


def read_ledger(fragment: Fragment) -> Ledger | None:
    """The ledger of the state that was loaded."""
    return ledgers.unpack(fragment.ledger.encode()) if fragment.ledger else None


class Stream(Protocol):
    """Used by one thread at a time. Every method may block on the store and raise its errors.

    All processes of a replica call the same methods in the same order.
    """

    def share(self, slots: Sequence[Slot]) -> Share:
        """What this process carries of a fragment with these parameters."""

    ledger_writer: LedgerWriter | None  # keeps the ledger, if the replicas share their data

    def join(self, fragment: Fragment, room: Floats | None = None) -> Joined:
        """`fragment` holds what all replicas agree on, as of the newest round.

        `room` is memory for a row.
        """

    def is_behind(self) -> bool:
        """Whether rounds went on without this replica since the last one it knows."""

    def forget_late_work(self) -> None:
        """What was too late for earlier rounds is not brought to a later one."""

    @property
    def has_residual(self) -> bool:
        """Whether what does not count in a round comes with the next: see `begin`."""

    def begin(self, fragment: Fragment, again: Values | None) -> JointWork | None:
        """What this process owes, to add its movement to; None: the movement needs a row.

        `again` is as for `ObjectStoreAllReduce.begin`.
        """

    def advance(
        self,
        fragment: Fragment,
        pseudo_gradient: PseudoGradient,
        weight: float,
        header: UploadHeader | None = None,
    ) -> Commit:
        """`fragment` has taken the outer step of a round in which this replica took part.

        If rounds went on without this replica, `fragment` has taken the steps of all of them.
        """

    def checkpoint(self, fragment: Fragment) -> None:
        """The state of the fragment, as of its last round, is in the store."""

    def data_rounds(self) -> list[tuple[int, DataRound]]:
        """What the committed rounds so far say of the data, each with its number."""

    def feedback(self) -> dict[str, Any]:
        """What lossy codecs left out of this replica's values, to be sent later."""

    def load_feedback(self, state: dict[str, Any]) -> None: ...

    def leave(self, error: BaseException) -> None:
        """Tell the others that this replica has failed."""

    def go(self) -> None:
        """The replica is to leave: whoever waits for a round stops waiting and raises Left."""

    def depart(self) -> None:
        """Tell the others that this replica was told to leave."""

    def close(self) -> None: ...


class Alone:
    """A world of one replica: its own gradient is the mean."""

    def __init__(self, team: Team | None = None) -> None:
        self._team: Team = Solo() if team is None else team
        self.ledger_writer: LedgerWriter | None = None
        self._rounds: list[tuple[int, DataRound]] = []

    def share(self, slots: Sequence[Slot]) -> Share:
        specs = tuple(TensorSpec("float32", slot.shape) for slot in slots)
        cells = cells_of(slots[-1].stop, ("fp32",))
        layout = Layout(specs, 1, "fp32", "fp32", "", cells)
        return Share(layout, self._team.process, self._team.processes)

    def join(self, fragment: Fragment, room: Floats | None = None) -> Joined:
        return Joined(read_ledger(fragment))

    def is_behind(self) -> bool:
        return False

    def forget_late_work(self) -> None:
        pass

    has_residual = False

    def begin(self, fragment: Fragment, again: Values | None) -> JointWork | None:
        return None

    def advance(
        self,
        fragment: Fragment,
        pseudo_gradient: PseudoGradient,
        weight: float,
        header: UploadHeader | None = None,
    ) -> Commit:
        assert pseudo_gradient.row is not None
        fragment.step(pseudo_gradient.row)
        own = UploadNote(fragment.period) if header is None else header.note
        fragment.steps += own.steps
        fragment.tokens += own.tokens
        data = None if self.ledger_writer is None else self.ledger_writer.data()
        read = None
        if data is not None and self.ledger_writer is not None:
            claim = claim_of(self.ledger_writer.rank, member_note(own))
            read = Joined(None, (DataRound(data, (claim,)),))
            self._rounds.append((fragment.rounds - 1, read.rounds[0]))
        return Commit(fragment.rounds - 1, (0,), notes={0: pseudo_gradient.note}, read=read)

    def checkpoint(self, fragment: Fragment) -> None:
        pass

    def data_rounds(self) -> list[tuple[int, DataRound]]:
        return list(self._rounds)

    def feedback(self) -> dict[str, Any]:
        return {}

    def load_feedback(self, state: dict[str, Any]) -> None:
        pass

    def leave(self, error: BaseException) -> None:
        pass

    def go(self) -> None:
        pass

    def depart(self) -> None:
        pass

    def close(self) -> None:
        pass


class StoreStream:
    """A stream through an all-reduce that nothing else uses."""

    def __init__(self, allreduce: ObjectStoreAllReduce, checkpoint_every: int) -> None:
        self._allreduce = allreduce
        self._checkpoint_every = checkpoint_every
        self._is_stale = False  # a join failed: the next round must not be added to what is here

    @property
    def ledger_writer(self) -> LedgerWriter | None:
        return self._allreduce.decider.ledger_writer

    @ledger_writer.setter
    def ledger_writer(self, ledger_writer: LedgerWriter | None) -> None:
        self._allreduce.decider.ledger_writer = ledger_writer

    def share(self, slots: Sequence[Slot]) -> Share:
        allreduce = self._allreduce
        like = [np.broadcast_to(np.float32(0), slot.shape) for slot in slots]
        return allreduce.share_of(allreduce.describe(like))

    def join(self, fragment: Fragment, room: Floats | None = None) -> Joined:
        """Load the newest checkpoint, or the start, and take the steps of the rounds after it.

        `room` is memory for the means.
        """
        deadline = time.monotonic() + _PATIENCE_S
        self._is_stale = True
        while True:
            try:
                following, rounds = self._load(fragment), list[DataRound]()
                for mean, layout in self._allreduce.read_since(following, room):
                    fragment.step(self._own(fragment, mean, layout))
                    self._fold(fragment, self._allreduce.decider.last, rounds)
                break
            except catchup.Outdated:
                continue
            except Gone as news:
                # A newer checkpoint is on its way as long as others train.
                if lead(self._allreduce.team, lambda: time.monotonic() > deadline):
                    raise
                log.info("waiting for a checkpoint: %s", news)
                time.sleep(_POLL_S)
        self._is_stale = False
        return Joined(read_ledger(fragment), tuple(rounds))

    def is_behind(self) -> bool:
        allreduce = self._allreduce
        return allreduce.may_be_late and self._is_behind((allreduce.round or 0) - 1)

    def forget_late_work(self) -> None:
        self._allreduce.forget_late_work()

    def _fold(self, fragment: Fragment, manifest: Manifest | None, rounds: list[DataRound]) -> None:
        """A committed round counts: in the clock of the run, and in the ledger of its data."""
        assert manifest is not None
        fragment.tick(manifest)
        data = manifest.data_round()
        if data is not None:
            rounds.append(data)

    @property
    def has_residual(self) -> bool:
        return self._allreduce.has_residual

    def begin(self, fragment: Fragment, again: Values | None) -> JointWork | None:
        return self._allreduce.begin(fragment.share.layout, again) if self.has_residual else None

    def advance(
        self,
        fragment: Fragment,
        pseudo_gradient: PseudoGradient,
        weight: float,
        header: UploadHeader | None = None,
    ) -> Commit:
        allreduce, room = self._allreduce, pseudo_gradient.row
        read: Joined | None = None
        try:
            stored = self._reduce(fragment, pseudo_gradient, weight, header)
        except Behind:
            read = self.join(fragment, room)
            return Commit(-1, (), is_member=False, is_behind=True, read=read)
        report = allreduce.last_round
        assert report is not None
        rounds = list[DataRound]()
        if report.skipped or self._is_stale:
            read = self.join(fragment, room)
        elif room is not None:
            fragment.step(room)
        elif stored is not None:
            self._is_stale = True  # as long as only some values have taken the step
            stored.visit(fragment.step_part)
            self._is_stale = False
            fragment.rounds += 1
        if read is None:
            self._fold(fragment, report.committed, rounds)
            read = Joined(None, tuple(rounds))
            if not report.is_member and self._is_behind(report.round):
                read = self.join(fragment, room)
        members = tuple(report.members)
        is_due = fragment.rounds == 1 or fragment.rounds % self._checkpoint_every == 0
        is_first = (
            next((r for r in members if report.notes.get(r) != COMPLETE), -1) == allreduce.rank
        )
        if is_due and is_first and not report.skipped:
            fragment.ledger = (
                self.ledger_writer.after(rounds[0]) if self.ledger_writer and rounds else ""
            )
            self._save(fragment, report.round)
        return Commit(
            report.round,
            members,
            report.bytes_up,
            report.bytes_down,
            report.requests,
            report.notes,
            report.is_member,
            is_carried=allreduce.carries and allreduce.rank not in members,
            read=read,
            committed=report.committed,
        )

    def _reduce(
        self,
        fragment: Fragment,
        pseudo_gradient: PseudoGradient,
        weight: float,
        header: UploadHeader | None,
    ) -> EncodedMean | None:
        """The mean of a round is in the row of the movement, or held."""
        allreduce, row, note = self._allreduce, pseudo_gradient.row, pseudo_gradient.note
        if pseudo_gradient.joint is not None:
            return allreduce.allreduce_parts(
                pseudo_gradient.joint, weight=weight, note=note, header=header
            )
        assert row is not None
        reduce = partial(
            allreduce.allreduce_share,
            fragment.share.layout,
            row,
            weight=weight,
            note=note,
            header=header,
        )
        if pseudo_gradient.again is not None:
            reduce(again=pseudo_gradient.again)
            return None
        with SpillFile(row.size) as spill:
            spill.put(0, row)
            reduce(again=lambda: spill.get(0, row))
        return None

    def checkpoint(self, fragment: Fragment) -> None:
        number = self._allreduce.round
        if number:
            saved.save(self._allreduce, fragment, self._allreduce.keys.checkpoint(number), number)

    def data_rounds(self) -> list[tuple[int, DataRound]]:
        manifests = lead(self._allreduce.team, self._committed)
        return [(each.round, data) for each in manifests if (data := each.data_round())]

    def _committed(self) -> list[Manifest]:
        """The manifests of the rounds that this replica has folded: the last attempt of each."""
        allreduce = self._allreduce
        last: dict[int, Manifest] = {}
        for manifest in past.read_manifests(allreduce.blobs, allreduce.keys):
            if manifest.round < (allreduce.round or 0):
                last[manifest.round] = manifest
        return [each for _, each in sorted(last.items()) if each.members]

    def feedback(self) -> dict[str, Any]:
        return self._allreduce.state_dict()

    def load_feedback(self, state: dict[str, Any]) -> None:
        self._allreduce.load_state_dict(state)

    def leave(self, error: BaseException) -> None:
        self._allreduce.leave(error)

    def go(self) -> None:
        self._allreduce.go()

    def depart(self) -> None:
        self._allreduce.depart()

    def close(self) -> None:
        self._allreduce.close()

    def _save(self, fragment: Fragment, number: int) -> None:
        key = self._allreduce.keys.checkpoint(number + 1)
        try:
            saved.save(self._allreduce, fragment, key, number + 1)
        except BackendError as error:
            log.warning("round %d is not in a checkpoint, a later one will be: %s", number, error)

    def _is_behind(self, number: int) -> bool:
        allreduce = self._allreduce
        return lead(
            allreduce.team,
            lambda: catchup.latest(allreduce.blobs, allreduce.keys, number) is not None,
        )

    def _own(self, fragment: Fragment, mean: Floats, layout: Layout) -> Floats:
        """What this process carries of a mean, which may be of a round that was cut otherwise."""
        if mean.size == fragment.share.size and layout.cells == fragment.share.layout.cells:
            return mean
        return saved.cut(fragment.share, mean)

    def _load(self, fragment: Fragment) -> int:
        """Load the newest checkpoint that is whole, or the start; returns the round after it."""
        allreduce = self._allreduce
        keys = lead(
            allreduce.team,
            lambda: [blob.key for blob in allreduce.blobs.list(allreduce.keys.checkpoints())],
        )
        for key in reversed(keys):
            number = parse_round(key)
            if number is not None and self._take(fragment, key):
                return number
        self._start(fragment)
        return 0

    def _take(self, fragment: Fragment, key: str) -> bool:
        """Whether all processes could load the checkpoint."""

        def load() -> bool:
            try:
                state = saved.read_index(self._allreduce, key)
                if isinstance(state, bytes):
                    complete = _COMPLETE.decode(state)
                    saved.load_full(fragment, complete, self._allreduce.keys.run)
                else:
                    saved.load(self._allreduce, fragment, state)
            except ValidationError:
                raise
            except (NotFound, ValueError, msgspec.MsgspecError) as error:
                log.warning("checkpoint %s cannot be used: %s", key, error)
                return False
            return True

        return all(together(self._allreduce.team, load))

    def _start(self, fragment: Fragment) -> None:
        """Load the parameters with which the first replica of the run began."""
        allreduce = self._allreduce
        key = allreduce.keys.start()
        deadline = time.monotonic() + (_FIRST_RANK_S if allreduce.rank else 0)

        def exists() -> bool:
            while True:
                try:
                    allreduce.blobs.get(key, 0, 1)
                    return True
                except NotFound:
                    if time.monotonic() >= deadline:
                        return False
                time.sleep(_POLL_S)

        def is_new() -> bool:
            if exists():
                return False
            newest = catchup.latest(allreduce.blobs, allreduce.keys)
            if newest is not None and not exists():
                raise ValidationError(
                    "run_id",
                    allreduce.keys.run,
                    f"the run has {newest[0] + 1} rounds and no model that they began with; "
                    "another model needs another run_id",
                )
            return newest is None

        if lead(allreduce.team, is_new):
            saved.save(allreduce, fragment, key, 0)

        def load() -> None:
            state = saved.read_index(allreduce, key)
            if isinstance(state, bytes):
                saved.load_full(fragment, state[_DIGEST_BYTES:], allreduce.keys.run)
            else:
                saved.load(allreduce, fragment, state)

        together(allreduce.team, load)


def open_streams(
    location: ReplicaConfig,
    count: int,
    checkpoint_every: int,
    allreduce: ObjectStoreAllReduce | None,
    run_id: str | None,
    options: dict[str, Any],
) -> list[Stream]:
    """One stream for each fragment, each with rounds of its own."""
    if allreduce is not None:
        return [StoreStream(allreduce, checkpoint_every)]
    if location.uri is None:
        return [Alone(options["team"]) for _ in range(count)]
    blobs = (
        location.uri if isinstance(location.uri, ObjectStore) else ObjectStore.open(location.uri)
    )
    lead(options["team"], lambda: check_fragments(blobs.list_folders(), run_id, count))
    return [
        StoreStream(
            ObjectStoreAllReduce(
                location.uri,
                location.rank,
                location.world_size,
                min_replicas=location.min_replicas,
                run_id=fragment_run(run_id, at, count),
                **options,
            ),
            checkpoint_every,
        )
        for at in range(count)
    ]
