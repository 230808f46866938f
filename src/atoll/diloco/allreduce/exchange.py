"""One attempt, once its roster is known: compute the shards this rank owns, fetch the others.

An attempt is complete when the key of every shard holds a mean. It can never be completed once one
of them holds the note that it was given up; keys are created once, so all replicas see the same.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import NoReturn

import msgspec
import numpy as np

from atoll.core.errors import DistributedError, NotFound
from atoll.diloco.allreduce import wire
from atoll.diloco.allreduce.codecs import Codec
from atoll.diloco.allreduce.feedback import Feedback, left_out
from atoll.diloco.allreduce.keys import Keys, parse_round
from atoll.diloco.allreduce.layout import Layout, Vector
from atoll.diloco.allreduce.pace import History, poll_pause
from atoll.diloco.allreduce.roster import Roster, blamed_uploads
from atoll.diloco.allreduce.settle import Me
from atoll.diloco.allreduce.upload import Blamed, Cargo, read_section
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


class Exchange:
    """One attempt of one round, as one replica takes part in it."""

    def __init__(
        self,
        blobs: Blobs,
        keys: Keys,
        me: Me,
        history: History,
        pool: Executor,
        roster: Roster,
        layout: Layout,
        codec: Codec,
        down: Codec,
    ) -> None:
        self.blobs = blobs
        self.keys = keys
        self.me = me
        self.history = history
        self.pool = pool
        self.roster = roster
        self.layout = layout
        self.codec = codec
        self.down = down
        self.seconds: dict[str, float] = {}
        self._digest = roster.digest
        self._started = time.monotonic()
        self._damaged: dict[int, str] = {}

    def run(self, upload: str, cargo: Cargo, feedback: Feedback) -> Vector:
        """The roster's mean. Raises Abandoned, Behind, or DistributedError after the timeout."""
        mean = np.empty(self.layout.size, np.float32)
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
        self._gather([s for s in rest if s not in mine], mean)
        self.seconds["gather"] = time.monotonic() - reduce_end
        return mean

    def read_all(self) -> Vector | None:
        """The mean if every shard is there, else None. Raises Abandoned."""
        mean = np.empty(self.layout.size, np.float32)
        missing = self._fetch(list(range(self.layout.shards)), mean)
        return None if missing else mean

    def has(self, shard: int) -> bool:
        """Whether the mean of the shard is in the store."""
        try:
            return self._read(shard) is not None
        except Abandoned:
            return False

    def abandon_missing(self) -> None:
        """End the attempt whose owners are gone. Raises Abandoned if that was possible."""
        shards = list(range(self.layout.shards))
        mean = np.empty(self.layout.size, np.float32)
        missing = self._fetch(shards, mean)
        late = sorted({self.roster.owners[s] for s in missing})
        if missing:
            uploads = blamed_uploads(self.roster, late)
            self._abandon(missing[0], uploads, f"nothing from ranks {late}")

    def _reduce(self, mine: list[int], cargo: Cargo, mean: Vector, feedback: Feedback) -> None:
        """The means of the shards in `mine` are in the store and in `mean`."""
        weights = [m.weight for m in self.roster.members]
        reads = {
            (shard, m.rank): self.pool.submit(
                read_section, self.blobs, m, shard, self.layout, self.codec
            )
            for shard in mine
            for m in self.roster.members
            if m.rank != self.me.rank and self.layout.shard_size(shard)
        }
        for shard in mine:
            start, end = self.layout.bounds(shard)
            try:
                parts = [
                    reads[shard, m.rank].result()
                    if (shard, m.rank) in reads
                    else cargo.as_sent(shard)
                    for m in self.roster.members
                ]
            except Blamed as problem:
                self._refuse(shard, problem)
            owed = feedback.owed(shard, weighted_mean(parts, weights))
            payload = self.down.encode(owed)
            mean[start:end] = self.down.decode(payload, end - start)
            if feedback.entry is not None and not self.down.is_exact:
                feedback.entry.shards[shard] = left_out(owed, mean[start:end])
            self._publish(shard, payload)

    def _publish(self, shard: int, payload: bytes) -> None:
        data = wire.seal(wire.SHARD, self._place(shard), payload)
        key = self._key(shard)
        if self.blobs.create(key, data):
            return
        # The key is taken: by the note that this attempt is over, by an earlier try of this request
        # whose answer got lost, or by damaged bytes. Those may be replaced, as only the owner of
        # a shard writes its mean.
        if self._read(shard) is None:
            self.blobs.put(key, data)

    def _refuse(self, shard: int, problem: Blamed) -> NoReturn:
        """Raises Abandoned, with a note in the place of the shard that a bad upload spoils."""
        self._abandon(shard, [problem.upload], problem.reason)
        # The place holds damaged bytes: only this rank, the owner, could have put a mean there.
        blame = wire.Blame([problem.upload], self.me.rank, problem.reason)
        self.blobs.put(self._key(shard), self._note(shard, blame))
        raise Abandoned(blame)

    def _gather(self, shards: list[int], mean: Vector) -> None:
        pending = self._slowest_first(shards)
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
            # From now on only the first missing shard is asked for: each one costs a request.
            pending = missing + pending[window:]
            window = 1
            self.history.slowest_owner = self.roster.owners[pending[0]]
            if now - max(progress, started) > self.me.timeout:
                raise self._stuck(pending)
            if now - progress > grace:
                pending = self._give_up_on(pending, mean)
                grace *= 2
            time.sleep(poll_pause(waited_s, usual))
        self.history.note_wait(f"shards {self.layout.name}", waited_s)
        self.history.note_reduce(time.monotonic() - self._started)

    def _slowest_first(self, shards: list[int]) -> list[int]:
        """The owner that was last in the round before comes first.

        Once its shard is there, the others usually are too, so few requests are made in vain.
        """
        slow = [s for s in shards if self.roster.owners[s] == self.history.slowest_owner]
        return slow + [s for s in shards if s not in slow]

    def _fetch(self, shards: list[int], mean: Vector) -> list[int]:
        """Read the shards into `mean`; returns those that are not there yet."""
        missing = []
        for shard, part in zip(shards, self.pool.map(self._read, shards), strict=True):
            if part is None:
                missing.append(shard)
            else:
                start, end = self.layout.bounds(shard)
                mean[start:end] = part
        return missing

    def _read(self, shard: int) -> Vector | None:
        """The mean of the shard; None while there is none that can be trusted. Raises Abandoned."""
        try:
            data = self.blobs.get(self._key(shard))
        except NotFound:
            return None
        place = self._place(shard)
        try:
            if wire.kind_of(data) == wire.ABANDONED:
                body = wire.unseal(wire.ABANDONED, place, data)
                raise Abandoned(msgspec.json.decode(body, type=wire.Blame))
            body = wire.unseal(wire.SHARD, place, data)
            return self.down.decode(body, self.layout.shard_size(shard))
        except ValueError as error:
            self._damaged[shard] = str(error)
            return None

    def _give_up_on(self, pending: list[int], mean: Vector) -> list[int]:
        """End the attempt, as shards are overdue, unless they came after all.

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
        late = sorted({self.roster.owners[s] for s in pending})
        self._abandon(pending[0], blamed_uploads(self.roster, late), f"nothing from ranks {late}")
        return pending

    def _abandon(self, shard: int, uploads: list[str], reason: str) -> None:
        """Raises Abandoned, unless the place already holds a mean (or damaged bytes)."""
        blame = wire.Blame(uploads, self.me.rank, reason)
        if self.blobs.create(self._key(shard), self._note(shard, blame)):
            log.warning("round %d: attempt %d given up: %s", *self._where(), reason)
            raise Abandoned(blame)
        self._read(shard)

    def _note(self, shard: int, blame: wire.Blame) -> bytes:
        return wire.seal(wire.ABANDONED, self._place(shard), msgspec.json.encode(blame))

    def _where(self) -> tuple[int, int]:
        return self.roster.round, self.roster.attempt

    def _key(self, shard: int) -> str:
        return self.keys.shard(*self._where(), shard)

    def _place(self, shard: int) -> bytes:
        return wire.fence(self._digest, str(shard))

    def _stuck(self, pending: list[int]) -> DistributedError:
        owners = sorted({self.roster.owners[s] for s in pending})
        damaged = "".join(
            f"; {self._key(s)}: {why}" for s, why in self._damaged.items() if s in pending
        )
        return DistributedError(
            f"round {self.roster.round}: no shards from ranks {owners} "
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
