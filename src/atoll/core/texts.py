"""How much text a status holds: that of the ranks which failed first, and of the root cause.

Thousands of ranks may each end with words and last lines of their own, or wait for something else.
A text that several ranks share is stored once and counts once.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from atoll.core.ranks import with_explanation
from atoll.core.status import Exit, Observation, RankStatus

TEXTS_BYTES = 64 * 1024  # of the ends of all ranks together, and of what they wait for
OMITTED = "what it waits for is not kept: too many ranks wait for different things"


class TextBudget:
    """Counts texts until there are too many."""

    def __init__(self, most: int = TEXTS_BYTES) -> None:
        self._left = most
        self._known: set[str] = set()

    def takes(self, *texts: str) -> bool:
        """Whether these fit as well; if not, they do not count."""
        news = {text for text in texts if text not in self._known}
        cost = sum(len(text.encode(errors="replace")) for text in news)
        if cost > self._left:
            return False
        self._left -= cost
        self._known |= news
        return True


def with_bounded_ends(ranks: Iterable[RankStatus]) -> dict[int, RankStatus]:
    """The ranks by number, with the words and last lines of those that ended first."""
    budget, bounded = TextBudget(), {r.rank: r for r in ranks}
    ended = [r for r in bounded.values() if r.exit is not None or r.previous_exit is not None]
    for rank in sorted(ended, key=_order):
        bounded[rank.rank] = replace(
            rank,
            exit=_bounded(rank.exit, budget),
            previous_exit=_bounded(rank.previous_exit, budget),
        )
    return bounded


def with_bounded_messages(ranks: Iterable[RankStatus]) -> list[RankStatus]:
    """The ranks, with what those wait for that have the lowest numbers."""
    budget = TextBudget()
    return [
        r if r.exit is not None or budget.takes(r.message) else replace(r, message=OMITTED)
        for r in ranks
    ]


def with_texts_of(rank: RankStatus, observation: Observation) -> RankStatus:
    """The rank, with the words and last lines of its end if the executor still has them."""
    if rank.exit is None or rank.exit.log_tail or rank.exit.message:
        return rank
    for observed_rank in observation.ranks:
        if observed_rank.exit is not None and (observed_rank.rank, observed_rank.attempt) == (
            rank.rank,
            rank.attempt,
        ):
            ended = with_explanation(observed_rank.exit)
            texts = {"message": ended.message, "log_tail": ended.log_tail}
            return replace(rank, exit=replace(rank.exit, **texts))
    return rank


def _bounded(ended: Exit | None, budget: TextBudget) -> Exit | None:
    if ended is None or budget.takes(ended.message, *ended.log_tail):
        return ended
    if ended.log_tail and budget.takes(ended.message):
        return replace(ended, log_tail=[])
    return replace(ended, message="", log_tail=[])


def _order(rank: RankStatus) -> tuple[float, int]:
    ended = rank.exit or rank.previous_exit
    return (ended.order if ended else 0.0), rank.rank
