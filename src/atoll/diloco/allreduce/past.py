"""Rosters of rounds long past: those of a block of rounds are folded into one object.

A roster decides its round because its key is created once. A replica that slept meanwhile must not
decide a round anew whose roster was folded away:

- The block is there before any of its rosters is deleted.
- Before that, the uploads of its rounds are deleted, so a roster that was decided on before the
  sleep cannot be completed, unless by a single member. Such a roster counts only if its round is
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

from atoll.core.decoders import convert
from atoll.core.errors import NotFound
from atoll.diloco.allreduce import wire
from atoll.diloco.allreduce.keys import Keys, block_of, parse_attempt
from atoll.diloco.allreduce.roster import ROSTER, Roster
from atoll.diloco.blobs import Blobs

log = logging.getLogger("atoll.allreduce")

READERS = 4
CHUNK = 100  # rosters that are read before the fold looks whether it has to stop
# What only those need who take part in the round.
OF_THE_EXCHANGE = {"layout": "", "owners": []}


def is_past(blobs: Blobs, keys: Keys, number: int) -> bool:
    """Whether the rosters of the round are folded."""
    try:
        blobs.get(keys.past(number), 0, 1)
    except NotFound:
        return False
    return True


def read_round(blobs: Blobs, keys: Keys, number: int) -> list[Roster]:
    """The rosters of a round that is past, attempt by attempt; none if it is not."""
    try:
        return [r for r in _read_block(blobs, keys.past(number)) if r.round == number]
    except NotFound:
        return []
    except ValueError as error:
        log.warning("%s cannot be used: %s", keys.past(number), error)
        return []


def read_rosters(blobs: Blobs, keys: Keys, first: int = 0) -> Iterator[Roster]:
    """All rosters of the run from round `first` on, in order, of rounds that are past or not.

    Those of the past are without `layout`, `owners` and `sections`. What is damaged is left out,
    and told of.
    """
    return (roster for roster, _ in read_dated_rosters(blobs, keys, first))


def read_dated_rosters(
    blobs: Blobs, keys: Keys, first: int = 0
) -> Iterator[tuple[Roster, datetime | None]]:
    """The same, with when each was decided; None for those of the past."""
    seen = -1
    for blob in blobs.find(keys.pasts()):
        if blob.key < keys.past(first):
            continue
        try:
            for roster in _read_block(blobs, blob.key):
                seen = max(seen, block_of(roster.round))
                if roster.round >= first:
                    yield roster, None
        except (NotFound, ValueError) as error:
            log.warning("%s cannot be used: %s", blob.key, error)
    for blob in blobs.find(keys.rosters(), keys.roster(first - 1, 9999) if first else None):
        where = parse_attempt(blob.key)
        if where is None or block_of(where[0]) <= seen:
            continue
        try:
            yield ROSTER.decode(_read(blobs, blob.key)), blob.modified
        except NotFound:  # folded since the listing
            folded = read_round(blobs, keys, where[0])
            yield from ((r, blob.modified) for r in folded if r.attempt == where[1])
        except (wire.Corrupt, msgspec.MsgspecError) as error:
            log.warning("%s cannot be used: %s", blob.key, error)


def fold(
    blobs: Blobs, keys: Keys, before: int, is_over: Callable[[], bool] = lambda: False
) -> bool:
    """Fold the oldest block of rounds before `before` that is not; whether it was the last.

    All who fold a block make the same of it, so any number may, and each may be killed.
    """
    blocks: dict[int, list[str]] = defaultdict(list)
    for blob in blobs.find(keys.rosters()):
        where = parse_attempt(blob.key)
        if where is not None and block_of(where[0]) < block_of(before):
            blocks[block_of(where[0])].append(blob.key)
    if blocks:
        first = min(blocks)
        if not _fold_block(blobs, keys.past(first), blocks[first], is_over):
            return False
    return len(blocks) <= 1


def _fold_block(
    blobs: Blobs, key: str, rosters: Sequence[str], is_over: Callable[[], bool]
) -> bool:
    """The block is in the store, and its rosters are not; False if it has to wait."""
    if not _is_whole(blobs, key):
        try:
            body = _pack(blobs, rosters, is_over)
        except NotFound:
            return False  # another folds it right now
        except (wire.Corrupt, msgspec.MsgspecError) as error:
            log.warning("%s cannot be made: %s", key, error)
            return False
        if body is None:
            return False
        data = wire.seal(wire.PAST, wire.fence(key), body)
        if not blobs.create(key, data) and not _is_whole(blobs, key):
            blobs.put(key, data)  # over damaged bytes: nothing else is ever written there
    # A roster that is not in the block was written by one who had slept: it decides nothing.
    blobs.delete(rosters)
    return True


def _pack(blobs: Blobs, rosters: Sequence[str], is_over: Callable[[], bool]) -> bytes | None:
    """The rosters as lines of JSON, compressed; None if it is over."""
    packer, parts = zlib.compressobj(), list[bytes]()
    with ThreadPoolExecutor(READERS) as pool:
        for start in range(0, len(rosters), CHUNK):
            if is_over():
                return None
            chunk = rosters[start : start + CHUNK]
            for body in pool.map(lambda key: bytes(_read(blobs, key)), chunk):
                parts.append(packer.compress(_slim(body) + b"\n"))
    return b"".join([*parts, packer.flush()])


def _slim(body: bytes) -> bytes:
    """A roster without what only its exchange needs. What this version does not know stays."""
    facts: dict[str, Any] = msgspec.json.decode(body)
    convert(facts, Roster)
    facts |= OF_THE_EXCHANGE
    facts["members"] = [{**member, "sections": []} for member in facts["members"]]
    return msgspec.json.encode(facts)


def _read(blobs: Blobs, key: str) -> memoryview:
    return wire.unseal(wire.ROSTER, wire.fence(key), blobs.get(key))


def _read_block(blobs: Blobs, key: str) -> Iterable[Roster]:
    """Raises NotFound or ValueError."""
    body = wire.unseal(wire.PAST, wire.fence(key), blobs.get(key))
    try:
        lines = zlib.decompress(body).splitlines()
        return [ROSTER.decode(line) for line in lines]
    except (zlib.error, msgspec.MsgspecError) as error:
        raise ValueError(f"not a block of rosters: {error}") from error


def _is_whole(blobs: Blobs, key: str) -> bool:
    try:
        _read_block(blobs, key)
    except (NotFound, ValueError):
        return False
    return True
