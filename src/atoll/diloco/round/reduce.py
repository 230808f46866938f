"""The values of one process in the rounds of a run: encode uploads, make means, take outer steps.

`ReplicaValues` performs the effects on values as far as this process carries them, and is the
machine's local memory. A mean is summed in float64 in the order of the manifest, divided, rounded
once and encoded; it is a pure function of manifest and uploads, whoever makes it. It goes into the
outer step cell by cell as it is read.

Memory beside values and state of the outer rule: one row for the pseudo-gradient and what earlier
rounds left out. With exact codecs the own mean is summed over the own shard of the row; with lossy
ones the encoded upload and the rounding of the own mean are kept until the round is over.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, wait
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from atoll.core.errors import NotFound
from atoll.diloco.codecs import Codec, get_codec
from atoll.diloco.data.ranges import Ranges
from atoll.diloco.packing import Vector
from atoll.diloco.round import cells as wire
from atoll.diloco.round import objects
from atoll.diloco.round.cells import (
    BadInput,
    Buffer,
    CellReader,
    Damaged,
    MemberInputs,
    Share,
    WeightedMean,
    add_scaled,
    add_to_row,
    encode_cell,
    is_plain,
    overlap,
    zero_infinite,
)
from atoll.diloco.round.effects import FOREIGN
from atoll.diloco.round.objects import DIRECT, Manifest, MeanHeader, Member, Outcome, UploadHeader
from atoll.objectstore import ObjectStore, RangeReader

S = TypeVar("S")
T = TypeVar("T")

log = logging.getLogger("atoll.round")

# Threads that compute at a time: more would wait for each other, and each has memory of its own.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
MAX_HEADER_BYTES = 16 << 20  # of JSON: the sections of a replica of 1,000 processes
_LENGTH = struct.Struct("<I")
_TRAILER = struct.Struct("<II")  # behind a header: its length and CRC

# Of an upload: the lengths of its sections, and those of the rows that it brings to later rounds.
UploadSections = tuple[tuple[int, ...], list[tuple[int, ...]]]


class OuterStep(Protocol):
    """What the means of one fragment go into: the outer rule and its rows.

    `rows` by name, each as long as the share: parameters first, then whatever state the rule has.
    They are what a checkpoint holds. The rule must be elementwise, and give the same bits
    everywhere: numpy's plain arithmetic does.
    """

    @property
    def rows(self) -> Mapping[str, Vector]: ...

    @property
    def is_wanted(self) -> bool:
        """Whether values are wanted: else of a mean only what it says of itself is read."""

    def room(self, start: int, size: int) -> Vector | None:
        """Memory that the mean of these values may be made in, right before their step.

        For a rule that keeps means as they are: it saves a copy. None: there is none.
        """

    def step(self, round: int, start: int, mean: Vector) -> None:
        """Step the values of the row from `start` on. `mean` is to be left alone."""


class Fragment:
    """What one process carries of one fragment."""

    def __init__(self, share: Share, outer: OuterStep) -> None:
        self.share, self.outer = share, outer
        self._row: Vector = np.empty(0, np.float32)  # a replica that joins needs none yet
        self.is_clear = True  # nothing is owed: the row counts as zeros, whatever it holds
        self.uploads: set[str] = set()  # the keys that hold the row as it is
        self.sent: dict[int, Buffer] = {}  # by cell, as uploaded; empty where that is the row
        self.overwritten: set[str] = set()  # means that lie in the row, in place of what was sent

    @property
    def row(self) -> Vector:
        """The pseudo-gradient, and what earlier rounds left out."""
        if self.is_clear:
            self.fill(lambda row: row.fill(0))
        return self._row

    def clear(self) -> None:
        """Nothing is owed any more."""
        self.is_clear = True
        self.forget_upload()

    def fill(self, write: Callable[[Vector], None]) -> None:
        """Let `write` write a whole row that is clear, before its upload: saves a copy of it."""
        assert self.is_clear, "the row holds a residual: add to it"
        self.forget_upload()
        if self._row.size != self.share.size:
            self._row = np.empty(self.share.size, np.float32)
        write(self._row)
        self.is_clear = False

    def add(self, start: int, values: Vector) -> None:
        """Add values to the row from `start` on, before its upload. Call it for parts of it: a
        pseudo-gradient need not exist as a whole."""
        if self.is_clear and values.size == self.share.size:
            self.fill(lambda row: np.copyto(row, values))
            return
        self.forget_upload()
        add_to_row(self.row[start : start + values.size], values)

    def forget_upload(self) -> None:
        self.uploads.clear()
        self.sent.clear()
        self.overwritten.clear()


@dataclass
class _Applied:
    """How far a stored mean has gone into the outer step."""

    outcome: Outcome
    count: int = 0  # of this process's cells of it


@dataclass
class _Made:
    """A mean that this process made. `cells`: their bytes; None: they lie in the row."""

    outcome: Outcome
    cells: Sequence[Buffer] | None = None
    is_stored: bool = False
    rounding: dict[int, Vector] = field(default_factory=dict)  # what its bytes lack, by cell


class ReplicaValues:
    """The fragments that one process carries, and the machine's local memory."""

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        rank: int,
        nonce: str,
        fragments: Sequence[Fragment],
        codec: Codec,
        mean_codec: Codec,
        pool: Executor,
    ) -> None:
        """`prefix`: of the run's keys, with a slash at its end, or empty."""
        self.store, self.prefix = store, prefix
        self.rank, self.nonce = rank, nonce
        self.fragments = list(fragments)
        self.codec, self.mean_codec = codec, mean_codec
        self.fresh: Ranges = ()
        self.has_dropped = False  # the training thread goes on from the global values
        self.pool = pool
        self._digest = ""  # of the manifest that the next two are of
        self._applied: dict[str, _Applied] = {}
        self._made: dict[str, _Made] = {}
        self._direct: _Direct | None = None
        self._shares: dict[tuple[int, int, int], Share] = {}  # by fragment and cut

    def fragment(self, round: int) -> Fragment:
        return self.fragments[round % len(self.fragments)]

    def share(self, manifest: Manifest) -> Share:
        """What this process carries of a round, which replicas of another world may have cut."""
        place = manifest.round % len(self.fragments), manifest.shards, manifest.cells
        if place not in self._shares:
            self._shares[place] = self.fragment(place[0]).share.view(*place[1:])
        return self._shares[place]

    def key(self, key: str) -> str:
        return f"{self.prefix}{key}"

    # -- Local memory: never waits ----------------------------------------------------------------

    def begin(self, manifest: Manifest) -> None:
        if self._digest != manifest.digest:
            self.end()
            self._digest = manifest.digest

    def end(self) -> None:
        self._digest, self._direct = "", None
        self._applied.clear()
        self._made.clear()

    def drop(self) -> None:
        for fragment in self.fragments:
            fragment.clear()
        self.has_dropped = True

    def settle(self, manifest: Manifest, outcomes: Mapping[str, Outcome]) -> None:
        fragment, me = self.fragment(manifest.round), manifest.member(self.rank)
        if me is None or not me.weight:
            return  # no mean has read the row
        if self._is_all_committed(outcomes):
            fragment.clear()
            return
        if manifest.plan == DIRECT:
            if not any(self.rank in outcome.excluded for outcome in outcomes.values()):
                for cell in fragment.share.cells:
                    self._subtract_sent(fragment, cell)
        else:
            for name, outcome in outcomes.items():
                self._settle_mean(manifest, me, fragment, name, outcome)
        fragment.forget_upload()

    def _is_all_committed(self, outcomes: Mapping[str, Outcome]) -> bool:
        """Whether the means hold every value of the row exactly."""
        return (
            bool(outcomes)
            and self.codec.is_exact
            and not any(self.rank in outcome.excluded for outcome in outcomes.values())
            and not any(made.rounding for made in self._made.values())
        )

    def _settle_mean(
        self, manifest: Manifest, me: Member, fragment: Fragment, name: str, outcome: Outcome
    ) -> None:
        carried = self._carried(manifest, name)
        if self.rank not in outcome.excluded:
            for cell in carried:
                self._subtract_sent(fragment, cell)
        made = self._made.get(name)
        if made is None or made.outcome != outcome:
            return  # the rounding of another's mean, or of one that is not the stored one
        factor = manifest.total_weight / me.weight
        for cell, rounding in made.rounding.items():
            if cell in carried:
                add_scaled(fragment.row[fragment.share.slices[cell]], rounding, factor)

    def _subtract_sent(self, fragment: Fragment, cell: int) -> None:
        part = fragment.row[fragment.share.slices[cell]]
        if self.codec.is_exact:
            part.fill(0)
            return
        sent = self.codec.decode(memoryview(fragment.sent[cell]), part.size)
        with np.errstate(invalid="ignore", over="ignore"):
            np.subtract(part, sent, out=part)
        zero_infinite(part)
        if (decay := getattr(self.codec, "decay", 1.0)) != 1:
            part *= np.float32(decay)

    # -- Upload -----------------------------------------------------------------------------------

    def put_upload(self, key: str, round: int, header: UploadHeader) -> UploadHeader:
        """Store the upload of a replica of one process; return its header as it is stored."""
        rests = [
            self._put_row(rest.upload, round + ahead) for ahead, rest in enumerate(header.rest, 1)
        ]
        pieces, sections = self._encode_upload(key, round)
        self.fragment(round).uploads.add(key)
        if sections or rests:
            header = _with_sections(header, [(sections, rests)])
        self._put(key, [*pieces, pack_header(header)])
        return header

    def put_part(self, key: str, round: int, header: UploadHeader) -> UploadSections:
        """Store the part of this process; return the lengths of its sections."""
        process = self.fragment(round).share.process
        rests = [
            self._put_row(objects.part_key(rest.upload, process), round + ahead)
            for ahead, rest in enumerate(header.rest, 1)
        ]
        sections = self._put_row(objects.part_key(key, process), round)
        self.fragment(round).uploads.add(key)
        return sections, rests

    def put_header(
        self, key: str, header: UploadHeader, sections: Sequence[UploadSections]
    ) -> UploadHeader:
        """Store the upload of a replica of several processes, once all parts are stored."""
        header = _with_sections(header, sections)
        self._put(key, pack_header(header))
        return header

    def _put_row(self, key: str, round: int) -> tuple[int, ...]:
        """Store a row alone: its header is elsewhere."""
        pieces, sections = self._encode_upload(key, round)
        self._put(key, pieces)
        return sections

    def _put(self, key: str, data: bytes | Sequence[Buffer]) -> None:
        # A manifest will name it: what is committed survives a loss of power. Whoever creates the
        # manifest syncs the folder, once for all members.
        self.store.put(self.key(key), data, is_durable=True, is_name_durable=False)

    def _encode_upload(self, key: str, round: int) -> tuple[list[Buffer], tuple[int, ...]]:
        """The table and the cells of each shard, and how long that is; () if the layout tells."""
        fragment = self.fragment(round)
        share, shards, row = fragment.share, range(fragment.share.cut.shards), fragment.row
        is_encoded = bool(fragment.sent)  # by an upload that failed, or seemed to

        def encode(shard: int) -> list[Buffer]:
            numbers = share.cells_of(shard)
            if not numbers:
                return []
            if is_encoded:
                encoded = [fragment.sent[cell] for cell in numbers]
            else:
                encoded = [encode_cell(self.codec, row[share.slices[cell]]) for cell in numbers]
            return [wire.pack_table(wire.place_of(key, str(shard)), encoded), *encoded]

        if is_plain(self.codec):
            # It only needs checksums, which take less time than threads do.
            return [piece for shard in shards for piece in encode(shard)], ()
        sealed = each(self.pool, encode, shards, CORES)
        if not self.codec.is_exact:
            for shard in shards:
                fragment.sent.update(zip(share.cells_of(shard), sealed[shard][1:], strict=True))
        pieces = [piece for section in sealed for piece in section]
        return pieces, tuple(sum(memoryview(p).nbytes for p in section) for section in sealed)

    # -- Means ------------------------------------------------------------------------------------

    def make_means(
        self, manifest: Manifest, names: Sequence[str], *, exclude_missing: bool
    ) -> dict[str, bool | None]:
        """Make and create these means: True where one is stored now, None where it lacks input."""
        return {name: self._make_mean(manifest, name, exclude_missing) for name in names}

    def _make_mean(self, manifest: Manifest, name: str, exclude_missing: bool) -> bool | None:
        made = self._made.get(name)
        if made is not None and made.is_stored:
            return True
        excluded: set[int] = set()
        suspect: int | None = None
        while True:
            try:
                made = self._sum_mean(manifest, name, excluded)
                break
            except BadInput as problem:
                if problem.is_missing and not exclude_missing:
                    return None
                # Bytes can be damaged on the way, too: a second read decides.
                if suspect != problem.rank and not problem.is_missing:
                    suspect = problem.rank
                    continue
                log.warning(
                    "round %d: rank %d is not in mean %s: %s",
                    *(manifest.round, problem.rank, name, problem),
                )
                excluded.add(problem.rank)
        self._made[name] = made
        key = objects.mean_key(manifest.round, name)
        head = objects.encode(MeanHeader(manifest.digest, *made.outcome))
        encoded = made.cells if made.cells is not None else self._cells_in_row(manifest, name)
        table = wire.pack_table(_mean_place(key, head), encoded)
        pieces = [_LENGTH.pack(len(head)), head, table, *encoded]
        # Its name is synced before the next manifest: uploads, which it follows from, stay longer.
        made.is_stored = self.store.create(self.key(key), pieces, is_name_durable=False)
        if not made.is_stored:
            made.cells = None  # what is stored counts, and is read
        return True

    def _cells_in_row(self, manifest: Manifest, name: str) -> list[Buffer]:
        fragment = self.fragment(manifest.round)
        numbers = self._cells_of(manifest, name)
        return [wire.bytes_of(fragment.row[fragment.share.slices[cell]]) for cell in numbers]

    def _cells_of(self, manifest: Manifest, name: str) -> range:
        shard = objects.shard_of(name)
        return manifest.span(shard, objects.part_of(name), manifest.parts_of(shard))

    def _carried(self, manifest: Manifest, name: str) -> range:
        """The cells of a mean that this process carries, or of which it carries a part."""
        ours = self.share(manifest).cells_of(objects.shard_of(name))
        return overlap(ours, self._cells_of(manifest, name))

    def codecs(self, manifest: Manifest) -> tuple[Codec, Codec]:
        """Those of a round: a run may go on with others."""
        if (manifest.codec, manifest.mean_codec) == (self.codec.name, self.mean_codec.name):
            return self.codec, self.mean_codec
        return get_codec(manifest.codec), get_codec(manifest.mean_codec)

    def _sum_mean(self, manifest: Manifest, name: str, excluded: set[int]) -> _Made:
        """The mean of a shard, as it will be stored. Raises BadInput."""
        fragment, numbers = self.fragment(manifest.round), self._cells_of(manifest, name)
        share, (codec, mean_codec) = self.share(manifest), self.codecs(manifest)
        members = [m for m in manifest.members if m.weight and m.rank not in excluded]
        made = _Made(Outcome(self.nonce, tuple(sorted(excluded))))
        carried = self._carried(manifest, name)
        me = manifest.member(self.rank)
        is_own = me in members and me.upload in fragment.uploads
        # Once it is stored the row has done its work there, unless a stand-in excluded this rank.
        is_in_row = is_own and is_plain(mean_codec) and codec.is_exact and carried == numbers
        encoded: list[Buffer] = []
        mean = WeightedMean([member.weight for member in members])
        with closing(MemberInputs(self, manifest, name, members, numbers)) as inputs:
            if is_in_row:
                fragment.overwritten.add(name)
            for cell in numbers:
                size = share.cut.sizes[cell]
                if is_in_row:
                    mean.write(inputs.read(cell), fragment.row[share.slices[cell]])
                    continue
                out = np.empty(size, np.float32)
                mean.write(inputs.read(cell), out)
                encoded.append(encode_cell(mean_codec, out))
                if is_own and cell in carried and not mean_codec.is_exact:
                    stored = mean_codec.decode(memoryview(encoded[-1]), size)
                    with np.errstate(invalid="ignore", over="ignore"):
                        np.subtract(out, stored, out=out)
                    zero_infinite(out)
                    made.rounding[cell] = out
        made.cells = None if is_in_row else encoded
        return made

    def own_cell(self, fragment: Fragment, cell: int) -> Vector:
        """What the upload holds of a carried cell, from memory."""
        part = fragment.row[fragment.share.slices[cell]]
        if self.codec.is_exact:
            return part
        return self.codec.decode(memoryview(fragment.sent[cell]), part.size)

    # -- Outer step -------------------------------------------------------------------------------

    def apply_means(self, manifest: Manifest, names: Sequence[str]) -> dict[str, Outcome | None]:
        """Take the outer step with these means as far as this process carries them.

        What it carries nothing of is not in the answer.
        """
        fragment = self.fragment(manifest.round)
        wanted = [name for name in names if self._carried(manifest, name)]

        def apply(name: str) -> Outcome | None:
            return self._apply_mean(manifest, fragment, name)

        # Files are read by this thread alone: others would mostly wait for each other.
        lanes = 1 if self.store.is_folder or len(wanted) < 2 else None
        return dict(zip(wanted, each(self.pool, apply, wanted, lanes), strict=True))

    def _apply_mean(self, manifest: Manifest, fragment: Fragment, name: str) -> Outcome | None:
        applied = self._applied.get(name)
        if applied is not None and applied.count == len(self._carried(manifest, name)):
            return applied.outcome
        made = self._made.get(name)
        try:
            if made is not None and made.is_stored:
                return self._apply_own(manifest, fragment, name, made)
            return self._apply_stored(manifest, fragment, name)
        except NotFound:
            return None
        except Damaged as problem:
            log.warning("%s is damaged: %s", objects.mean_key(manifest.round, name), problem)
            return None

    def _apply_own(self, manifest: Manifest, fragment: Fragment, name: str, made: _Made) -> Outcome:
        """A mean that is stored as it lies in memory need not be read."""
        numbers, encoded = self._cells_of(manifest, name), made.cells
        _, codec = self.codecs(manifest)

        def read(cell: int, out: Vector) -> Vector:
            if encoded is None:
                return fragment.row[fragment.share.slices[cell]]
            return codec.decode(memoryview(encoded[numbers.index(cell)]), out.size)

        return self._step_cells(manifest, fragment, name, made.outcome, read)

    def _apply_stored(self, manifest: Manifest, fragment: Fragment, name: str) -> Outcome | None:
        key = objects.mean_key(manifest.round, name)
        numbers, carried = self._cells_of(manifest, name), self._carried(manifest, name)
        cut, (_, codec) = self.share(manifest).cut, self.codecs(manifest)
        is_all = carried == numbers and fragment.outer.is_wanted
        limit = 256 + 8 * len(manifest.members)  # of a header, with all members excluded
        end = None if is_all else _LENGTH.size + limit + wire.table_size(len(numbers))
        reader = self.store.reader(self.key(key), 0, end)
        try:
            head, body = _read_mean_head(key, reader, limit)
            if head.manifest != manifest.digest:
                return FOREIGN
            outcome = Outcome(head.made_by, head.excluded)
            applied = self._applied.get(name)
            if not fragment.outer.is_wanted:
                return outcome
            if applied is not None and applied.outcome != outcome:
                return FOREIGN  # swept and made again since its first cells were applied
            first = numbers.index(carried.start)
            cells = CellReader(
                *(self.store, self.key(key), _mean_place(key, body)),
                *(len(numbers), slice(first, first + len(carried))),
                start=_LENGTH.size + len(body),
                reader=reader,
            )
            cells.open()
            self._restore(manifest, fragment, name, outcome)
            done = 0 if applied is None else applied.count

            def read(cell: int, out: Vector) -> Vector:
                cells.read(codec, out)
                return out

            try:
                for cell in carried[:done]:  # applied by a call that failed; its bytes are passed
                    read(cell, np.empty(cut.sizes[cell], np.float32))
                return self._step_cells(manifest, fragment, name, outcome, read)
            finally:
                cells.close()
        finally:
            reader.close()

    def _step_cells(
        self,
        manifest: Manifest,
        fragment: Fragment,
        name: str,
        outcome: Outcome,
        read: Callable[[int, Vector], Vector],
    ) -> Outcome:
        """Step each carried cell once, however often a call fails in between."""
        share, carried = self.share(manifest), self._carried(manifest, name)
        applied = self._applied.setdefault(name, _Applied(outcome))
        buffer = np.empty(max(share.cut.sizes[cell] for cell in carried), np.float32)
        for cell in carried[applied.count :]:
            room = _find_room(fragment, share, cell, buffer)
            at = share.slices[cell].start
            fragment.outer.step(manifest.round, at, read(cell, room)[share.parts[cell]])
            applied.count += 1
        return outcome

    def _restore(self, manifest: Manifest, fragment: Fragment, name: str, outcome: Outcome) -> None:
        """Read back what was sent, where the own mean lies in its place but another was stored."""
        if name not in fragment.overwritten:
            return
        me = manifest.member(self.rank)
        assert me is not None
        numbers = self._carried(manifest, name)
        if self.rank in outcome.excluded:
            try:
                with closing(MemberInputs(self, manifest, name, [me], numbers)) as inputs:
                    for cell in numbers:
                        fragment.row[fragment.share.slices[cell]] = next(inputs.read(cell))
            except BadInput as problem:
                log.warning("rank %d lost what it sent to mean %s: %s", self.rank, name, problem)
                for cell in numbers:
                    fragment.row[fragment.share.slices[cell]] = 0
        fragment.overwritten.discard(name)

    # -- Direct rounds ----------------------------------------------------------------------------

    def read_upload(self, manifest: Manifest, name: str) -> bool | None:
        """Whether this process can read its cells of a member's upload; None: it is not there.

        Where all members but this one are read, the outer step is taken on the way.
        """
        fragment, rank = self.fragment(manifest.round), int(name)
        member = manifest.member(rank)
        me = manifest.member(self.rank)
        assert member is not None
        direct = self._direct
        is_read = direct is not None and direct.count == len(self.share(manifest).cells)
        if is_read and rank != self.rank and direct is not None and rank in direct.ranks:
            return True  # stepped with every cell of it, in this very round
        counted = [m for m in manifest.members if m.weight]
        others = [m.rank for m in counted if m.rank != self.rank]
        is_step = (
            self._direct is None
            and others == [rank]
            and me is not None
            and me.upload in fragment.uploads
        )
        try:
            if is_step:
                self._direct = _Direct(frozenset(m.rank for m in counted))
                self._step_direct(manifest, fragment, counted, self._direct)
            else:
                self._check_upload(manifest, member)
            return True
        except BadInput as problem:
            return None if problem.is_missing else False

    def apply_direct(
        self, manifest: Manifest, receipts: Mapping[str, Outcome]
    ) -> dict[str, Outcome | None]:
        """Take the outer step of a direct round, once all receipts are there."""
        fragment = self.fragment(manifest.round)
        if not fragment.outer.is_wanted:
            return dict(receipts)
        bad = {rank for outcome in receipts.values() for rank in outcome.excluded}
        counted = [m for m in manifest.members if m.weight and m.rank not in bad]
        ranks = frozenset(member.rank for member in counted)
        if self._direct is None or not self._direct.count:
            self._direct = _Direct(ranks)
        elif self._direct.ranks != ranks:
            return dict.fromkeys(receipts, FOREIGN)
        try:
            self._step_direct(manifest, fragment, counted, self._direct)
        except BadInput as problem:
            log.warning("round %d: rank %d: %s", manifest.round, problem.rank, problem)
            return dict.fromkeys(receipts, FOREIGN)
        return dict(receipts)

    def _step_direct(
        self, manifest: Manifest, fragment: Fragment, members: list[Member], direct: _Direct
    ) -> None:
        share = self.share(manifest)
        if not members or direct.count == len(share.cells):
            return
        mean = WeightedMean([member.weight for member in members])
        buffer = np.empty(max(share.cut.sizes[cell] for cell in share.cells), np.float32)
        done = direct.count
        for shard in range(share.cut.shards):
            numbers = share.cells_of(shard)
            first = min(done, len(numbers))
            done -= first
            if first == len(numbers):
                continue
            with closing(MemberInputs(self, manifest, "", members, numbers[first:])) as inputs:
                for cell in numbers[first:]:
                    at = share.slices[cell].start
                    out = _find_room(fragment, share, cell, buffer)
                    mean.write(inputs.read(cell), out)
                    fragment.outer.step(manifest.round, at, out[share.parts[cell]])
                    direct.count += 1

    def _check_upload(self, manifest: Manifest, member: Member) -> None:
        """Read all cells that this process carries. Raises BadInput."""
        share = self.share(manifest)
        for shard in range(share.cut.shards):
            numbers = share.cells_of(shard)
            with closing(
                MemberInputs(self, manifest, "", [member], numbers, is_memory=False)
            ) as inputs:
                for cell in numbers:
                    for _ in inputs.read(cell):
                        pass


@dataclass
class _Direct:
    """How far the outer step of a direct round has gone, shard by shard, and of whose uploads."""

    ranks: frozenset[int]
    count: int = 0


def each(
    pool: Executor, work: Callable[[S], T], items: Iterable[S], lanes: int | None = None
) -> list[T]:
    """As `pool.map`; but when one fails, all have ended before its error is raised.

    One that went on would still write into memory that its caller, or the next attempt, uses.
    `lanes`: so many at a time, one of them on the caller's thread; None: as the pool has threads.
    """
    todo = list(items)
    count = len(todo) if lanes is None else min(lanes, len(todo))
    if count < 2:
        return [work(item) for item in todo]
    results: dict[int, T] = {}

    def run(lane: int) -> None:
        for index in range(lane, len(todo), count):
            results[index] = work(todo[index])

    others = [pool.submit(run, lane) for lane in range(1, count)]
    try:
        run(0)
        for other in others:
            other.result()
    finally:
        for other in others:
            other.cancel()
        wait(others)
    return [results[index] for index in range(len(todo))]


def _find_room(fragment: Fragment, share: Share, cell: int, buffer: Vector) -> Vector:
    """Memory for the mean of a cell: where it is to be, if all of it is; else `buffer`."""
    size, carried = share.cut.sizes[cell], share.slices[cell]
    room = None
    if carried.stop - carried.start == size:
        room = fragment.outer.room(carried.start, size)
    return buffer[:size] if room is None else room


def _mean_place(key: str, head: bytes) -> bytes:
    """Of a mean's table: it belongs to its header, too, which has no checksum of its own."""
    return wire.place_of(key, head.decode("latin-1"))


def _with_sections(header: UploadHeader, found: Sequence[UploadSections]) -> UploadHeader:
    """The header with the lengths of all sections, by process; none if the layout tells them."""

    def of(sections: list[tuple[int, ...]]) -> objects.Sections:
        return tuple(sections) if any(sections) else ()

    rest = tuple(
        msgspec.structs.replace(each, sections=of([rests[ahead] for _, rests in found]))
        for ahead, each in enumerate(header.rest)
    )
    sections = of([sections for sections, _ in found])
    return msgspec.structs.replace(header, sections=sections, rest=rest)


def pack_header(header: UploadHeader) -> bytes:
    """The header with its length behind it, so that a reader can find it from the end."""
    body = objects.encode(header)
    return body + _TRAILER.pack(len(body), zlib.crc32(body))


def read_tail(store: ObjectStore, key: str, size: int, guess: int) -> bytes | None:
    """The bytes of the header at the end of an upload of `size` bytes; None: there is none."""
    try:
        tail = store.find(key, max(0, size - guess), size)
        if tail is None or tail.nbytes < _TRAILER.size:
            return None
        length, check = _TRAILER.unpack(tail[-_TRAILER.size :])
        whole = length + _TRAILER.size
        if length > MAX_HEADER_BYTES or whole > size:
            return None
        if whole > tail.nbytes:
            tail = store.get(key, size - whole, size)
        body = bytes(tail[len(tail) - whole : -_TRAILER.size])
        return body if zlib.crc32(body) == check else None
    except NotFound:
        return None


def _read_mean_head(key: str, reader: RangeReader, limit: int) -> tuple[MeanHeader, bytes]:
    """The header of a mean, and its bytes. Raises Damaged."""
    count = memoryview(bytearray(_LENGTH.size))
    if reader.fill(count) != count.nbytes:
        raise Damaged("it is too short")
    (length,) = _LENGTH.unpack(count)
    if length > limit:
        raise Damaged(f"a header of {length} bytes")
    head = memoryview(bytearray(length))
    body = bytes(head[: reader.fill(head)])
    try:
        return objects.read_mean_header(key, body), body
    except objects.DamagedObject as problem:
        raise Damaged(str(problem)) from problem
