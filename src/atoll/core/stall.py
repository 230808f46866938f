"""Stalled ranks: which have been idle for longer than the spec allows, and since when. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from atoll.core.rank_ranges import limited_spans
from atoll.core.ranks import in_ms
from atoll.core.status import Observation, RankStatus, Training, sooner

STALLED = "Stalled"
CHECKS_PER_LIMIT = 4  # so a stall is reported at most a quarter of the limit late
MIN_S, MAX_S = 0.25, 30.0  # between two looks


def stalled_ranks(
    training: Training, ranks: Iterable[RankStatus], observation: Observation, now: float
) -> dict[int, float]:
    """Ranks that run and have not moved for `stall_s`, and since when."""
    limit_s = training.spec.stall_s
    if limit_s is None:
        return {}
    known, idle_times = (
        training.status.stalled,
        {observed_rank.rank: observed_rank.idle_s for observed_rank in observation.ranks},
    )
    stalled = {}
    for rank in ranks:
        idle_s = idle_times.get(rank.rank)
        if rank.is_alive and not rank.is_stopping and idle_s is not None and idle_s >= limit_s:
            stalled[rank.rank] = known.get(rank.rank, in_ms(now - idle_s))
    return stalled


def with_idle_times(
    training: Training, observation: Observation, idle_times: Mapping[int, float]
) -> Observation:
    """The look, with for how long ranks have not moved where the executor did not see that."""
    limit_s = training.spec.stall_s
    if limit_s is None or training.status.phase.is_terminal:
        return observation
    ranks = [
        replace(observed_rank, idle_s=idle_times.get(observed_rank.rank))
        if observed_rank.idle_s is None
        else observed_rank
        for observed_rank in observation.ranks
    ]
    return replace(
        observation, ranks=ranks, again_in_s=sooner(observation.again_in_s, check_again_s(limit_s))
    )


def stall_condition(stalled: dict[int, float]) -> tuple[bool, str, str]:
    """Whether there are any, the reason, and a message."""
    if not stalled:
        return False, "RanksMove", ""
    return True, "RankStalled", f"not moving: {limited_spans(sorted(stalled))}"


def check_again_s(limit_s: float) -> float:
    """Seconds until the next check of ranks that count as stalled after `limit_s`."""
    return min(max(limit_s / CHECKS_PER_LIMIT, MIN_S), MAX_S)
