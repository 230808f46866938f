"""What a store must be able to do, and what is deleted from it as the rounds go on."""

from __future__ import annotations

import logging

from atoll.core.errors import AtollError, BackendError, NotFound, Permanent
from atoll.diloco.allreduce.keys import Keys, parse_round
from atoll.diloco.blobs import Blobs

log = logging.getLogger("atoll.allreduce")

PROBE = "conditional-write-probe"
KEPT_CHECKPOINTS = 2


def refuse_unconditional(blobs: Blobs) -> None:
    """Raises Permanent if the store overwrites what a create-only put must leave alone."""
    try:
        if not blobs.create(PROBE, b"atoll") or not blobs.create(PROBE, b"atoll"):
            return
    except AtollError as error:
        if not isinstance(error, Permanent):
            raise
        raise Permanent(f"a create-only write, which rounds need, was refused: {error}") from error
    raise Permanent(
        f"{blobs.name}: the store ignores conditional writes (If-None-Match: *), without which "
        "replicas cannot agree; use one that honours them, such as S3, GCS, Azure, R2 or MinIO"
    )


def collect_garbage(blobs: Blobs, keys: Keys, oldest: int) -> None:
    """Delete the uploads of rounds before `oldest`, and those means that no joiner needs."""
    try:
        checkpoints = [b.key for b in blobs.find(keys.checkpoints())]
        # Without a checkpoint, a joiner takes the start, if there is one, and needs all means.
        first = 0 if not checkpoints and _exists(blobs, keys.start()) else oldest
        newest = max((parse_round(key) or 0 for key in checkpoints), default=first)
        oldest_mean = min(oldest, newest)
        uploads = [b.key for b in blobs.find(keys.uploads()) if _is_before(b.key, oldest)]
        means = [b.key for b in blobs.find(keys.sums()) if _is_before(b.key, oldest_mean)]
        kept = [parse_round(key) or 0 for key in checkpoints[-KEPT_CHECKPOINTS:]]
        # The start stays: its state has no round before it.
        states = [b.key for b in blobs.find(keys.states()) if kept and _is_before(b.key, kept[0])]
        states = [key for key in states if parse_round(key)]
        doomed = uploads + means + states + checkpoints[:-KEPT_CHECKPOINTS]
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


def _is_before(key: str, oldest: int) -> bool:
    number = parse_round(key)
    return number is not None and number < oldest
