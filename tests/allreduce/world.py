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

from atoll import ObjectStoreAllReduce
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


@dataclass
class Seen:
    """What came of one call: the mean's bytes, the report, and the turns that were brought."""

    mean: bytes
    members: dict[int, float]
    is_member: bool
    rank: int
    turns: list[int]


@dataclass
class World:
    """All that happened in one run, by round."""

    size: int
    store: Any = field(default_factory=MemoryStore)
    codec: str = "fp32"
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
                turn, late = first_turn, list[int]()
                while True:
                    number = self.call(replica, turn, late)
                    turn += 1
                    if until(number):
                        return
        except Killed:
            return
        except BaseException as error:
            self.errors.append(error)
            raise

    def call(self, replica: ObjectStoreAllReduce, turn: int, late: list[int]) -> int:
        """One call. `late`: turns that came too late for their rounds, and go with the next."""
        (mean,) = replica.allreduce([tensor(replica.rank, turn)])
        report = replica.last_round
        assert report is not None
        values = replica._streams[""].values
        if values.has_dropped:  # the run had gone on without it: what it owed is gone
            late.clear()
            values.has_dropped = False
        late.append(turn)
        known = Seen(mean.tobytes(), report.members, report.is_member, replica.rank, list(late))
        if report.is_member:
            late.clear()
        with self.lock:
            self.rounds[report.round].append(known)
        return report.round

    def judge(self) -> None:
        """Raises unless all replicas agree, on the right values."""
        assert not self.errors, self.errors
        for number, known in self.rounds.items():
            assert len({(s.mean, tuple(s.members.items())) for s in known}) == 1, (number, known)
            brought = {s.rank: s.turns for s in known if s.is_member}
            members = known[0].members
            if self.codec == "fp32" and set(brought) == set(members):  # all in it lived to tell
                parts = [
                    np.sum([tensor(rank, turn) for turn in brought[rank]], axis=0, dtype="f8")
                    for rank in members
                ]
                mean = np.average(parts, axis=0, weights=list(members.values()))
                np.testing.assert_allclose(
                    np.frombuffer(known[0].mean, np.float32), mean, rtol=1e-5, atol=1e-6
                )


def seed(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())


def run_threads(*jobs: Callable[[], object]) -> None:
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=100)
        assert not thread.is_alive(), "a replica hangs"
