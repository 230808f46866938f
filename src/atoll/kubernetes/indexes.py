"""Ranks that a Job has given up for good, though no pod is left to tell of it. Pure.

A pod deleted before it was placed, or taken away by force, counts as a failure of its index and
leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from atoll.core.status import Exit, RankStatus, SeenRank, Training, Wish

Json = dict[str, Any]


def indexes(text: str) -> set[int]:
    """`1,3-5` is 1, 3, 4, 5."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def given_up(
    training: Training,
    job: Json | None,
    wish: Wish | None,
    there: Collection[int],
    known: Mapping[int, RankStatus],
    now: float,
) -> Iterator[SeenRank]:
    """`there` are ranks that have pods, which tell more."""
    if job is None or wish is None:
        return
    for rank in sorted(indexes(job.get("status", {}).get("failedIndexes") or "")):
        before = known.get(rank) or RankStatus(rank=rank)
        if rank < wish.size and rank not in there and before.phase != "Failed":
            yield SeenRank(
                rank=rank,
                state="exited",
                attempt=before.attempt + 1,
                restarts=training.spec.max_restarts,
                exit=Exit(
                    code=None, at=now, reason="Deleted", message="its pod was taken away unseen"
                ),
            )
