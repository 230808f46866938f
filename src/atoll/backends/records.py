"""What the ranks of a training wrote about themselves, read in one question to their place."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from atoll.agent.process import read_record
from atoll.agent.record_store import RecordPlace
from atoll.agent.wrapper import BEAT, CLAIM, DESIRED, EXIT, GATE, START, name_of, read
from atoll.core.status import DesiredState

Json = dict[str, Any]
AttemptKey = tuple[int, int]  # rank, attempt

AT_ONCE = 16  # requests under way at a time
_NAME = re.compile(rf"(\d+)\.(\d+)\.({CLAIM}|{START}|{EXIT}|{BEAT})")


class AttemptRecord(NamedTuple):
    """One attempt. `quiet_s`: how long nothing of it has changed, by this reader's clock.

    `beaten_at`: when it last showed that it lived, as its place says, if this reader never saw it
    change: it may have been silent for long before.
    """

    claim: Json | None = None
    start: Json | None = None
    exit: Json | None = None
    quiet_s: float = 0.0
    beaten_at: float | None = None

    @property
    def host(self) -> str | None:
        document = self.exit or self.start or self.claim or {}
        return document.get("host")

    @property
    def started_at(self) -> float | None:
        at = (self.start or {}).get("at")
        return (self.exit or {}).get("startedAt") if at is None else at


class GangRecords(NamedTuple):
    desired: Json | None = None
    gate: Json | None = None
    attempts: dict[AttemptKey, AttemptRecord] = {}


class _Change(NamedTuple):
    """What a reader saw of the records of an attempt, and since when."""

    stamps: dict[str, int]
    since: float
    is_first: bool  # look at it


class RecordReader:
    """Reads the place of one training again and again. What never changes is read once."""

    def __init__(self, place: RecordPlace, clock: Callable[[], float] = time.monotonic) -> None:
        self.place = place
        self._clock = clock
        self._turn = threading.Lock()  # a reading that was cancelled goes on in its thread
        self._documents: dict[str, Json] = {}
        self._changed: dict[AttemptKey, _Change] = {}

    def read(self) -> GangRecords:
        with self._turn:
            return self._read()

    def _read(self) -> GangRecords:
        desired = read(self.place, DESIRED)
        if desired is None:
            return GangRecords()
        entries = self.place.entries()
        matches = {name: match for name in entries if (match := _NAME.fullmatch(name))}
        self._fetch(name for name, match in matches.items() if match[3] != BEAT)
        if GATE in entries:
            self._fetch([GATE])
        kinds: dict[AttemptKey, dict[str, int]] = {}
        for name, match in matches.items():
            key = int(match[1]), int(match[2])
            kinds.setdefault(key, {})[match[3]] = entries[name]
        attempts = {key: self._attempt(key, stamps) for key, stamps in kinds.items()}
        return GangRecords(desired, self._documents.get(GATE), attempts)

    def exit_of(self, key: AttemptKey) -> Json | None:
        """The record of an end, as of the last reading."""
        return self._documents.get(name_of(*key, EXIT))

    def claims(self) -> set[AttemptKey]:
        """The attempts that are claimed, as of the last reading."""
        names = [_NAME.fullmatch(name) for name in list(self._documents)]
        return {(int(m[1]), int(m[2])) for m in names if m is not None and m[3] == CLAIM}

    def _attempt(self, key: AttemptKey, stamps: dict[str, int]) -> AttemptRecord:
        last, now = self._changed.get(key), self._clock()
        if last is None or last.stamps != stamps:
            last = self._changed[key] = _Change(stamps, now, is_first=last is None)
        known = {kind: self._documents.get(name_of(*key, kind)) for kind in (CLAIM, START, EXIT)}
        beaten_at = stamps[BEAT] / 1e9 if last.is_first and BEAT in stamps else None
        quiet_s = now - last.since
        return AttemptRecord(known[CLAIM], known[START], known[EXIT], quiet_s, beaten_at)

    def _fetch(self, names: Iterable[str]) -> None:
        missing = [name for name in names if name not in self._documents]
        if len(missing) > AT_ONCE:
            with ThreadPoolExecutor(AT_ONCE) as pool:
                texts = list(pool.map(self.place.get, missing))
        else:
            texts = [self.place.get(name) for name in missing]
        for name, data in zip(missing, texts, strict=True):
            document = _document(name, data)
            if document is not None:
                self._documents[name] = document


def _document(name: str, data: bytes | None) -> Json | None:
    """What a record says; None if it is not whole yet."""
    if data is None:
        return None
    text = data.decode(errors="replace")
    if name.endswith("." + EXIT):
        return read_record(text)
    try:
        document = json.loads(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def desired_document(
    desired: DesiredState, before: Json | None, newest: dict[int, int], now: float
) -> Json:
    """The wish as wrappers read it. `newest`: the newest attempt of each rank that is known.

    `stops` only grows: an attempt that was told to stop stays so when its rank is wanted again.
    """
    stops = {rank: set(those) for rank, those in ((before or {}).get("stops") or {}).items()}
    for rank, attempt in desired.discarded_attempts.items():
        stops.setdefault(str(rank), set()).add(attempt)
    for rank, attempt in newest.items():
        if rank >= desired.size:
            stops.setdefault(str(rank), set()).add(attempt)
    return {
        "version": desired.version,
        "size": desired.size,
        "discarded": {str(rank): attempt for rank, attempt in desired.discarded_attempts.items()},
        "stops": {rank: sorted(those) for rank, those in stops.items()},
        "at": now,
    }


def desired_of(document: Json) -> DesiredState:
    discarded_attempts = {int(rank): attempt for rank, attempt in document["discarded"].items()}
    return DesiredState(
        version=document["version"], size=document["size"], discarded_attempts=discarded_attempts
    )


def stops_of(document: Json, rank: int) -> list[int]:
    """The attempts of a rank after which its restarts are counted anew."""
    stops: list[int] = document.get("stops", {}).get(str(rank), [])
    return stops


def restarts_of(document: Json, rank: int, attempt: int) -> int:
    earlier = [stop for stop in stops_of(document, rank) if stop < attempt]
    return attempt - max(earlier, default=-1) - 1
