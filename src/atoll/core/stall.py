"""Ranks that do not move. Pure: what an executor saw, and since when it has told of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from atoll.core.rank_ranges import some_spans
from atoll.core.ranks import in_ms
from atoll.core.status import RankStatus, Seen, Training, sooner

STALLED = "Stalled"
LOOKS = 4  # in the time after which a rank is told of
LEAST_S, LONGEST_S = 0.25, 30.0  # between two looks


def stalled_ranks(
    training: Training, ranks: Iterable[RankStatus], seen: Seen, now: float
) -> dict[int, float]:
    """Ranks that run and have not moved for `stall_s`, and since when."""
    limit_s = training.spec.stall_s
    if limit_s is None:
        return {}
    known, quiet = training.status.stalled, {look.rank: look.quiet_s for look in seen.ranks}
    stalled = {}
    for rank in ranks:
        quiet_s = quiet.get(rank.rank)
        if rank.is_alive and not rank.is_stopping and quiet_s is not None and quiet_s >= limit_s:
            stalled[rank.rank] = known.get(rank.rank, in_ms(now - quiet_s))
    return stalled


def with_quiet(training: Training, seen: Seen, quiet: Mapping[int, float]) -> Seen:
    """The look, with for how long ranks have not moved where the executor did not see that."""
    limit_s = training.spec.stall_s
    if limit_s is None or training.status.phase.is_terminal:
        return seen
    ranks = [
        replace(look, quiet_s=quiet.get(look.rank)) if look.quiet_s is None else look
        for look in seen.ranks
    ]
    return replace(seen, ranks=ranks, again_in_s=sooner(seen.again_in_s, look_again_s(limit_s)))


def stall_condition(stalled: dict[int, float]) -> tuple[bool, str, str]:
    """Whether there are any, the reason, and a message."""
    if not stalled:
        return False, "RanksMove", ""
    return True, "RankStalled", f"not moving: {some_spans(sorted(stalled))}"


def look_again_s(limit_s: float) -> float:
    """Seconds until the next look at ranks that are told of after `limit_s`."""
    return min(max(limit_s / LOOKS, LEAST_S), LONGEST_S)
