"""Which ranks are slow, and what they spend their time on. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atoll.core.rounds import RoundCost, SlowRank

SLOW_FACTOR = 1.5  # over the median: ranks on shared machines differ by less than that
SLOW_ROUNDS = 5  # that a rank is judged by: one bad round is no slow rank
MIN_SLOW_ROUNDS = 3  # the first has imports, compilation and a cold cache in it
MAX_SLOW = 8  # named ranks: where more are slow, these are the slowest


def slow_ranks(recent: Mapping[int, Sequence[RoundCost]]) -> list[SlowRank]:
    """Ranks whose steps take at least `SLOW_FACTOR` times the median, slowest first.

    `recent` has the costs of each rank's newest rounds. A rank has the median of its rounds, so
    that neither a checkpoint nor a pause makes it slow. Half of the ranks may be slow: what they
    are measured by is the lower median.
    """
    timed = {
        rank: own
        for rank, costs in recent.items()
        if len(own := [cost for cost in costs if cost.steps and cost.train_s]) >= MIN_SLOW_ROUNDS
    }
    if len(timed) < 2:
        return []
    step_s = {
        rank: median_low([each.train_s / each.steps for each in own]) for rank, own in timed.items()
    }
    typical_s = median_low([*step_s.values()])
    slowest = sorted(step_s, key=lambda rank: (-step_s[rank], rank))[:MAX_SLOW]
    return [
        _slow_rank(rank, step_s[rank], step_s[rank] / typical_s, timed[rank])
        for rank in slowest
        if step_s[rank] >= SLOW_FACTOR * typical_s
    ]


def _slow_rank(rank: int, step_s: float, factor: float, costs: Sequence[RoundCost]) -> SlowRank:
    train_s, waiting_s = sum(each.train_s for each in costs), sum(each.blocked_s for each in costs)
    known = [each.data_s for each in costs if each.data_s is not None]
    total_s = train_s + waiting_s
    data = sum(known) / total_s if len(known) == len(costs) else None
    compute, waiting = train_s / total_s - (data or 0.0), waiting_s / total_s
    parts = {"waiting for rounds": waiting}
    parts |= {"data and compute": compute} if data is None else {"data": data, "compute": compute}
    shares = ", ".join(
        f"{parts[name]:.0%} {name}" for name in sorted(parts, key=parts.__getitem__)[::-1]
    )
    return SlowRank(
        rank=rank,
        step_s=step_s,
        factor=factor,
        data=data,
        compute=compute,
        waiting=waiting,
        message=f"rank {rank} is slow: {factor:.1f}x the median step time ({shares})",
    )


def median_low(values: Sequence[float]) -> float:
    """As in `statistics`, which imports `random`: too much for a command that is waited for."""
    return sorted(values)[(len(values) - 1) // 2]
