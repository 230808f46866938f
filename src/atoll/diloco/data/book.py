"""What one replica keeps beside the ledger: what it has trained on that no round has committed.

A training of a position is in the movement of each fragment until the global values replace that
movement, and in what a fragment carries from a round that it was late for. A replica claims all
that an upload of it brings, and throws away whatever it brings and may not claim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from atoll.diloco.data import ledger as ledgers
from atoll.diloco.data import ranges
from atoll.diloco.data.ledger import Claim, Ledger
from atoll.diloco.data.ranges import Ranges


class Trained(NamedTuple):
    """These positions were trained on with optimiser step `step` of the process."""

    step: int
    ranges: Ranges


class Book:
    """The data of one replica."""

    def __init__(self, ledger: Ledger, rank: int, fragments: int = 1, step: int = 0) -> None:
        self.ledger = ledger
        self.rank = rank
        self._trainings: list[Trained] = []
        self._emptied = [step] * fragments  # trainings up to this step are not in the movement
        self._carried: list[Ranges] = [()] * fragments
        self.in_vain = 0  # positions trained on whose training was thrown away

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

    def train(self, positions: Ranges, step: int) -> None:
        """Positions were trained on with a step of the optimiser."""
        if positions:
            self._trainings.append(Trained(step, positions))

    def claim(self, fragment: int) -> Ranges:
        """What an upload of the fragment brings of what is not committed."""
        return ranges.union(
            *(t.ranges for t in self._trainings if t.step > self._emptied[fragment]),
            ranges.common(self._carried[fragment], self.fresh),
        )

    def carried(self, fragment: int) -> Ranges:
        """What the late work that the fragment carries was trained on."""
        return self._carried[fragment]

    def restore(self, fragment: int, carried: Ranges, step: int) -> bool:
        """Whether late work that was saved with these positions may be brought again.

        Only all of it can be, so all of its positions must still be held.
        """
        if not ranges.is_inside(carried, self.free):
            return False
        self.train(carried, step)
        self._carried[fragment] = carried
        self._emptied = [max(each, step) for each in self._emptied]
        return True

    def commit(self, claims: Sequence[Claim], world: int) -> None:
        """A round was committed, whoever was in it. Raises InvalidClaim."""
        self.ledger = ledgers.commit(self.ledger, claims, world)

    def was_member(self, fragment: int, claimed: Ranges) -> None:
        """The round that was just committed has the upload of this process."""
        self._forget(claimed)
        self._carried[fragment] = ()

    def was_left_out(self, fragment: int, claimed: Ranges, *, is_carried: bool) -> None:
        """The round that was just committed does not have the upload of this process."""
        if is_carried:
            self._carried[fragment] = claimed

    def empty(self, fragment: int, step: int) -> None:
        """The global values replaced the movement of the fragment after `step`."""
        self._emptied[fragment] = step
        first = min(self._emptied)
        carried = ranges.union(*self._carried)
        retained = []
        for training in self._trainings:
            if training.step <= first:
                there = ranges.common(training.ranges, carried)
                self.in_vain += ranges.size(training.ranges) - ranges.size(there)
                training = Trained(training.step, there)
            if training.ranges:
                retained.append(training)
        self._trainings = retained

    @property
    def is_honest(self) -> bool:
        """Whether all that the next uploads would bring may be claimed."""
        return ranges.is_inside(self.fresh, self.hold)

    def discard(self, step: int) -> None:
        """All movements and all that is carried were thrown away after `step`."""
        self.in_vain += ranges.size(self.fresh)
        self._trainings = []
        self._emptied = [step] * len(self._emptied)
        self._carried = [()] * len(self._carried)

    def _forget(self, committed: Ranges) -> None:
        retained = (Trained(t.step, ranges.minus(t.ranges, committed)) for t in self._trainings)
        self._trainings = [training for training in retained if training.ranges]
