"""How long a replica waits: until its next look at the store, for a straggler, for an owner.

Pure: seconds go in, seconds come out. A look costs a request, so the first one comes when the wait
is usually over, and the pauses grow with the time already waited.
"""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

from atoll.diloco.round import objects
from atoll.diloco.round.objects import Manifest

STAGGER_S = 1.5  # between two ranks whose turn it is: several times one request to a far store
FIRST_GRACE_S = 30.0  # processes start seconds apart, and load a model meanwhile
FIRST_OWNER_GRACE_S = 10.0
MIN_GRACE_S = 3.0  # a request that is retried twice
MAX_GRACE_S = 120.0  # longer than any pause of a machine that comes back
SPREADS = 8  # rounds that the graces are learned from
WAITS = 3  # rounds that the first look is learned from: few, so that it follows a change
EARLY = 0.9  # of the usual wait, the first look
MIN_PAUSE_S, MAX_PAUSE_S = 0.03, 2.0  # 2 s: a day of looks costs some cents
FOLDER_PAUSE_S = (0.005, 0.2)  # a look in a folder costs next to nothing


class Pace:
    """What the last rounds were like, as this replica saw them.

    `grace_s` is used for stragglers and owners instead of what is learned. No grace is longer than
    half of `timeout_s`: a round that can go on must not fail by waiting.
    """

    def __init__(
        self,
        timeout_s: float,
        *,
        grace_s: float | None = None,
        is_folder: bool = False,
        max_pause_s: float = MAX_PAUSE_S,
    ) -> None:
        self._longest_s = timeout_s / 2
        self._fixed_s = grace_s
        self._is_folder = is_folder
        self._max_pause_s = max_pause_s
        self._spreads: deque[float] = deque(maxlen=SPREADS)
        self._makes: deque[float] = deque(maxlen=SPREADS)
        self._waits: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=WAITS))
        self._nonces: dict[int, str] = {}  # which start of each rank was a member last
        self._left_out: dict[int, str] = {}  # those of them that were missing since
        self._doublings = 0  # of the straggler grace, which was too short
        self._calm = 0  # complete rounds since then
        self.slowest_owner = -1

    # -- Looks at the store

    def first_look_s(self, what: str) -> float:
        """How long to wait before the first look. One wait that was a freeze must not count."""
        waits = self._waits[what]
        is_known = len(waits) == WAITS and not self._is_folder
        return EARLY * median(waits) if is_known else 0.0

    def pause_s(self, waited_s: float) -> float:
        """How long to wait until the next look."""
        low, high = FOLDER_PAUSE_S if self._is_folder else (MIN_PAUSE_S, MAX_PAUSE_S)
        return min(max(0.15 * waited_s, low), high, self._max_pause_s)

    def note_wait(self, what: str, waited_s: float, looks: int) -> None:
        """A wait ended after so many looks.

        One that ended with the first look may have been over before: it counts less, or one slow
        round would slow the next twenty.
        """
        self._waits[what].append(0.8 * waited_s if looks <= 1 else waited_s)

    # -- Graces

    @property
    def straggler_grace_s(self) -> float:
        """How long missing ranks are waited for once there is a quorum."""
        if self._fixed_s is not None:
            return min(self._fixed_s, self._longest_s)
        learned = 4 * max(self._spreads) if self._spreads else FIRST_GRACE_S
        doubled = max(MIN_GRACE_S, learned) * 2.0**self._doublings
        return min(doubled, MAX_GRACE_S, self._longest_s)

    @property
    def owner_grace_s(self) -> float:
        """How long an owner may take to make its mean, after this replica has made its own."""
        if self._fixed_s is not None:
            return min(self._fixed_s, self._longest_s)
        learned = 4 * max(self._makes) if self._makes else FIRST_OWNER_GRACE_S
        return min(max(MIN_GRACE_S, learned), MAX_GRACE_S, self._longest_s)

    def note_manifest(self, manifest: Manifest) -> None:
        """Learn how long stragglers take: all replicas learn the same from a manifest."""
        if not manifest.missing and len(manifest.members) > 1:
            self._spreads.append(manifest.spread_s)
            self._calm += 1
        for member in manifest.members:
            name = objects.parse_upload(member.upload)
            nonce = name.nonce if name else ""
            if self._left_out.pop(member.rank, None) == nonce:
                # It was given up on though it lived: the grace was too short.
                self._calm = 0
                self._doublings += self.straggler_grace_s < MAX_GRACE_S
            self._nonces[member.rank] = nonce
        for rank in manifest.missing:
            if rank in self._nonces:
                self._left_out[rank] = self._nonces[rank]
        # While somebody is left out, rounds are complete without saying anything of its pace.
        if self._calm >= SPREADS * (8 if self._left_out else 1):
            self._doublings, self._calm = max(0, self._doublings - 1), 0

    def note_make(self, seconds: float) -> None:
        """This replica took so long to make its own means."""
        self._makes.append(seconds)
