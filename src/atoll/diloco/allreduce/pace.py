"""How long a replica waits: until its next look at the store, for a straggler, for an owner.

Everything here is pure: seconds go in, seconds come out. A look costs a request, so the first one
comes when the wait is usually over, and the pauses grow with the time already waited.
"""

from __future__ import annotations

from collections import defaultdict, deque
from math import inf
from statistics import median

FIRST_GRACE_S = 30.0  # the first round: processes start seconds apart
MIN_GRACE_S = 3.0
MAX_GRACE_S = 120.0
FIRST_OWNER_GRACE_S = 10.0
MEMORY = 8  # rounds
POLL_S = 2.0  # the longest pause: news is not older, and a day of looks costs some cents


def poll_pause(
    elapsed_s: float,
    usual_s: float,
    *,
    is_cheap: bool = False,
    step: float = 0.3,
    longest_s: float = POLL_S,
) -> float:
    """Seconds until the next look: doubling, but never less than `step` of the usual wait.

    `is_cheap`: a look costs next to nothing, as in a folder. Then it comes soon. Once the usual
    wait is over, no pause is longer than `longest_s`.
    """
    if is_cheap:
        return min(max(0.005, 0.1 * elapsed_s), 0.2, longest_s)
    due_s = 0.9 * usual_s
    if elapsed_s < due_s:
        return min(due_s - elapsed_s, POLL_S)
    step_s = max(step * usual_s, 0.02)
    most_s = max(step_s, 0.2, 0.05 * elapsed_s)
    return min(max(step_s, elapsed_s - due_s), most_s, longest_s)


class History:
    """What the last rounds were like, as this replica saw them."""

    def __init__(
        self, grace_s: float | None = None, timeout: float = inf, poll_s: float = POLL_S
    ) -> None:
        """`grace_s`: use this for stragglers and owners instead of learning it. `poll_s`: the
        longest pause between two looks at the store.

        No grace is longer than half of `timeout`: a round that can go on must not fail by waiting.
        """
        self._poll_s = poll_s
        self._fixed = grace_s
        self._longest = timeout / 2
        self._waits: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=3))
        self._spreads: deque[float] = deque(maxlen=MEMORY)
        self._reduces: deque[float] = deque(maxlen=MEMORY)
        self._advice_s = 0.0
        self._late_round = -1
        self.slowest_owner = -1

    def pause_s(
        self, elapsed_s: float, usual_s: float, *, is_cheap: bool = False, step: float = 0.3
    ) -> float:
        """Seconds until the next look at the store, as `poll_pause` has it."""
        return poll_pause(elapsed_s, usual_s, is_cheap=is_cheap, step=step, longest_s=self._poll_s)

    def note_wait(self, what: str, seconds: float) -> None:
        self._waits[what].append(seconds)

    def usual(self, what: str) -> float:
        """The median of the last waits."""
        waits = self._waits[what]
        return median(waits) if waits else 0.0

    def note_spread(self, seconds: float) -> None:
        """A manifest became complete `seconds` after its quorum."""
        self._spreads.append(seconds)

    def note_late(self, number: int, seconds: float) -> None:
        """A rank came `seconds` after the last one that was in round `number`."""
        if number > self._late_round and seconds > 0:
            self._late_round = number
            self._spreads.append(seconds / 2)  # the grace becomes twice as long as it was late

    def note_reduce(self, seconds: float) -> None:
        """The last owner's shard came `seconds` after the manifest."""
        self._reduces.append(seconds)

    def note_advice(self, seconds: float) -> None:
        """Others wait so long for an owner: it counts until this replica has seen a round."""
        self._advice_s = max(seconds, 0.0)

    def advice(self) -> float:
        """What a replica that joins should know: how long an owner may take; 0 if unknown."""
        return self.owner_grace(0.0) if self._reduces else self._advice_s

    def straggler_grace(self) -> float:
        """How long the ranks of the last round are waited for once there is a quorum."""
        if self._fixed is not None:
            grace = self._fixed
        elif not self._spreads:
            grace = FIRST_GRACE_S
        else:
            grace = _clamp(4 * max(self._spreads), MIN_GRACE_S, MAX_GRACE_S)
        return min(grace, self._longest)

    def owner_grace(self, own_s: float) -> float:
        """How long an owner may take after this replica is done, which itself took `own_s`."""
        if self._fixed is not None:
            return min(max(self._fixed, own_s), self._longest)
        is_new = not self._reduces and not self._advice_s
        floor = FIRST_OWNER_GRACE_S if is_new else MIN_GRACE_S
        usual = 4 * max(self._reduces, default=max(own_s, self._advice_s / 4))
        grace = _clamp(usual, max(floor, 2 * own_s), MAX_GRACE_S)
        return min(grace, self._longest)


def _clamp(value: float, low: float, high: float) -> float:
    return max(low, min(value, high))
