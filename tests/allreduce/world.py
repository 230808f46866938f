"""Replicas as threads over one store, with scripted faults, and a judge of what they left there."""

from __future__ import annotations

import random
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from obstore.store import MemoryStore

from atoll.diloco.allreduce import ObjectStoreAllReduce, wire
from atoll.diloco.allreduce.keys import parse_attempt
from atoll.diloco.allreduce.layout import Layout
from atoll.diloco.allreduce.manifest import Manifest
from atoll.diloco.allreduce.settle import Decider, Me
from atoll.diloco.allreduce.work import EncodedMean
from atoll.objectstore import ObjectStore

T = TypeVar("T")
SIZE = 37


class Killed(BaseException):
    """What a thread gets instead of SIGKILL: it never makes another request."""


class FaultyStore(ObjectStore):
    """`fault(index, is_after)` runs around every request; it may raise, sleep or do anything."""

    def __init__(
        self,
        store: Any,
        fault: Callable[[int, bool], None] | None = None,
        *,
        patience_s: float = 20,
    ) -> None:
        super().__init__(store, "faulty", patience_s=patience_s)
        self.fault = fault
        self._made = 0
        self._lock_made = threading.Lock()

    def _ask(self, request: Callable[[], T], **options: Any) -> T:
        def faulty() -> T:
            with self._lock_made:
                index, self._made = self._made, self._made + 1
            if self.fault:
                self.fault(index, False)
            try:
                return request()
            finally:
                if self.fault:
                    self.fault(index, True)

        return super()._ask(faulty, **options)


def kill_at(point: int, is_after: bool) -> Callable[[int, bool], None]:
    """Die before or after the request with this index, and stay dead."""
    dead = threading.Event()

    def fault(index: int, after: bool) -> None:
        if dead.is_set() or (index >= point and (after or not is_after)):
            dead.set()
            raise Killed

    return fault


def stall(chance: random.Random, share: float, longest_s: float) -> Callable[[int, bool], None]:
    """Some requests, or their answers, take a while: alive, but slower than the grace."""
    lock = threading.Lock()

    def fault(index: int, after: bool) -> None:
        with lock:
            is_slow, seconds = chance.random() < share, chance.uniform(0, longest_s)
        if is_slow:
            time.sleep(seconds)

    return fault


def tensor(rank: int, turn: int) -> np.ndarray[Any, Any]:
    """What a rank brings to its `turn`-th call: no two alike."""
    return np.random.default_rng([rank, turn]).standard_normal(SIZE).astype(np.float32)


def read_held(stored: EncodedMean, size: int) -> np.ndarray[Any, Any]:
    """The mean as one row; a place that is never visited is no number."""
    row = np.full(size, np.nan, np.float32)

    def take(start: int, part: Any) -> None:
        row[start : start + part.size] = part

    stored.visit(take)
    return row


def reduce_row(
    replica: ObjectStoreAllReduce, layout: Layout, row: Any, weight: float = 1.0
) -> np.ndarray[Any, Any]:
    """The mean of what a process carries, as it is made for a model."""
    if replica.has_residual:
        work = replica.begin(layout)
        work.add(0, row.copy())
        return read_held(replica.allreduce_parts(work, weight=weight), row.size)
    mean = row.copy()
    replica.allreduce_share(layout, mean, lambda: np.copyto(mean, row), weight=weight)
    return mean


def reduce_once(
    replica: ObjectStoreAllReduce, brought: np.ndarray[Any, Any], weight: float = 1.0
) -> np.ndarray[Any, Any]:
    """The mean of values that cannot be asked for again, as a model that trains on has them."""
    return reduce_row(replica, replica.describe([brought]), brought, weight)


def reduce_parts(
    replica: ObjectStoreAllReduce, brought: np.ndarray[Any, Any], weight: float = 1.0
) -> np.ndarray[Any, Any]:
    """The mean of values that can be asked for again, in the memory that there is."""
    layout = replica.describe([brought])
    if not replica.has_residual:
        return reduce_row(replica, layout, brought, weight)

    def bring(take: Callable[[int, Any], None]) -> None:
        for start in range(0, brought.size, 10):
            part = brought[start : start + 10].copy()
            take(start, part)
            part.fill(np.nan)  # the memory of a part is the caller's

    work = replica.begin(layout, bring)
    bring(work.add)
    return read_held(replica.allreduce_parts(work, weight=weight), brought.size)


@dataclass
class Seen:
    """What came of one call: the mean's bytes, the report, and which tensor was brought."""

    mean: bytes
    members: dict[int, float]
    is_member: bool
    rank: int
    turn: int


@dataclass
class World:
    """All that happened in one run, by round."""

    size: int
    store: Any = field(default_factory=MemoryStore)
    codec: str = "fp32"
    is_in_place: bool = False  # the mean comes where the values were
    rounds: dict[int, list[Seen]] = field(default_factory=lambda: defaultdict(list))
    errors: list[BaseException] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def replica(
        self, rank: int, fault: Callable[[int, bool], None] | None = None, **options: Any
    ) -> ObjectStoreAllReduce:
        # A world of one may go on, so that no replica is left waiting when the others are done.
        usual: dict[str, Any] = {
            "grace_s": 0.2,
            "timeout_s": 60,
            "keep_rounds": 1000,
            "min_replicas": 1,
        }
        usual |= {"codec": self.codec}
        options = {**usual, **options}
        blobs = FaultyStore(self.store, fault)
        return ObjectStoreAllReduce(blobs, rank, self.size, **options)

    def take_part(
        self,
        rank: int,
        until: Callable[[int], bool],
        fault: Callable[[int, bool], None] | None = None,
        first_turn: int = 0,
        **options: Any,
    ) -> None:
        """Call after call until `until(round)`. Ends quietly when killed, noisily on errors."""
        try:
            with self.replica(rank, fault, **options) as replica:
                turn = first_turn
                while True:
                    number = self.call(replica, turn)
                    turn += 1
                    if until(number):
                        return
        except Killed:
            return
        except BaseException as error:
            self.errors.append(error)
            raise

    def call(self, replica: ObjectStoreAllReduce, turn: int, weight: float = 1.0) -> int:
        brought = tensor(replica.rank, turn)
        if self.is_in_place:
            mean = reduce_parts(replica, brought, weight)
        else:
            (mean,) = replica.allreduce([brought], weight=weight)
        report = replica.last_round
        assert report is not None
        known = Seen(mean.tobytes(), report.members, report.is_member, replica.rank, turn)
        with self.lock:
            self.rounds[report.round].append(known)
        return report.round

    def judge(self) -> None:
        """Raises unless all replicas agree, on the right values, with one commit a round."""
        assert not self.errors, self.errors
        for number, known in self.rounds.items():
            assert len({(s.mean, tuple(s.members.items())) for s in known}) == 1, (number, known)
            members = {s.rank: s.turn for s in known if s.is_member}
            manifest = known[0].members
            if self.codec == "fp32" and set(members) == set(manifest):  # all in it lived to tell
                parts = [tensor(rank, members[rank]).astype(np.float64) for rank in manifest]
                mean = np.average(parts, axis=0, weights=list(manifest.values()))
                np.testing.assert_allclose(
                    np.frombuffer(known[0].mean, np.float32), mean, rtol=2e-7, atol=1e-9
                )
        commits = committed(ObjectStore(self.store, "judge"))
        for number, attempts in commits.items():
            assert len(attempts) <= 1, f"round {number} was committed as {attempts}"
        for number in self.rounds:
            assert len(commits[number]) == 1, f"round {number} was used but never committed"


def committed(blobs: ObjectStore, run: str = "run") -> dict[int, list[int]]:
    """The attempts of each round of which every shard's place holds a mean."""
    matches: dict[int, list[int]] = {}
    kinds: dict[tuple[int, int], dict[str, bytes]] = defaultdict(dict)
    for blob in blobs.list(f"{run}/sum"):
        where = parse_attempt(blob.key)
        assert where is not None
        kinds[where][blob.key] = wire.kind_of(blobs.get(blob.key))
    for blob in blobs.list(f"{run}/manifest"):
        where = parse_attempt(blob.key)
        assert where is not None
        manifest = read_manifest(blobs, *where, run=run)
        matches.setdefault(where[0], [])
        locations = kinds[where]
        if manifest.members and len(locations) == len(manifest.owners):
            if set(locations.values()) == {wire.SHARD}:
                matches[where[0]].append(where[1])
    return matches


def read_manifest(blobs: ObjectStore, number: int, attempt: int, run: str = "run") -> Manifest:
    from atoll.diloco.allreduce.keys import Keys
    from atoll.diloco.allreduce.pace import History

    decider = Decider(blobs, Keys(run), Me(0, 1, 1, "", 1), History(), None)  # type: ignore[arg-type]
    manifest = decider.read(decider.keys.manifest(number, attempt))
    assert manifest is not None
    return manifest


def seed(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())


def run_threads(*jobs: Callable[[], object]) -> None:
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
        assert not thread.is_alive(), "a replica hangs"
