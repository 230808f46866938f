"""A replica as a process: `python -m tests.round.replica URI RANK WORLD ROUNDS CODEC`.

Does rounds until the run has `ROUNDS` of them and writes one line for each.
"""

from __future__ import annotations

import hashlib
import sys
import time

import numpy as np

from atoll.diloco.allreduce import ObjectStoreAllReduce

SIZE = 60_000


def main() -> None:
    uri, (rank, world, rounds), codec = sys.argv[1], map(int, sys.argv[2:5]), sys.argv[5]
    chance = np.random.default_rng([rank, time.time_ns()])
    with ObjectStoreAllReduce(
        uri, rank, world, min_replicas=2, grace_s=1.0, keep_rounds=10_000, codec=codec, timeout_s=90
    ) as replica:
        done = -1
        while done < rounds:
            mean = replica.allreduce(chance.standard_normal(SIZE).astype(np.float32))
            report = replica.last_round
            assert report is not None
            done = report.round
            digest = hashlib.sha1(mean.tobytes()).hexdigest()
            sys.stdout.write(f"{done} {digest} {int(report.is_member)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
