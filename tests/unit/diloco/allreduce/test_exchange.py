"""Reading the mean of an attempt, from a store that answers when the test says so."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from obstore.store import MemoryStore

from atoll.core.errors import Permanent
from atoll.diloco.allreduce import ObjectStoreAllReduce, exchange, wire
from atoll.diloco.allreduce.exchange import Exchange, MeanLocation
from atoll.diloco.allreduce.layout import Layout
from atoll.diloco.allreduce.manifest import Manifest, Member
from atoll.diloco.allreduce.pace import History
from atoll.objectstore import ObjectStore, RangeReader

SIZE = 3


class SlowStore(ObjectStore):
    """The answer for `slow` has begun, and goes on when `may_go`, or after a while.

    A read of `refused` fails.
    """

    slow = refused = ""

    def __init__(self, store: Any) -> None:
        super().__init__(store, "slow")
        self.may_go = threading.Event()
        self.is_stalled = threading.Event()
        self.is_over = threading.Event()

    def reader(self, key: str, start: int = 0, end: int | None = None) -> RangeReader:
        if key == self.refused:
            self.is_stalled.wait(60)
            raise Permanent("refused")
        return SlowReader(self, key, start, end) if key == self.slow else super().reader(key)


class SlowReader(RangeReader):
    fills = 0

    def fill(self, target: memoryview) -> int:
        blobs = self._store
        assert isinstance(blobs, SlowStore)
        self.fills += 1
        if self.fills == 2:  # the head is read, the cells are not
            blobs.is_stalled.set()
            blobs.may_go.wait(1)
        return super().fill(target)

    def close(self) -> None:
        super().close()
        self._store.is_over.set()  # type: ignore[attr-defined]


def write_manifest(replica: ObjectStoreAllReduce, layout: Layout, attempt: int) -> Manifest:
    members = [Member(rank, f"upload-{rank}", 1.0) for rank in range(SIZE)]
    owners = list(range(SIZE))
    manifest = Manifest("run", 0, attempt, layout.pack(), members, owners, [], [], "somebody")
    return replica.decider.write(replica.keys.manifest(0, attempt), manifest)


def write_mean(replica: ObjectStoreAllReduce, manifest: Manifest, shard: int, value: float) -> str:
    key = replica.keys.shard(0, manifest.attempt, shard)
    cells = [np.full(1, value, np.float32).tobytes()]
    table = wire.seal_table(wire.SHARD, wire.fence(manifest.digest, str(shard)), cells)
    replica.blobs.put(key, [table, *cells])
    return key


def write_note(replica: ObjectStoreAllReduce, manifest: Manifest, shard: int) -> None:
    note = b'{"uploads":[],"by":0,"reason":"late"}'
    location = wire.fence(manifest.digest, str(shard))
    replica.blobs.put(
        replica.keys.shard(0, manifest.attempt, shard), wire.seal(wire.ABANDONED, location, note)
    )


def test_a_slow_read_of_an_attempt_that_was_given_up_does_not_spoil_the_next() -> None:
    blobs = SlowStore(MemoryStore())
    with ObjectStoreAllReduce(blobs, 0, SIZE) as replica:
        layout = replica.describe([np.zeros(SIZE, np.float32)])
        first, second = (write_manifest(replica, layout, attempt) for attempt in range(2))
        write_note(replica, first, 0)
        blobs.slow = write_mean(replica, first, 1, 7.0)
        write_mean(replica, first, 2, 7.0)
        for shard in range(SIZE):
            write_mean(replica, second, shard, 1.0)
        out = np.zeros(SIZE, np.float32)
        ((mean, _),) = replica.read_since(0, out)
        blobs.may_go.set()
        assert blobs.is_stalled.is_set()
        assert blobs.is_over.wait(60)
    assert mean is out
    assert out.tolist() == [1.0] * SIZE


def test_memory_is_the_callers_again_once_a_read_has_failed() -> None:
    blobs = SlowStore(MemoryStore())
    with ObjectStoreAllReduce(blobs, 0, SIZE) as replica:
        layout = replica.describe([np.zeros(SIZE, np.float32)])
        manifest = write_manifest(replica, layout, 0)
        blobs.refused, blobs.slow, _ = (
            write_mean(replica, manifest, shard, 7.0) for shard in range(SIZE)
        )
        out = np.zeros(SIZE, np.float32)
        with pytest.raises(Permanent):
            list(replica.read_since(0, out))
        out.fill(1.0)
        blobs.may_go.set()
        assert blobs.is_over.wait(60)
    assert out.tolist() == [1.0] * SIZE


PLACES = [MeanLocation(shard, 0) for shard in range(1, 16)]


class Round:
    """One process that waits for means, all of which are there after `ready_s`.

    It wakes up `late_s` after it wanted to, as on a busy machine.
    """

    def __init__(self, history: History, ready_s: float, late_s: float) -> None:
        self.now, self._ready_s, self._late_s = 0.0, ready_s, late_s
        self.vain = 0
        self.history = history
        self.layout = SimpleNamespace(name="")
        self.blobs = SimpleNamespace(is_folder=False)
        self.me = SimpleNamespace(timeout=600.0)
        self.manifest = SimpleNamespace(owners=list(range(16)))
        self._started = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self._late_s

    def _slowest_first(self, locations: list[MeanLocation]) -> list[MeanLocation]:
        return locations

    def _fetch(self, locations: list[MeanLocation], out: Any) -> list[MeanLocation]:
        self.now += 0.001
        if self.now >= self._ready_s:
            return []
        self.vain += len(locations)
        return locations


@pytest.mark.parametrize("late_s", [0.0, 0.03])
@pytest.mark.parametrize("ready_s", [0.0, 0.05, 0.4, 1.5])
def test_means_that_take_as_long_as_usual_are_rarely_asked_for_in_vain(
    ready_s: float, late_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    history, vain, waited = History(), [], []
    for _ in range(60):
        turn = Round(history, ready_s, late_s)
        monkeypatch.setattr(exchange, "time", turn)
        Exchange._gather(turn, PLACES, np.empty(0, np.float32))  # type: ignore[arg-type]
        vain.append(turn.vain)
        waited.append(turn.now)
    assert sum(vain[10:]) <= 0.6 * len(vain[10:])
    # Waiting late must not make the next wait longer, and that one the next.
    assert max(waited[10:]) <= 1.5 * ready_s + 2 * late_s + 0.05
