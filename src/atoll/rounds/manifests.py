"""Reads the manifests of one run, look by look, at a bounded cost.

A look asks for one LIST, that of the uploads of the newest rounds, and for two objects beyond the
manifests that are new. Only who looks for the first time, or has missed rounds whose manifests were
folded, lists the manifests, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from atoll.core.errors import NotFound, Permanent
from atoll.core.rounds import OpenRound, RoundFacts
from atoll.diloco.allreduce import wire
from atoll.diloco.allreduce.keys import LEFT, Keys, UploadName, parse_upload
from atoll.diloco.allreduce.manifest import MANIFEST, Manifest
from atoll.diloco.allreduce.past import read_dated_manifests
from atoll.diloco.facts import facts_of, fragment_of
from atoll.objectstore import ObjectInfo, ObjectStore

MAX_AT_ONCE = 500  # manifests in one look
MAX_MANIFEST_BYTES = 64 * 2**20  # bytes
CHANGING_ROUNDS = 3  # rounds whose uploads may still arrive

log = logging.getLogger(__name__)


class RunObservation(NamedTuple):
    """What a look found: rounds that are new or have changed, the open one, and who has left."""

    rounds: list[RoundFacts]
    waiting: OpenRound | None
    departures: dict[int, str]
    is_all: bool  # nothing is left for the next look


class RunReader:
    """Reads one run: a fragment of a training."""

    def __init__(self, blobs: ObjectStore, run: str, first: int = 0) -> None:
        """`first`: the rounds before it are known."""
        self._blobs = blobs
        self._keys = Keys(run)
        self.name = run
        self.run, self._fragment, _ = fragment_of(run)
        self._recent: dict[int, RoundFacts] = {}  # the newest rounds, which may change
        self._uploads: dict[int, set[str]] = {}  # the members' uploads in them
        self.following = first  # no manifest of it, or of a later round, is known
        self._is_behind = True  # manifests may have been folded since the last look

    def observe(self) -> RunObservation:
        changed: dict[int, RoundFacts] = {}
        since = max(0, self.following - CHANGING_ROUNDS)
        listing = self._blobs.list(
            self._keys.uploads(), self._keys.uploads(since) if since else None
        )
        ahead = max((name.round for _, name in _names(listing)), default=-1)
        manifests = islice(self._new_manifests(ahead), MAX_AT_ONCE)
        number = 0
        for manifest, at in manifests:
            number += 1
            facts = facts_of(manifest, None if at is None else at.timestamp())
            changed[manifest.round] = self._recent[manifest.round] = facts
            self._uploads[manifest.round] = {member.upload for member in manifest.members}
            self.following = max(self.following, manifest.round + 1)
        is_all = number < MAX_AT_ONCE
        self._is_behind = not is_all
        for number in [n for n in self._recent if n < self.following - CHANGING_ROUNDS]:
            del self._recent[number], self._uploads[number]
        changed |= self._changed_uploads(listing)
        return RunObservation(
            [changed[number] for number in sorted(changed)],
            self._waiting(listing) if is_all else None,
            _departures(listing),
            is_all,
        )

    def _new_manifests(self, ahead: int) -> Iterator[tuple[Manifest, datetime | None]]:
        if self._is_behind:
            yield from self._listed()
            return
        while True:
            newest = self.following - 1
            if newest >= 0:
                yield from self._further_attempts(newest)
            manifest = self._read(newest + 1, 0)
            if manifest is None:
                if ahead > newest + 1:  # it is decided, and folded, or was since the listing
                    yield from self._listed()
                return
            if newest >= 0:  # one may have come before the next round was decided
                yield from self._further_attempts(newest)
            yield manifest

    def _listed(self) -> Iterator[tuple[Manifest, datetime | None]]:
        first = max(0, self.following - 1)
        known = self._recent.get(first)
        for manifest, at in read_dated_manifests(self._blobs, self._keys, first):
            if known is None or (manifest.round, manifest.attempt) > (known.round, known.attempt):
                yield manifest, at

    def _further_attempts(self, number: int) -> Iterator[tuple[Manifest, datetime | None]]:
        while True:
            known = self._recent.get(number)
            following = self._read(number, 0 if known is None else known.attempt + 1)
            if following is None:
                return
            yield following

    def _read(self, number: int, attempt: int) -> tuple[Manifest, datetime] | None:
        key = self._keys.manifest(number, attempt)
        try:
            data, at = self._blobs.get_with_time(key, max_bytes=MAX_MANIFEST_BYTES)
            body = wire.unseal(wire.MANIFEST, wire.fence(key), data)
            return MANIFEST.decode(body), at
        except NotFound:
            return None
        except (wire.Corrupt, msgspec.MsgspecError) as error:
            raise Permanent(f"{self._blobs.uri}: {key} is not a manifest: {error}") from error

    def _changed_uploads(self, listing: list[ObjectInfo]) -> dict[int, RoundFacts]:
        """Recent rounds of which uploads show more than before: sizes, and who came late."""
        sizes: dict[int, dict[int, int]] = {}
        late: dict[int, set[int]] = {}
        carried: dict[str, int] = {}  # by upload: bytes of further processes
        for blob in listing:
            _, is_part, suffix = blob.key.partition("/part/")
            if is_part:
                stem = suffix.rpartition("/")[0]
                carried[stem] = carried.get(stem, 0) + blob.size
        for blob, name in _names(listing):
            uploads = self._uploads.get(name.round)
            if uploads is None:
                continue
            if blob.key in uploads:
                own = blob.size + carried.get(blob.key.rpartition("/")[2], 0)
                sizes.setdefault(name.round, {})[name.rank] = own
            else:
                late.setdefault(name.round, set()).add(name.rank)
        changed = {}
        for number, facts in self._recent.items():
            members, blamed = set(facts.members), set(facts.blamed)
            known = sizes.get(number, {})
            new = replace(
                facts,
                late=sorted({*facts.late, *late.get(number, ())} - members - blamed),
                sizes=[known[rank] for rank in facts.members]
                if facts.members and members <= set(known)
                else facts.sizes,
            )
            if new != facts:
                changed[number] = self._recent[number] = new
        return changed

    def _waiting(self, listing: list[ObjectInfo]) -> OpenRound | None:
        open_uploads = {n.rank for _, n in _names(listing) if n.round == self.following}
        if not open_uploads:
            return None
        return OpenRound(
            fragment=self._fragment, round=self.following, uploaded=sorted(open_uploads)
        )


def _names(listing: list[ObjectInfo]) -> Iterator[tuple[ObjectInfo, UploadName]]:
    for blob in listing:
        name = parse_upload(blob.key, blob.size)
        if name is not None:
            yield blob, name


def _departures(listing: list[ObjectInfo]) -> dict[int, str]:
    marks = (LEFT.search(blob.key) for blob in listing)
    return {int(mark[2]): mark[3] for mark in marks if mark is not None}
