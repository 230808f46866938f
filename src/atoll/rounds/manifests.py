"""Reads the manifests of one run, look by look, at a bounded cost.

A look asks for one LIST, that of the uploads of the newest rounds, and for two objects beyond the
manifests that are new. Only who looks for the first time, or has missed rounds whose manifests were
folded, lists the manifests, too.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from typing import NamedTuple

from msgspec.structs import replace

from atoll.core.errors import NotFound, Permanent
from atoll.core.rounds import OpenRound, RoundFacts
from atoll.diloco.reports import facts_of
from atoll.diloco.round import objects
from atoll.diloco.round.objects import DamagedObject, Manifest, UploadKey
from atoll.objectstore import ObjectInfo, ObjectStore

MAX_AT_ONCE = 500  # manifests in one look
MAX_MANIFEST_BYTES = 64 * 2**20  # of a round of 100,000 replicas, or a block of 1,000 rounds
CHANGING_ROUNDS = 3  # rounds whose uploads may still arrive

log = logging.getLogger(__name__)

_ENDED = re.compile("upload/ended/[^/]+/([0-9]{5})[.](done|failed|left)")  # of any launch


class RunObservation(NamedTuple):
    """What a look found: rounds that are new or have changed, the open one, and who has left."""

    rounds: list[RoundFacts]
    waiting: OpenRound | None
    departures: dict[int, str]
    is_all: bool  # nothing is left for the next look


class RunReader:
    """Reads one run. Its rounds are one sequence; the fragments of a model take turns in it."""

    def __init__(self, store: ObjectStore, run: str, first: int = 0) -> None:
        """`first`: the rounds before it are known."""
        self._store = store
        self.run = run
        self._fragments = 1
        self._recent: dict[int, RoundFacts] = {}  # the newest rounds, which may change
        self._uploads: dict[int, set[str]] = {}  # the members' uploads in them
        self.following = first  # no manifest of it, or of a later round, is known
        self._is_behind = True  # manifests may have been folded since the last look

    def observe(self) -> RunObservation:
        changed: dict[int, RoundFacts] = {}
        since = max(0, self.following - CHANGING_ROUNDS)
        after = self._key(objects.from_round("upload", since)) if since else None
        listing = self._store.list(self._key("upload"), after)
        ahead = max((name.round for _, name in self._names(listing)), default=-1)
        count = 0
        for manifest, at in islice(self._new_manifests(ahead), MAX_AT_ONCE):
            count += 1
            self._fragments = manifest.fragments
            facts = facts_of(manifest, self.run, None if at is None else at.timestamp())
            changed[manifest.round] = self._recent[manifest.round] = facts
            self._uploads[manifest.round] = {member.upload for member in manifest.members}
            self.following = max(self.following, manifest.round + 1)
        is_all = count < MAX_AT_ONCE
        self._is_behind = not is_all
        for number in [each for each in self._recent if each < self.following - CHANGING_ROUNDS]:
            del self._recent[number], self._uploads[number]
        changed |= self._changed_uploads(listing)
        return RunObservation(
            [changed[number] for number in sorted(changed)],
            self._waiting(listing) if is_all else None,
            self._departures(listing),
            is_all,
        )

    def _key(self, key: str) -> str:
        return f"{self.run}/{key}"

    def _new_manifests(self, ahead: int) -> Iterator[tuple[Manifest, datetime | None]]:
        if self._is_behind:
            yield from self._listed()
            return
        number = self.following
        while (item := self._read(number)) is not None:
            yield item
            number += 1
        if ahead > number:  # it is decided, and folded, or was since the listing
            yield from self._listed()

    def _listed(self) -> Iterator[tuple[Manifest, datetime | None]]:
        """All manifests that are not known, in order: of history first."""
        first = self.following
        names = [
            round
            for info in self._store.list(self._key("manifest"))
            if (round := objects.parse_round(info.key.removeprefix(f"{self.run}/"))) is not None
        ]
        until = min((each for each in names if each >= first), default=None)
        if until is None or until > first:
            yield from self._folded(first, until)
        for number in names:
            if number >= first and (item := self._read(number)) is not None:
                yield item

    def _folded(self, first: int, until: int | None) -> Iterator[tuple[Manifest, None]]:
        for info in self._store.list(self._key("history")):
            try:
                body = bytes(self._store.get(info.key, max_bytes=MAX_MANIFEST_BYTES))
                block = objects.read_history(info.key, body)
            except (NotFound, DamagedObject) as error:
                log.warning("%s: %s", self._store.uri, error)
                continue
            for manifest in block.manifests:
                if manifest.round >= first and (until is None or manifest.round < until):
                    yield manifest, None

    def _read(self, number: int) -> tuple[Manifest, datetime] | None:
        name = objects.manifest_key(number)
        try:
            body, at = self._store.get_with_time(self._key(name), max_bytes=MAX_MANIFEST_BYTES)
            return objects.read_manifest(name, bytes(body)), at
        except NotFound:
            return None
        except DamagedObject as error:
            raise Permanent(f"{self._store.uri}: {self.run}: {error}") from error

    def _changed_uploads(self, listing: list[ObjectInfo]) -> dict[int, RoundFacts]:
        """Recent rounds of which uploads show more than before: who came late."""
        late: dict[int, set[int]] = {}
        for info, name in self._names(listing):
            uploads = self._uploads.get(name.round)
            if uploads is not None and info.key.removeprefix(f"{self.run}/") not in uploads:
                late.setdefault(name.round, set()).add(name.rank)
        changed = {}
        for number, facts in self._recent.items():
            known = {*facts.members, *facts.rejected}
            new = replace(facts, late=sorted({*facts.late, *late.get(number, ())} - known))
            if new != facts:
                changed[number] = self._recent[number] = new
        return changed

    def _waiting(self, listing: list[ObjectInfo]) -> OpenRound | None:
        uploaded = {name.rank for _, name in self._names(listing) if name.round == self.following}
        if not uploaded:
            return None
        fragments = self._fragments
        return OpenRound(
            fragment=self.following % fragments,
            round=self.following // fragments,
            uploaded=sorted(uploaded),
        )

    def _names(self, listing: list[ObjectInfo]) -> Iterator[tuple[ObjectInfo, UploadKey]]:
        for info in listing:
            name = objects.parse_upload(info.key.removeprefix(f"{self.run}/"))
            if name is not None:
                yield info, name

    def _departures(self, listing: list[ObjectInfo]) -> dict[int, str]:
        marks = (_ENDED.fullmatch(info.key.removeprefix(f"{self.run}/")) for info in listing)
        return {int(mark[1]): mark[2] for mark in marks if mark is not None}
