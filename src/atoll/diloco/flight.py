"""A round on its way, and how far this replica's training is in the rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Thread
from typing import NamedTuple

from atoll.core.errors import DistributedError
from atoll.diloco.data import ranges
from atoll.diloco.group import Processes
from atoll.diloco.round.effects import EndMark, Offer, RoundResult, RunState
from atoll.diloco.times import PeriodTimes
from atoll.objectstore import Traffic

# The weight of a replica that has trained and counted nothing: next to nothing beside any that has.
UNCOUNTED = 1e-12


class Mark(NamedTuple):
    """How far this process was: what it had counted, and its steps."""

    counted: float = 0.0
    steps: int = 0


@dataclass
class Flight:
    """A round on its way, and what this replica offered to it."""

    fragment: int
    offer: Offer
    mark: Mark
    before: Traffic
    is_background: bool  # the model trains on meanwhile
    mix: float  # of the replica's own values, stays
    times: PeriodTimes = PeriodTimes()
    blocked_s: float = 0.0
    # Its result, when it began and when it ended.
    job: Future[tuple[RoundResult, float, float]] = field(default_factory=Future)

    def start(self, run: Callable[[], RoundResult]) -> None:
        """Run it: in the background by a daemon thread, so that a replica that has to stop does
        not wait for the others."""
        job = self.job

        def work() -> None:
            try:
                started = time.monotonic()
                result = run()
                job.set_result((result, started, time.monotonic()))
            except BaseException as error:
                job.set_exception(error)

        if self.is_background:
            Thread(target=work, name="atoll-diloco-round", daemon=True).start()
        else:
            work()


@dataclass
class FragmentWork:
    """What of this replica's training is in the rounds of one fragment.

    `uploaded`: training up to there is in the row, or committed. `late`: the weight of a row that
    no round has taken yet.
    """

    uploaded: Mark = field(default_factory=Mark)
    late: float = 0.0


def weigh(
    now: Mark, work: FragmentWork, reported: Mark, group: Processes
) -> tuple[float, float, int]:
    """Weight, tokens and steps of what a replica brings to a round of a fragment.

    `reported`: what of its training the clock of the run has.
    """
    counted = now.counted
    own = (counted, counted - work.uploaded.counted, counted - reported.counted)
    totals = [sum(counts) for counts in zip(*group.gather(own), strict=True)]
    weight = float(now.steps - work.uploaded.steps)
    if weight and totals[0]:
        weight = max(totals[1], UNCOUNTED)
    # Late work without any since then weighs what it weighed.
    return weight or work.late, totals[2], now.steps - reported.steps


def check_ends(ends: Sequence[EndMark], state: RunState, fragments: int) -> None:
    """Raises DistributedError if another replica is done with other parameters than this one."""
    others = ", ".join(
        f"rank {end.rank} with round {end.round // fragments}"
        for end in ends
        if end.chain != state.chain
    )
    if others:
        raise DistributedError(
            f"replicas end apart: this one ends with round {state.round // fragments}, {others}. "
            "Their models differ; end all of them by the run's clock, as diloco.until() does"
        )


def merge_offers(offers: Sequence[Offer], pending: Flight | None, end: int | None) -> Offer:
    """What one that leaves says of the rows of all fragments, beside an offer that is pending."""
    claimed = () if pending is None else pending.offer.claim
    return Offer(
        0.0,
        max(offer.steps for offer in offers),
        max(offer.tokens for offer in offers),
        claim=ranges.minus(ranges.union(*(offer.claim for offer in offers)), claimed),
        end=end,
        is_finite=all(offer.is_finite for offer in offers),
    )
