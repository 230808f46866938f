"""What a store must be able to do, and what is deleted from it as the rounds go on."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future

from atoll.core.errors import AtollError, BackendError, NotFound, Permanent
from atoll.diloco.allreduce import keys as names
from atoll.diloco.allreduce import wire
from atoll.diloco.allreduce.keys import Keys, block_of, parse_attempt, parse_round
from atoll.diloco.allreduce.past import fold
from atoll.objectstore import ObjectStore

log = logging.getLogger("atoll.allreduce")

PROBE = "conditional-write-probe"
KEPT_CHECKPOINTS = 2
NOTE_BYTES = 8  # of an object tell its kind
MAX_ATTEMPTS = 10_000


def refuse_unconditional(blobs: ObjectStore) -> None:
    """Raises Permanent if the store overwrites what a create-only put must leave alone."""
    try:
        if not blobs.create(PROBE, b"atoll") or not blobs.create(PROBE, b"atoll"):
            return
    except AtollError as error:
        if not isinstance(error, Permanent):
            raise
        raise Permanent(f"a create-only write, which rounds need, was refused: {error}") from error
    raise Permanent(
        f"{blobs.uri}: the store ignores conditional writes (If-None-Match: *), without which "
        "replicas cannot agree; use one that honours them, such as S3, GCS, Azure, R2 or MinIO"
    )


class StoreSweep:
    """Deletes, now and then, what no replica can need any more, and folds what is long past."""

    def __init__(self, blobs: ObjectStore, keys: Keys, pool: Executor, keep_rounds: int) -> None:
        self._blobs = blobs
        self._keys = keys
        self._pool = pool
        self._keep_rounds = keep_rounds
        self._running: Future[None] | None = None
        self._folded = 0  # all blocks of manifests before this round are
        self._swept = 0  # all means of rounds before this one are gone
        self._is_closed = False

    def start(self, number: int) -> None:
        """Sweep in the background, as round `number` is done: each `keep_rounds` of them."""
        if number % self._keep_rounds or (self._running and not self._running.done()):
            return
        self._running = self._pool.submit(self.run, number - self._keep_rounds)

    def wait(self) -> None:
        if self._running is not None:
            self._running.exception()

    def close(self) -> None:
        """End soon: what is left to do is left to the next sweep."""
        self._is_closed = True
        self.wait()

    def run(self, oldest: int) -> None:
        """`oldest`: nobody reads rounds before it but to catch up."""
        try:
            needed, self._swept = collect_garbage(self._blobs, self._keys, oldest, self._swept)
            # One block more stays as it is, for replicas that are late by some rounds.
            before = block_of(needed) - names.BLOCK
            if before > self._folded and fold(self._blobs, self._keys, before, self._is_over):
                self._folded = before
        except BackendError as error:
            log.warning("old rounds were not collected, the next sweep will: %s", error)

    def _is_over(self) -> bool:
        return self._is_closed


def collect_garbage(blobs: ObjectStore, keys: Keys, oldest: int, swept: int = 0) -> tuple[int, int]:
    """Delete the uploads of rounds before `oldest`, and those means that no joiner needs.

    Means of rounds before `swept` are gone already. Returns the first round of which a joiner may
    need a manifest, and the first of which it may need a mean.
    """
    checkpoints = [b.key for b in blobs.list(keys.checkpoints())]
    # Without a checkpoint, a joiner takes the start, if there is one, and needs all means.
    first = 0 if not checkpoints and _exists(blobs, keys.start()) else oldest
    newest = max((parse_round(key) or 0 for key in checkpoints), default=first)
    oldest_mean = min(oldest, newest)
    uploads = [b.key for b in blobs.list(keys.uploads()) if _is_before(b.key, oldest)]
    listing = blobs.list(keys.sums(), keys.sums(swept) if swept else None)
    means = [b.key for b in listing if _is_before(b.key, oldest_mean)]
    notes = set(_notes(blobs, keys, means))
    retained = [parse_round(key) or 0 for key in checkpoints[-KEPT_CHECKPOINTS:]]
    # The start stays: its state has no round before it.
    states = [
        b.key for b in blobs.list(keys.states()) if retained and _is_before(b.key, retained[0])
    ]
    states = [key for key in states if parse_round(key)]
    # Uploads go first: who could read them knows that no note was deleted before.
    for doomed in (uploads, [key for key in means if key not in notes]):
        if doomed:
            blobs.delete(doomed)
    if states or checkpoints[:-KEPT_CHECKPOINTS]:
        blobs.delete(states + checkpoints[:-KEPT_CHECKPOINTS])
    return min([oldest_mean, *retained]), oldest_mean


def _notes(blobs: ObjectStore, keys: Keys, means: Sequence[str]) -> Iterator[str]:
    """Those of `means` that say that an attempt was given up.

    They stay for ever: a member that slept meanwhile would complete the attempt, if it could.
    """
    attempts = {key: parse_attempt(key) for key in means}
    if not attempts:
        return
    first = min(where[0] for where in attempts.values() if where is not None)
    last: dict[int, int] = {}
    for blob in blobs.list(keys.manifests(), keys.manifest(first - 1, 9999) if first else None):
        number, attempt = parse_attempt(blob.key) or (-1, 0)
        last[number] = max(attempt, last.get(number, 0))
    for key, where in attempts.items():
        # After the last attempt of a round there was no other: it was not given up.
        if where is not None and where[1] < last.get(where[0], MAX_ATTEMPTS):
            try:
                if wire.kind_of(blobs.get(key, 0, NOTE_BYTES)) == wire.ABANDONED:
                    yield key
            except NotFound:
                continue


def _exists(blobs: ObjectStore, key: str) -> bool:
    try:
        blobs.get(key, 0, 1)
    except NotFound:
        return False
    return True


def _is_before(key: str, oldest: int) -> bool:
    number = parse_round(key)
    return number is not None and number < oldest
