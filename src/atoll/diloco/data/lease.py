"""DataLease: what one replica may train on, and what it has trained on that no round has committed.

A training of a position is in the pseudo-gradient of each fragment until the global values replace
it, and in the row of a fragment that was late for its round. A replica claims all that an upload of
it brings, and throws away whatever it brings and may not claim.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from atoll.diloco.data import ranges
from atoll.diloco.data.ledger import Ledger
from atoll.diloco.data.ranges import Ranges

log = logging.getLogger("atoll.diloco")


class Trained(NamedTuple):
    """These positions were trained on with optimiser step `step` of the process."""

    step: int
    ranges: Ranges


class DataLease:
    """The data of one replica."""

    def __init__(self, ledger: Ledger, rank: int, fragments: int = 1, step: int = 0) -> None:
        self.ledger = ledger  # of the run, after the last round that is known
        self.rank = rank
        self._trainings: list[Trained] = []
        self._emptied = [step] * fragments  # trainings up to it are not in the pseudo-gradient
        self._late: list[Ranges] = [()] * fragments
        self._bad = 0  # pseudo-gradients in a row that were not finite
        self.in_vain = 0  # positions trained on whose training was thrown away
        self.dropped = 0  # positions that count as used, and whose training was not finite

    @property
    def fresh(self) -> Ranges:
        """Trained on and not committed."""
        return ranges.union(*(training.ranges for training in self._trainings))

    @property
    def hold(self) -> Ranges:
        return self.ledger.hold_of(self.rank)

    @property
    def free(self) -> Ranges:
        """What may be trained on."""
        return ranges.minus(self.hold, self.fresh)

    @property
    def is_honest(self) -> bool:
        """Whether all that the next uploads would bring may be claimed."""
        return ranges.is_inside(self.fresh, self.hold)

    def train(self, positions: Ranges, step: int) -> None:
        """Positions were trained on with a step of the optimiser."""
        if positions:
            self._trainings.append(Trained(step, positions))

    def claim(self, fragment: int, *, is_finite: bool = True) -> Ranges:
        """What an upload of the fragment brings of what is not committed.

        Data that makes a pseudo-gradient which is not finite is trained on a second time, not for
        ever: then it counts as used.
        """
        self._bad = 0 if is_finite else self._bad + 1
        if self._bad == 1:
            return ()
        claim = ranges.union(
            *(t.ranges for t in self._trainings if t.step > self._emptied[fragment]),
            ranges.common(self._late[fragment], self.fresh),
        )
        if not is_finite:
            self.dropped += ranges.size(claim)
            log.warning("%d positions are dropped: their training is not finite", self.dropped)
        return claim

    def was_member(self, fragment: int, claimed: Ranges) -> None:
        """The round that was just committed has the upload of this process."""
        retained = (Trained(t.step, ranges.minus(t.ranges, claimed)) for t in self._trainings)
        self._trainings = [training for training in retained if training.ranges]
        self._late[fragment] = ()

    def was_late(self, fragment: int, claimed: Ranges) -> None:
        """The round went on without the upload: its row goes with the next one."""
        self._late[fragment] = claimed

    def empty(self, fragment: int, step: int) -> None:
        """The global values replaced the pseudo-gradient of the fragment after `step`."""
        self._emptied[fragment] = step
        first = min(self._emptied)
        late = ranges.union(*self._late)
        retained = []
        for training in self._trainings:
            if training.step <= first:
                there = ranges.common(training.ranges, late)
                self.in_vain += ranges.size(training.ranges) - ranges.size(there)
                training = Trained(training.step, there)
            if training.ranges:
                retained.append(training)
        self._trainings = retained

    def discard(self, step: int) -> None:
        """All that was trained and not committed was thrown away after `step`."""
        self.in_vain += ranges.size(self.fresh)
        self._trainings = []
        self._emptied = [step] * len(self._emptied)
        self._late = [()] * len(self._late)
