"""Who brought a training down: one answer, however many ranks and hosts it had."""

from __future__ import annotations

from atoll.core.ranks import is_lost
from atoll.core.spec import WorldSize
from atoll.core.status import RankExit, RankStatus, Status

# Failures closer together than this are one story: peers fall because the first one did.
CASCADE_S = 60.0


def root_cause_of(status: Status, world: WorldSize) -> RankStatus | None:
    """The first failure of the run of failures that took the world below its minimum.

    Order is when each rank says it failed, or else when it ended: peers that crash on a lost
    connection may be gone before the culprit has unwound.
    """
    lost = sorted(
        (r for r in status.ranks if r.rank < world.target and is_lost(r)),
        key=lambda r: (r.exit.order if r.exit else 0.0, r.rank),
    )
    spare = world.target - world.min
    if not lost or status.failing != "RankFailed":
        return None
    at = min(spare, len(lost) - 1)
    while at > 0 and _order(lost[at]) - _order(lost[at - 1]) <= CASCADE_S:
        at -= 1
    return lost[at]


def _order(rank: RankStatus) -> float:
    return rank.exit.order if rank.exit else 0.0


def final_exits(status: Status, root: RankStatus | None) -> list[RankExit]:
    """One record for every rank that ever ran."""
    ran = (r for r in (*status.ranks, *status.retired) if r.exit is not None)
    return [_record(r, root) for r in sorted(ran, key=lambda r: r.rank)]


def _record(rank: RankStatus, root: RankStatus | None) -> RankExit:
    ended = rank.exit
    assert ended is not None
    fell_after = root is not None and rank.rank != root.rank and ended.order >= _order(root)
    was_running = rank.phase in ("Stopped", "Failed") or not ended.is_success
    return RankExit(
        rank=rank.rank,
        exit_code=ended.code,
        termination_reason=ended.reason,
        restart_count=rank.restarts,
        signal=ended.signal,
        started_at=rank.started_at,
        ended_at=ended.at,
        host=rank.node,
        collateral=fell_after and was_running,
        message=ended.message,
        log_tail=ended.log_tail,
    )
