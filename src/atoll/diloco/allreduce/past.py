"""Manifests of rounds long past: those of a block of rounds are folded into one object.

A manifest decides its round because its key is created once. A replica that slept meanwhile must
not decide a round anew whose manifest was folded away:

- The block is there before any of its manifests is deleted.
- Before that, the uploads of its rounds are deleted, so a manifest that was decided on before the
  sleep cannot be completed, unless by a single member. Such a manifest counts only if its round is
  not past.
- A look at the uploads after the sleep shows those of later rounds.
"""

from __future__ import annotations

import logging
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import msgspec

from atoll.core.errors import NotFound
from atoll.core.model import convert
from atoll.diloco.allreduce import wire
from atoll.diloco.allreduce.keys import Keys, block_of, parse_attempt
from atoll.diloco.allreduce.manifest import MANIFEST, Manifest
from atoll.objectstore import ObjectStore

log = logging.getLogger("atoll.allreduce")

READERS = 4
CHUNK = 100  # manifests that are read before the fold looks whether it has to stop
# What only those need who take part in the round.
OF_THE_EXCHANGE = {"layout": "", "owners": []}


def is_past(blobs: ObjectStore, keys: Keys, number: int) -> bool:
    """Whether the manifests of the round are folded."""
    try:
        blobs.get(keys.past(number), 0, 1)
    except NotFound:
        return False
    return True


def read_round(blobs: ObjectStore, keys: Keys, number: int) -> list[Manifest]:
    """The manifests of a round that is past, attempt by attempt; none if it is not."""
    try:
        return [r for r in _read_block(blobs, keys.past(number)) if r.round == number]
    except NotFound:
        return []
    except ValueError as error:
        log.warning("%s cannot be used: %s", keys.past(number), error)
        return []


def read_manifests(blobs: ObjectStore, keys: Keys, first: int = 0) -> Iterator[Manifest]:
    """All manifests of the run from round `first` on, in order, of rounds that are past or not.

    Those of the past are without `layout`, `owners` and `sections`. What is damaged is left out,
    and told of.
    """
    return (manifest for manifest, _ in read_dated_manifests(blobs, keys, first))


def read_dated_manifests(
    blobs: ObjectStore, keys: Keys, first: int = 0
) -> Iterator[tuple[Manifest, datetime | None]]:
    """The same, with when each was decided; None for those of the past."""
    known = -1
    for blob in blobs.list(keys.pasts()):
        if blob.key < keys.past(first):
            continue
        try:
            for manifest in _read_block(blobs, blob.key):
                known = max(known, block_of(manifest.round))
                if manifest.round >= first:
                    yield manifest, None
        except (NotFound, ValueError) as error:
            log.warning("%s cannot be used: %s", blob.key, error)
    for blob in blobs.list(keys.manifests(), keys.manifest(first - 1, 9999) if first else None):
        where = parse_attempt(blob.key)
        if where is None or block_of(where[0]) <= known:
            continue
        try:
            yield MANIFEST.decode(_read(blobs, blob.key)), blob.modified
        except NotFound:  # folded since the listing
            folded = read_round(blobs, keys, where[0])
            yield from ((r, blob.modified) for r in folded if r.attempt == where[1])
        except (wire.Corrupt, msgspec.MsgspecError) as error:
            log.warning("%s cannot be used: %s", blob.key, error)


def fold(
    blobs: ObjectStore, keys: Keys, before: int, is_over: Callable[[], bool] = lambda: False
) -> bool:
    """Fold the oldest block of rounds before `before` that is not; whether it was the last.

    All who fold a block make the same of it, so any number may, and each may be killed.
    """
    blocks: dict[int, list[str]] = defaultdict(list)
    for blob in blobs.list(keys.manifests()):
        where = parse_attempt(blob.key)
        if where is not None and block_of(where[0]) < block_of(before):
            blocks[block_of(where[0])].append(blob.key)
    if blocks:
        first = min(blocks)
        if not _fold_block(blobs, keys.past(first), blocks[first], is_over):
            return False
    return len(blocks) <= 1


def _fold_block(
    blobs: ObjectStore, key: str, manifests: Sequence[str], is_over: Callable[[], bool]
) -> bool:
    """The block is in the store, and its manifests are not; False if it has to wait."""
    if not _is_complete(blobs, key):
        try:
            body = _pack(blobs, manifests, is_over)
        except NotFound:
            return False  # another folds it right now
        except (wire.Corrupt, msgspec.MsgspecError) as error:
            log.warning("%s cannot be made: %s", key, error)
            return False
        if body is None:
            return False
        data = wire.seal(wire.PAST, wire.fence(key), body)
        if not blobs.create(key, data) and not _is_complete(blobs, key):
            blobs.put(key, data)  # over damaged bytes: nothing else is ever written there
    # A manifest that is not in the block was written by one who had slept: it decides nothing.
    blobs.delete(manifests)
    return True


def _pack(
    blobs: ObjectStore, manifests: Sequence[str], is_over: Callable[[], bool]
) -> bytes | None:
    """The manifests as lines of JSON, compressed; None if it is over."""
    packer, parts = zlib.compressobj(), list[bytes]()
    with ThreadPoolExecutor(READERS) as pool:
        for start in range(0, len(manifests), CHUNK):
            if is_over():
                return None
            chunk = manifests[start : start + CHUNK]
            for body in pool.map(lambda key: bytes(_read(blobs, key)), chunk):
                parts.append(packer.compress(_slim(body) + b"\n"))
    return b"".join([*parts, packer.flush()])


def _slim(body: bytes) -> bytes:
    """A manifest without what only its exchange needs. What this version does not know stays."""
    facts: dict[str, Any] = msgspec.json.decode(body)
    convert(facts, Manifest)
    facts |= OF_THE_EXCHANGE
    facts["members"] = [{**member, "sections": []} for member in facts["members"]]
    return msgspec.json.encode(facts)


def _read(blobs: ObjectStore, key: str) -> memoryview:
    return wire.unseal(wire.MANIFEST, wire.fence(key), blobs.get(key))


def _read_block(blobs: ObjectStore, key: str) -> Iterable[Manifest]:
    """Raises NotFound or ValueError."""
    body = wire.unseal(wire.PAST, wire.fence(key), blobs.get(key))
    try:
        lines = zlib.decompress(body).splitlines()
        return [MANIFEST.decode(line) for line in lines]
    except (zlib.error, msgspec.MsgspecError) as error:
        raise ValueError(f"not a block of manifests: {error}") from error


def _is_complete(blobs: ObjectStore, key: str) -> bool:
    try:
        _read_block(blobs, key)
    except (NotFound, ValueError):
        return False
    return True
