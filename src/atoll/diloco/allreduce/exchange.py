"""One attempt, once its manifest is known: compute the shards this rank owns, fetch the others.

An attempt is complete when every place holds a mean. It can never be completed once one of them
holds the note that it was given up; keys are created once, so all replicas see the same. A shard
has a place for each process of its owner. One process reads only what it carries, so a replica
knows that an attempt is complete when all of its processes have what they need.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import islice
from typing import NamedTuple, NoReturn

import msgspec
import numpy as np

from atoll.core.errors import DistributedError, NotFound
from atoll.diloco.allreduce import wire
from atoll.diloco.allreduce.feedback import Feedback, add_residual, set_left_out
from atoll.diloco.allreduce.keys import Keys, parse_round
from atoll.diloco.allreduce.manifest import Manifest, blamed_uploads
from atoll.diloco.allreduce.pace import History
from atoll.diloco.allreduce.sections import Sections, WeightedMean
from atoll.diloco.allreduce.settle import Me
from atoll.diloco.allreduce.share import Cells, Share, carried
from atoll.diloco.allreduce.team import Team, together
from atoll.diloco.allreduce.upload import (
    CellReader,
    DamagedUpload,
    Payload,
    encode_cell,
    seal_plain,
)
from atoll.diloco.codecs import Codec
from atoll.diloco.packing import Vector
from atoll.diloco.pool import CORES, each
from atoll.objectstore import ObjectStore

log = logging.getLogger("atoll.allreduce")

WINDOW = 8  # requests in flight


class Abandoned(Exception):
    """The attempt was given up; the next one must do without `blame.uploads`."""

    def __init__(self, damage: wire.Damage) -> None:
        super().__init__(damage.reason)
        self.damage = damage


class Behind(Exception):
    """The others have gone on to later rounds and this one cannot be read any more."""

    def __init__(self, latest: int, manifest: Manifest) -> None:
        super().__init__(f"the run is at round {latest}")
        self.latest = latest
        self.manifest = manifest


class MeanLocation(NamedTuple):
    """Where the mean of some cells of a shard belongs: those that one process of its owner has."""

    shard: int
    process: int


class Exchange:
    """One attempt of one round, as one process of a replica takes part in it."""

    def __init__(
        self,
        blobs: ObjectStore,
        keys: Keys,
        me: Me,
        history: History,
        pool: Executor,
        manifest: Manifest,
        share: Share,
        codec: Codec,
        down: Codec,
    ) -> None:
        self.blobs = blobs
        self.keys = keys
        self.me = me
        self.history = history
        self.pool = pool
        self.manifest = manifest
        self.share = share
        self.layout = share.layout
        self.codec = codec
        self.down = down
        self.seconds: dict[str, float] = {}
        self._digest = manifest.digest
        self._started = time.monotonic()
        self._damaged: dict[MeanLocation, str] = {}
        self._processes = {m.rank: m.processes for m in manifest.members}
        self._wanted: dict[tuple[int, int], Cells] = {}
        self._stored: dict[MeanLocation, list[wire.Buffer]] | None = None
        self._spare: list[Vector] = []  # memory that nothing is in yet

    def run(self, upload: str, payload: Payload, feedback: Feedback, out: Vector | None) -> None:
        """`out` holds the manifest's mean, as far as this process carries it.

        It may be the row of the cargo if its codec is exact. None: the mean stays encoded, until
        `visit`.

        Raises Abandoned, Behind, or DistributedError after the timeout. Then `out` may hold a part
        of the mean.
        """
        self._stored = {} if out is None else None
        owners = self.manifest.owners if self.manifest.has(upload) else []
        mine = [shard for shard, owner in enumerate(owners) if owner == self.me.rank]
        # What others make of the mean comes last: until then, what they bring is read there. The
        # values of an exact cargo that are in the way are in its upload, and can be brought again.
        if out is None:
            out = np.empty(0, np.float32)
        else:
            others = [s for s in range(self.layout.shards) if s not in mine]
            self._spare = [out[slice(*self.share.bounds(shard))] for shard in others]
        for shard in mine:
            if not self.share.process or self.share.section_size(shard):
                self._reduce(shard, payload, out, feedback)
        reduce_end = time.monotonic()
        self.seconds["reduce"] = reduce_end - self._started
        # Each rank begins with its neighbour, so that not all ask for the same object at once.
        count = self.layout.shards
        remainder = [s % count for s in range(self.me.rank + 1, self.me.rank + count + 1)]
        self._gather([p for s in remainder if s not in mine for p in self._locations(s)], out)
        self.seconds["gather"] = time.monotonic() - reduce_end

    def visit(self, take: Callable[[int, Vector], None]) -> None:
        """`take` gets the mean that a run has held, cell by cell, with its place in the row."""
        assert self._stored is not None

        def decode(item: tuple[MeanLocation, list[wire.Buffer]]) -> None:
            location, cells = item
            at = self.share.bounds(location.shard)[0]
            wanted = self._overlap(*location)
            if wanted.length:
                at += self.share.within(location.shard, wanted)[0]
            for cell, size in zip(cells, self._sizes(location), strict=True):
                take(at, self.down.decode(memoryview(cell), size))
                at += size

        each(self.pool, decode, self._stored.items(), CORES)
        self._stored = None

    def read_all(self, out: Vector) -> bool:
        """Whether every place is there; then `out` holds the mean. Raises Abandoned."""
        return not self._fetch(self._all_places(), out)

    def has(self, shard: int) -> bool:
        """Whether the owner of the shard has put its mean in the store, or begun to."""
        try:
            return self._read(MeanLocation(shard, 0), np.empty(self.share.size, np.float32))
        except Abandoned:
            return False

    def abandon_missing(self, out: Vector) -> None:
        """End the attempt whose owners are gone. Raises Abandoned if that was possible."""
        missing = self._fetch(self._all_places(), out)
        late = self._owners(missing)
        if missing:
            uploads = blamed_uploads(self.manifest, late)
            self._abandon(missing[0], uploads, f"nothing from ranks {late}")

    def _all_places(self) -> list[MeanLocation]:
        return [
            location for shard in range(self.layout.shards) for location in self._locations(shard)
        ]

    def _locations(self, shard: int) -> list[MeanLocation]:
        """The places of the shard that hold something this process carries.

        The first place of a shard is there even if it holds no cell, and is read by process 0.
        """
        count = self._processes[self.manifest.owners[shard]]
        return [
            MeanLocation(shard, process)
            for process in range(count)
            if self._overlap(shard, process).length or process == self.share.process == 0
        ]

    def _overlap(self, shard: int, process: int) -> Cells:
        """The cells in a place of the shard that this process carries."""
        known = self._wanted.get((shard, process))
        if known is None:
            count = self._processes[self.manifest.owners[shard]]
            wanted = self.share.cells.overlap(carried(self.layout, process, count))
            # A cell of a small shard may hold no value.
            start, stop = self.share.within(shard, wanted) if wanted.length else (0, 0)
            known = self._wanted[shard, process] = wanted if stop > start else Cells(0, 0)
        return known

    def _owners(self, locations: Sequence[MeanLocation]) -> list[int]:
        return sorted({self.manifest.owners[location.shard] for location in locations})

    def _sizes(self, location: MeanLocation) -> list[int]:
        """How many values each wanted cell of a place has."""
        wanted, first = self._overlap(*location), self.share.cells.start
        return self.share.cell_sizes(location.shard)[wanted.start - first : wanted.stop - first]

    def _part(self, location: MeanLocation, out: Vector) -> Vector:
        """Where in `out` the wanted cells of a place belong."""
        wanted = self._overlap(*location)
        if not wanted.length:
            return out[:0]
        first = self.share.bounds(location.shard)[0]
        start, end = self.share.within(location.shard, wanted)
        return out[first + start : first + end]

    def _reduce(self, shard: int, payload: Payload, out: Vector, feedback: Feedback) -> None:
        """The mean of an own shard is in the store, and in `out` or held."""
        location, size = MeanLocation(shard, self.share.process), self.share.section_size(shard)
        mean, entry = out[slice(*self.share.bounds(shard))], feedback.entry
        weighted = WeightedMean([m.weight for m in self.manifest.members])
        lacking = feedback.lacking(shard, size)
        residual = None
        if entry is not None and not self.down.is_exact:
            residual = entry.shards[shard] = np.empty(size, np.float32)
        # Where nothing is lost, the mean is made in its place and sent from there.
        is_plain = self.down.name == "fp32" and self._stored is None
        cells: list[wire.Buffer] = []
        sections = self._sections(shard, payload)
        try:
            for run, parts in sections.parts():
                at = slice(*self.share.within(shard, run))
                residuals = mean[at] if is_plain else np.empty(at.stop - at.start, np.float32)
                weighted.write(parts, residuals)
                if lacking is not None:
                    add_residual(residuals, lacking[at])
                if not is_plain:
                    remainder = None if residual is None else residual[at]
                    cells += self._encode(shard, run, residuals, mean[at], remainder)
        except DamagedUpload as problem:
            self._refuse(location, problem)
        finally:
            sections.close()
        if self._stored is not None:
            self._stored[location] = cells
        fence = self._fence(location)
        if is_plain:
            sizes = self.share.cell_sizes(shard)
            self._publish(location, seal_plain(wire.SHARD, fence, mean, sizes))
        else:
            self._publish(location, [wire.seal_table(wire.SHARD, fence, cells), *cells])

    def _sections(self, shard: int, payload: Payload) -> Sections:
        """What the members bring to the shard."""
        rooms = partial(self._rooms, payload)
        members, own = self.manifest.members, partial(payload.as_sent, shard)
        stored = (self.blobs, self.pool, self.codec, self.share)
        return Sections(*stored, shard, members, self.me.rank, own, rooms)

    def _rooms(self, payload: Payload, count: int, size: int) -> list[Vector]:
        """So many rows of memory for what others bring."""
        cuts = (
            part[start : start + size]
            for part in self._spare
            for start in range(0, part.size - size + 1, max(size, 1))
        )
        rows = list(islice(cuts, count))
        return rows if len(rows) == count else payload.rooms(count, size)

    def _encode(
        self, shard: int, run: Cells, residuals: Vector, mean: Vector, residual: Vector | None
    ) -> list[wire.Buffer]:
        """The cells of a run as bytes; `mean` gets what they hold, `residual` what they lack."""
        first = self.share.cells.start
        cells, at = [], 0
        for size in self.share.cell_sizes(shard)[run.start - first : run.stop - first]:
            part = slice(at, at + size)
            at += size
            cells.append(encode_cell(self.down, residuals[part]))
            if self._stored is None or residual is not None:
                values = self.down.decode(memoryview(cells[-1]), size)
                if residual is not None:
                    set_left_out(residual[part], residuals[part], values)
                if self._stored is None:
                    mean[part] = values
        return cells

    def _publish(self, location: MeanLocation, data: list[wire.Buffer]) -> None:
        key = self._key(location)
        if self.blobs.create(key, data):
            return
        # The key is taken: by the note that this attempt is over, by an earlier try of this request
        # whose answer got lost, or by damaged bytes. Those may be replaced, as only the owner of
        # a place writes its mean.
        if not self._read(location, np.empty(self.share.size, np.float32), is_look=True):
            self.blobs.put(key, data)

    def refuse(self, upload: str, reason: str) -> wire.Damage:
        """Give the attempt up for a reason that the own upload is blamed with."""
        try:
            self._refuse(MeanLocation(self.me.rank, 0), DamagedUpload(upload, reason))
        except Abandoned as news:
            return news.damage

    def _refuse(self, location: MeanLocation, problem: DamagedUpload) -> NoReturn:
        """Raises Abandoned, with a note in the place that a bad upload spoils."""
        self._abandon(location, [problem.upload], problem.reason)
        # The place holds damaged bytes: only this process, its owner, could have put a mean there.
        damage = wire.Damage([problem.upload], self.me.rank, problem.reason)
        self.blobs.put(self._key(location), self._note(location, damage))
        raise Abandoned(damage)

    def _gather(self, locations: list[MeanLocation], mean: Vector) -> None:
        pending = self._slowest_first(locations)
        started = progress = time.monotonic()
        grace = self.history.owner_grace(started - self._started)
        usual = self.history.usual(f"shards {self.layout.name}")
        # Waits count from the manifest: who took longer for the own shards waits less for others.
        lead_s = 0.0 if self.blobs.is_folder else started - self._started
        window, waited_s, due_s, is_waiting = 1, lead_s, lead_s, True
        if pending and usual > lead_s:
            due_s = lead_s + self.history.pause_s(lead_s, usual, is_cheap=self.blobs.is_folder)
            time.sleep(due_s - lead_s)
        while pending:
            missing = self._fetch(pending[:window], mean)
            if not missing:
                if is_waiting:  # when it was due: a thread that woke up late must not wait longer
                    waited_s, is_waiting = due_s, False
                pending = pending[window:]
                window = min(2 * window, WINDOW)
                continue
            now = time.monotonic()
            waited_s, is_waiting = lead_s + now - started, True
            if len(missing) < min(window, len(pending)):
                progress = now
            # From now on only the first missing place is asked for: each one costs a request.
            pending = missing + pending[window:]
            window = 1
            self.history.slowest_owner = self.manifest.owners[pending[0].shard]
            if now - max(progress, started) > self.me.timeout:
                raise self._stuck(pending)
            if now - progress > grace:
                pending = self._give_up_on(pending, mean)
                grace *= 2
            pause_s = self.history.pause_s(waited_s, usual, is_cheap=self.blobs.is_folder)
            due_s = waited_s + pause_s
            time.sleep(pause_s)
        self.history.note_wait(f"shards {self.layout.name}", waited_s)
        self.history.note_reduce(time.monotonic() - self._started)

    def _slowest_first(self, locations: list[MeanLocation]) -> list[MeanLocation]:
        """The owner that was last in the round before comes first.

        Once its shard is there, the others usually are too, so few requests are made in vain.
        """
        owners = self.manifest.owners
        return sorted(locations, key=lambda p: owners[p.shard] != self.history.slowest_owner)

    def _fetch(self, locations: list[MeanLocation], out: Vector) -> list[MeanLocation]:
        """Read the places into `out`; returns those that hold nothing yet.

        Nothing is written to `out` any more when it ends, whichever way: the next attempt, or the
        caller, has that memory then.
        """
        # Files are read by this thread alone: others would mostly wait for each other.
        lanes = 1 if self.blobs.is_folder else None
        there = each(self.pool, lambda location: self._read(location, out), locations, lanes)
        return [
            location for location, is_there in zip(locations, there, strict=True) if not is_there
        ]

    def _read(self, location: MeanLocation, out: Vector, *, is_look: bool = False) -> bool:
        """Whether the place has a mean that can be trusted; what is wanted of it is in `out`.

        If not, there may be anything instead. `is_look`: nothing is held. Raises Abandoned.
        """
        key, fence = self._key(location), self._fence(location)
        owner = self.manifest.owners[location.shard]
        theirs = Share(self.layout, location.process, self._processes[owner])
        wanted = self._overlap(*location)
        if not wanted.length:
            wanted = Cells(theirs.cells.start, theirs.cells.start)
        try:
            if not self.layout.cells:
                return self._read_plain(location, out)
            span = (0, None)
            with CellReader(self.blobs, key, span, wire.SHARD, fence, theirs, wanted) as reader:
                self._raise_note(key, fence, reader.head)
                sizes = self._sizes(location)
                if self._stored is not None and not is_look:
                    cells = [reader.take(size) for size in sizes]
                    reader.end()
                    self._stored[location] = cells
                else:
                    reader.decode(self.down, sizes, self._part(location, out))
                    reader.end()
            return True
        except NotFound:
            return False
        except ValueError as error:
            self._damaged[location] = str(error)
            return False

    def _raise_note(self, key: str, fence: bytes, head: memoryview) -> None:
        """Raises Abandoned if the object is a note and no mean."""
        if wire.kind_of(head) == wire.ABANDONED:
            body = wire.unseal(wire.ABANDONED, fence, self.blobs.get(key))
            raise Abandoned(wire.BLAME.decode(body))

    def _read_plain(self, location: MeanLocation, out: Vector) -> bool:
        """As `_read`, for a shard in the format without cells."""
        fence, data = self._fence(location), self.blobs.get(self._key(location))
        self._raise_note(self._key(location), fence, data)
        size = self.layout.shard_size(location.shard)
        values = self.down.decode(wire.unseal(wire.SHARD, fence, data), size)
        out[slice(*self.share.bounds(location.shard))] = values
        return True

    def _give_up_on(self, pending: list[MeanLocation], mean: Vector) -> list[MeanLocation]:
        """End the attempt, as places are overdue, unless they came after all.

        Returns those still missing. Raises Abandoned, or Behind if the others are further already.
        """
        pending = self._fetch(pending, mean)
        if not pending:
            return []
        later = self.blobs.list(
            self.keys.manifests(), self.keys.manifest(self.manifest.round, 9999)
        )
        if later:
            pending = self._fetch(pending, mean)
            if pending:
                latest = max(parse_round(blob.key) or 0 for blob in later)
                raise Behind(latest, self.manifest)
            return []
        late = self._owners(pending)
        self._abandon(pending[0], blamed_uploads(self.manifest, late), f"nothing from ranks {late}")
        return pending

    def _abandon(self, location: MeanLocation, uploads: list[str], reason: str) -> None:
        """Raises Abandoned, unless the place already holds a mean (or damaged bytes)."""
        damage = wire.Damage(uploads, self.me.rank, reason)
        if self.blobs.create(self._key(location), self._note(location, damage)):
            log.warning("round %d: attempt %d given up: %s", *self._where(), reason)
            raise Abandoned(damage)
        self._read(location, np.empty(self.share.size, np.float32), is_look=True)

    def _note(self, location: MeanLocation, damage: wire.Damage) -> bytes:
        return wire.seal(wire.ABANDONED, self._fence(location), msgspec.json.encode(damage))

    def _where(self) -> tuple[int, int]:
        return self.manifest.round, self.manifest.attempt

    def _key(self, location: MeanLocation) -> str:
        return self.keys.shard(*self._where(), *location)

    def _fence(self, location: MeanLocation) -> bytes:
        part = f".{location.process}" if location.process else ""
        return wire.fence(self._digest, f"{location.shard}{part}")

    def _stuck(self, pending: list[MeanLocation]) -> DistributedError:
        damaged = "".join(
            f"; {self._key(p)}: {why}" for p, why in self._damaged.items() if p in pending
        )
        return DistributedError(
            f"round {self.manifest.round}: no shards from ranks {self._owners(pending)} "
            f"within {self.me.timeout:g} s{damaged}"
        )


def run_as_one(team: Team, manifest: Manifest, run: Callable[[], None]) -> None:
    """Returns once all processes of the replica have their means.

    A process sees only its share of the places. So what one of them met counts for all: they go to
    the next attempt, or catch up, together.
    """
    if team.processes == 1:
        run()
        return

    def is_reported() -> wire.Damage | int | None:
        try:
            run()
        except Abandoned as news:
            return news.damage
        except Behind as news:
            return news.latest
        return None

    messages = together(team, is_reported)
    # A note makes the attempt void; being behind is only a reason to catch up.
    for message in sorted(messages, key=lambda message: not isinstance(message, wire.Damage)):
        if isinstance(message, wire.Damage):
            raise Abandoned(message)
        if message is not None:
            raise Behind(message, manifest)
