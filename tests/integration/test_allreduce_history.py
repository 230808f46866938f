"""What a late replica asks of the store does not grow with the rounds that there were."""

from __future__ import annotations

from typing import Any

import numpy as np
from obstore.store import MemoryStore

from atoll.diloco.allreduce import ObjectStoreAllReduce
from atoll.objectstore import ObjectInfo, ObjectStore

ROUNDS = 3000


class CountedStore(ObjectStore):
    """Counts what its listings answer."""

    listed = 0

    def list(self, prefix: str, after: str | None = None) -> list[ObjectInfo]:
        blobs = super().list(prefix, after)
        self.listed += len(blobs)
        return blobs


def test_a_late_replica_does_not_list_the_whole_history() -> None:
    store: Any = MemoryStore()
    blobs = CountedStore(store, "memory")
    with ObjectStoreAllReduce(blobs, 0, 1) as first:
        first.go_on_at(ROUNDS)
        first.allreduce([np.ones(4, "f4")])
        for number in range(ROUNDS):
            blobs.put(first.keys.manifest(number, 0), b"")
    late = CountedStore(store, "memory")
    with ObjectStoreAllReduce(late, 0, 1) as second:
        second.allreduce([np.ones(4, "f4")])
        assert second.last_round is not None
        assert second.last_round.round == ROUNDS + 1
    assert late.listed < 20
    assert late.traffic.requests < 20
