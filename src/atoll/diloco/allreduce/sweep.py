"""Delete what no replica can need any more. Rosters stay: they are small and the run's journal.

A roster that is gone could be decided again by a process that slept through everything.
"""

from __future__ import annotations

import logging

from atoll.core.errors import BackendError, NotFound
from atoll.diloco.allreduce.keys import Keys, parse_round
from atoll.diloco.blobs import Blobs

log = logging.getLogger("atoll.allreduce")

KEPT_CHECKPOINTS = 2


def collect(blobs: Blobs, keys: Keys, oldest: int) -> None:
    """Uploads of rounds before `oldest` go; means only if a checkpoint makes up for them."""
    try:
        saved = [b.key for b in blobs.find(keys.checkpoints())]
        # A joiner that finds no checkpoint begins at the start, if there is one, with all means.
        first = 0 if not saved and _exists(blobs, keys.start()) else oldest
        done = max((parse_round(key) or 0 for key in saved), default=first)
        spent = min(oldest, done)
        uploads = [b.key for b in blobs.find(keys.uploads()) if _is_before(b.key, oldest)]
        means = [b.key for b in blobs.find(keys.sums()) if _is_before(b.key, spent)]
        doomed = uploads + means + saved[:-KEPT_CHECKPOINTS]
        if doomed:
            blobs.delete(doomed)
    except BackendError as error:
        log.warning("old rounds were not collected, the next sweep will: %s", error)


def _exists(blobs: Blobs, key: str) -> bool:
    try:
        blobs.get(key, 0, 1)
    except NotFound:
        return False
    return True


def _is_before(key: str, number: int) -> bool:
    found = parse_round(key)
    return found is not None and found < number
