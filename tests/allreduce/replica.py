"""A replica as a process: `python -m tests.allreduce.replica URI RANK WORLD ROUNDS`.

Does rounds until the run has `ROUNDS` of them and writes one line for each.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np

import atoll


def main() -> None:
    uri, rank, world, rounds = sys.argv[1], *map(int, sys.argv[2:5])
    with atoll.ObjectStoreAllReduce(
        uri, rank, world, min_replicas=1, grace_s=1.0, keep_rounds=1000
    ) as replica:
        report = None
        while report is None or report.round < rounds:
            (mean,) = replica.allreduce([np.full(300_000, rank + 1.0, np.float32)])
            report = replica.last_round
            assert report is not None
            assert (mean == mean[0]).all(), (mean, report.members)
            digest = hashlib.sha1(mean.tobytes()).hexdigest()
            members = ",".join(map(str, report.members))
            sys.stdout.write(f"{report.round} {digest} {members} {int(report.is_member)}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
