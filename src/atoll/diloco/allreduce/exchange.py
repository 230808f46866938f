"""One attempt, once its roster is known: compute the shards this rank owns, fetch the others.

An attempt is complete when every place holds a mean. It can never be completed once one of them
holds the note that it was given up; keys are created once, so all replicas see the same. A shard
has a place for each process of its owner. One process reads only what it carries, so a replica
knows that an attempt is complete when all of its processes have what they need.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import NamedTuple, NoReturn

import msgspec
import numpy as np

from atoll.core.errors import DistributedError, NotFound
from atoll.diloco.allreduce import wire
from atoll.diloco.allreduce.codecs import Codec
from atoll.diloco.allreduce.feedback import Feedback, left_out
from atoll.diloco.allreduce.keys import Keys, parse_round
from atoll.diloco.allreduce.layout import Vector
from atoll.diloco.allreduce.pace import History, poll_pause
from atoll.diloco.allreduce.roster import Roster, blamed_uploads
from atoll.diloco.allreduce.settle import Me
from atoll.diloco.allreduce.share import Cells, Share, carried
from atoll.diloco.allreduce.upload import (
    Blamed,
    Cargo,
    decode_cells,
    encode_cells,
    read_cells,
    read_section,
)
from atoll.diloco.blobs import Blobs

log = logging.getLogger("atoll.allreduce")

WINDOW = 8  # requests in flight


class Abandoned(Exception):
    """The attempt was given up; the next one must do without `blame.uploads`."""

    def __init__(self, blame: wire.Blame) -> None:
        super().__init__(blame.reason)
        self.blame = blame


class Behind(Exception):
    """The others have gone on to later rounds and this one cannot be read any more."""

    def __init__(self, latest: int, roster: Roster) -> None:
        super().__init__(f"the run is at round {latest}")
        self.latest = latest
        self.roster = roster


class MeanPlace(NamedTuple):
    """Where the mean of some cells of a shard belongs: those that one process of its owner has."""

    shard: int
    process: int


class Exchange:
    """One attempt of one round, as one process of a replica takes part in it."""

    def __init__(
        self,
        blobs: Blobs,
        keys: Keys,
        me: Me,
        history: History,
        pool: Executor,
        roster: Roster,
        share: Share,
        codec: Codec,
        down: Codec,
    ) -> None:
        self.blobs = blobs
        self.keys = keys
        self.me = me
        self.history = history
        self.pool = pool
        self.roster = roster
        self.share = share
        self.layout = share.layout
        self.codec = codec
        self.down = down
        self.seconds: dict[str, float] = {}
        self._digest = roster.digest
        self._started = time.monotonic()
        self._damaged: dict[MeanPlace, str] = {}
        self._processes = {m.rank: m.processes for m in roster.members}

    def run(self, upload: str, cargo: Cargo, feedback: Feedback) -> Vector:
        """The roster's mean, as far as this process carries it.

        Raises Abandoned, Behind, or DistributedError after the timeout.
        """
        mean = np.empty(self.share.size, np.float32)
        is_member = self.roster.has(upload)
        mine = [
            shard
            for shard, owner in enumerate(self.roster.owners)
            if is_member and owner == self.me.rank
        ]
        self._reduce(mine, cargo, mean, feedback)
        reduce_end = time.monotonic()
        self.seconds["reduce"] = reduce_end - self._started
        # Each rank begins with its neighbour, so that not all ask for the same object at once.
        count = self.layout.shards
        rest = [s % count for s in range(self.me.rank + 1, self.me.rank + count + 1)]
        self._gather([p for s in rest if s not in mine for p in self._places(s)], mean)
        self.seconds["gather"] = time.monotonic() - reduce_end
        return mean

    def read_all(self) -> Vector | None:
        """The mean if every place is there, else None. Raises Abandoned."""
        mean = np.empty(self.share.size, np.float32)
        missing = self._fetch(self._all_places(), mean)
        return None if missing else mean

    def has(self, shard: int) -> bool:
        """Whether the owner of the shard has put its mean in the store, or begun to."""
        try:
            return self._read(MeanPlace(shard, 0)) is not None
        except Abandoned:
            return False

    def abandon_missing(self) -> None:
        """End the attempt whose owners are gone. Raises Abandoned if that was possible."""
        mean = np.empty(self.share.size, np.float32)
        missing = self._fetch(self._all_places(), mean)
        late = self._owners(missing)
        if missing:
            uploads = blamed_uploads(self.roster, late)
            self._abandon(missing[0], uploads, f"nothing from ranks {late}")

    def _all_places(self) -> list[MeanPlace]:
        return [place for shard in range(self.layout.shards) for place in self._places(shard)]

    def _places(self, shard: int) -> list[MeanPlace]:
        """The places of the shard that hold something this process carries.

        The first place of a shard is there even if it holds no cell, and is read by process 0.
        """
        count = self._processes[self.roster.owners[shard]]
        return [
            MeanPlace(shard, process)
            for process in range(count)
            if self._overlap(shard, process).length or process == self.share.process == 0
        ]

    def _overlap(self, shard: int, process: int) -> Cells:
        """The cells in a place of the shard that this process carries."""
        count = self._processes[self.roster.owners[shard]]
        wanted = self.share.cells.overlap(carried(self.layout, process, count))
        # A cell of a small shard may hold no value.
        start, stop = self.share.within(shard, wanted) if wanted.length else (0, 0)
        return wanted if stop > start else Cells(0, 0)

    def _owners(self, places: Sequence[MeanPlace]) -> list[int]:
        return sorted({self.roster.owners[place.shard] for place in places})

    def _reduce(self, mine: list[int], cargo: Cargo, mean: Vector, feedback: Feedback) -> None:
        """The means of the shards in `mine` are in the store and in `mean`."""
        weights = [m.weight for m in self.roster.members]
        reads = {
            (shard, m.rank): self.pool.submit(
                read_section, self.blobs, m, shard, self.share, self.codec
            )
            for shard in mine
            for m in self.roster.members
            if m.rank != self.me.rank and self.share.section_size(shard)
        }
        for shard in mine:
            place = MeanPlace(shard, self.share.process)
            if self.share.process and not self.share.section_size(shard):
                continue
            start, end = self.share.bounds(shard)
            try:
                parts = [
                    reads[shard, m.rank].result()
                    if (shard, m.rank) in reads
                    else cargo.as_sent(shard)
                    for m in self.roster.members
                ]
            except Blamed as problem:
                self._refuse(place, problem)
            owed = feedback.owed(shard, weighted_mean(parts, weights))
            cells = encode_cells(self.down, self.share, shard, owed)
            decode_cells(self.down, cells, self.share.cell_sizes(shard), mean[start:end])
            if feedback.entry is not None and not self.down.is_exact:
                feedback.entry.shards[shard] = left_out(owed, mean[start:end])
            self._publish(place, cells)

    def _publish(self, place: MeanPlace, cells: list[bytes]) -> None:
        data = b"".join([wire.seal_table(wire.SHARD, self._fence(place), cells), *cells])
        key = self._key(place)
        if self.blobs.create(key, data):
            return
        # The key is taken: by the note that this attempt is over, by an earlier try of this request
        # whose answer got lost, or by damaged bytes. Those may be replaced, as only the owner of
        # a place writes its mean.
        if self._read(place) is None:
            self.blobs.put(key, data)

    def _refuse(self, place: MeanPlace, problem: Blamed) -> NoReturn:
        """Raises Abandoned, with a note in the place that a bad upload spoils."""
        self._abandon(place, [problem.upload], problem.reason)
        # The place holds damaged bytes: only this process, its owner, could have put a mean there.
        blame = wire.Blame([problem.upload], self.me.rank, problem.reason)
        self.blobs.put(self._key(place), self._note(place, blame))
        raise Abandoned(blame)

    def _gather(self, places: list[MeanPlace], mean: Vector) -> None:
        pending = self._slowest_first(places)
        started = progress = time.monotonic()
        grace = self.history.owner_grace(started - self._started)
        usual = self.history.usual(f"shards {self.layout.name}")
        window, waited_s = 1, 0.0
        if pending and usual:
            time.sleep(poll_pause(0.0, usual))
        while pending:
            missing = self._fetch(pending[:window], mean)
            if not missing:
                pending = pending[window:]
                window = min(2 * window, WINDOW)
                continue
            now = time.monotonic()
            waited_s = now - started
            if len(missing) < min(window, len(pending)):
                progress = now
            # From now on only the first missing place is asked for: each one costs a request.
            pending = missing + pending[window:]
            window = 1
            self.history.slowest_owner = self.roster.owners[pending[0].shard]
            if now - max(progress, started) > self.me.timeout:
                raise self._stuck(pending)
            if now - progress > grace:
                pending = self._give_up_on(pending, mean)
                grace *= 2
            time.sleep(poll_pause(waited_s, usual))
        self.history.note_wait(f"shards {self.layout.name}", waited_s)
        self.history.note_reduce(time.monotonic() - self._started)

    def _slowest_first(self, places: list[MeanPlace]) -> list[MeanPlace]:
        """The owner that was last in the round before comes first.

        Once its shard is there, the others usually are too, so few requests are made in vain.
        """
        owners = self.roster.owners
        return sorted(places, key=lambda p: owners[p.shard] != self.history.slowest_owner)

    def _fetch(self, places: list[MeanPlace], mean: Vector) -> list[MeanPlace]:
        """Read the places into `mean`; returns those that hold nothing yet."""
        missing = []
        for place, part in zip(places, self.pool.map(self._read, places), strict=True):
            if part is None:
                missing.append(place)
            elif part.size:
                first = self.share.bounds(place.shard)[0]
                start, end = self.share.within(place.shard, self._overlap(*place))
                mean[first + start : first + end] = part
        return missing

    def _read(self, place: MeanPlace) -> Vector | None:
        """What this process carries of the mean in the place.

        None while there is none that can be trusted. Raises Abandoned.
        """
        key, fence = self._key(place), self._fence(place)
        theirs = Share(self.layout, place.process, self._processes[self.roster.owners[place.shard]])

        def get(start: int, end: int | None) -> memoryview:
            data = self.blobs.get(key, start, end)
            if start == 0 and wire.kind_of(data) == wire.ABANDONED:
                note = data if end is None else self.blobs.get(key)
                body = wire.unseal(wire.ABANDONED, fence, note)
                raise Abandoned(msgspec.json.decode(body, type=wire.Blame))
            return data

        wanted = self._overlap(*place)
        if not wanted.length:
            wanted = Cells(theirs.cells.start, theirs.cells.start)
        try:
            if not self.layout.cells:
                return self._read_plain(get, fence, place.shard)
            start, end = self.share.within(place.shard, wanted) if wanted.length else (0, 0)
            part = np.empty(end - start, np.float32)
            read_cells(get, wire.SHARD, fence, theirs, place.shard, wanted, self.down, part)
            return part
        except NotFound:
            return None
        except ValueError as error:
            self._damaged[place] = str(error)
            return None

    def _read_plain(
        self, get: Callable[[int, int | None], memoryview], fence: bytes, shard: int
    ) -> Vector:
        """The mean of a shard in the format without cells."""
        body = wire.unseal(wire.SHARD, fence, get(0, None))
        return self.down.decode(body, self.layout.shard_size(shard))

    def _give_up_on(self, pending: list[MeanPlace], mean: Vector) -> list[MeanPlace]:
        """End the attempt, as places are overdue, unless they came after all.

        Returns those still missing. Raises Abandoned, or Behind if the others are further already.
        """
        pending = self._fetch(pending, mean)
        if not pending:
            return []
        later = self.blobs.find(self.keys.rosters(), self.keys.roster(self.roster.round, 9999))
        if later:
            pending = self._fetch(pending, mean)
            if pending:
                latest = max(parse_round(blob.key) or 0 for blob in later)
                raise Behind(latest, self.roster)
            return []
        late = self._owners(pending)
        self._abandon(pending[0], blamed_uploads(self.roster, late), f"nothing from ranks {late}")
        return pending

    def _abandon(self, place: MeanPlace, uploads: list[str], reason: str) -> None:
        """Raises Abandoned, unless the place already holds a mean (or damaged bytes)."""
        blame = wire.Blame(uploads, self.me.rank, reason)
        if self.blobs.create(self._key(place), self._note(place, blame)):
            log.warning("round %d: attempt %d given up: %s", *self._where(), reason)
            raise Abandoned(blame)
        self._read(place)

    def _note(self, place: MeanPlace, blame: wire.Blame) -> bytes:
        return wire.seal(wire.ABANDONED, self._fence(place), msgspec.json.encode(blame))

    def _where(self) -> tuple[int, int]:
        return self.roster.round, self.roster.attempt

    def _key(self, place: MeanPlace) -> str:
        return self.keys.shard(*self._where(), *place)

    def _fence(self, place: MeanPlace) -> bytes:
        part = f".{place.process}" if place.process else ""
        return wire.fence(self._digest, f"{place.shard}{part}")

    def _stuck(self, pending: list[MeanPlace]) -> DistributedError:
        damaged = "".join(
            f"; {self._key(p)}: {why}" for p, why in self._damaged.items() if p in pending
        )
        return DistributedError(
            f"round {self.roster.round}: no shards from ranks {self._owners(pending)} "
            f"within {self.me.timeout:g} s{damaged}"
        )


BLOCK = 1 << 15  # elements; one block of sums stays in the cache


def weighted_mean(parts: Sequence[Vector], weights: Sequence[float]) -> Vector:
    """The mean, summed in float64 and rounded once.

    It is within one unit in the last place of the true mean.
    """
    plain = all(weight == weights[0] for weight in weights)
    # Scaled by a power of two, which changes no bits of the mean: the sum of huge weights would be
    # infinite, that of tiny ones 0.
    _, exponent = math.frexp(max(weights))
    weights = [math.ldexp(weight, -exponent) for weight in weights]
    total = sum(weights)
    size = len(parts[0])
    out = np.empty(size, np.float32)
    sums = np.empty(min(size, BLOCK), np.float64)
    term = np.empty_like(sums)
    with np.errstate(invalid="ignore", over="ignore"):  # infinity and its opposite make a NaN
        for start in range(0, size, BLOCK):
            end = min(start + BLOCK, size)
            acc, scaled = sums[: end - start], term[: end - start]
            acc.fill(0.0)
            for part, weight in zip(parts, weights, strict=True):
                if plain:
                    np.add(acc, part[start:end], out=acc)
                else:
                    np.multiply(part[start:end], weight, out=scaled, dtype=np.float64)
                    np.add(acc, scaled, out=acc)
            count = float(len(parts)) if plain else total
            np.divide(acc, count, out=out[start:end], casting="unsafe")
    return out
