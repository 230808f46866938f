"""What agents left of their ranks, as it is read from a store: records, and beside them results.

A record is read once, and `Facts` keeps it. A result is a file that the exit of its attempt names.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from atoll.agent.process import read_record
from atoll.agent.records import (
    ASK,
    CLAIM,
    DESIRED,
    EXIT,
    GATE,
    HEARTBEAT,
    STACKS,
    START,
    Facts,
    RecordStore,
)
from atoll.agent.result import NONE
from atoll.agent.wrapper import read
from atoll.backends.records import Ages, AttemptKey, FoldMemory, Json
from atoll.code.results import parse_result
from atoll.core.errors import ResultError, Temporary
from atoll.core.status import Training

RESULTS = "results"  # the folder or prefix; it stays as long as the logs
RETRY_S = 5.0  # for a file server that shows a new file late
AGAIN_S = 0.2
# Requests under way at a time: enough to hide the latency of a bucket, few for its rate limits.
READS_AT_ONCE = 16
# What a look may take before wrappers, too, are taken to be cut off from the store; a thousand
# records take a second.
LOOK_S = 3.0
_NAME = re.compile(rf"(\d+)\.(\d+)\.({CLAIM}|{START}|{EXIT}|{HEARTBEAT}|{ASK})")

_STACKS = re.compile(rf"(\d+)\.(\d+)\.{STACKS}")


class _Change(NamedTuple):
    """What a reader saw of the records of an attempt, and since when."""

    stamps: dict[str, int]
    since: float
    is_first: bool  # it has never seen another state of it


class _Batch(NamedTuple):
    """What one reading of a store found: values, which a thread may hand over."""

    desired: Json | None
    records: dict[str, Json]  # new ones, by name
    stamps: dict[AttemptKey, dict[str, int]]
    asking: frozenset[AttemptKey] = frozenset()  # attempts whose outer round timed out


class RecordReader:
    """The facts of one training, read from its store again and again. Records are read once."""

    def __init__(
        self, record_store: RecordStore, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.record_store = record_store
        self.facts = Facts()
        self.memory: FoldMemory = {}
        self.asking: frozenset[AttemptKey] = frozenset()
        self._clock = clock
        self._read: set[str] = set()
        self._names: dict[str, tuple[AttemptKey, str]] = {}  # as parsed: there are thousands
        self._changes: dict[AttemptKey, _Change] = {}
        self._looking_since: float | None = None
        self._blind_s = 0.0  # for so long the store has not answered, in all: no wrapper is silent

    def fetch(self) -> _Batch:
        """Read what is new. A thread may do that: it changes nothing here but when it began."""
        if self._looking_since is None:
            self._looking_since = self._clock()
        desired = read(self.record_store, DESIRED)
        if desired is None:
            return _Batch(None, {}, {})
        entries = self.record_store.entries()
        stamps: dict[AttemptKey, dict[str, int]] = {}
        asking = set()
        new = [GATE] if GATE in entries and GATE not in self._read else []
        for name, stamp in entries.items():
            own = self._names.get(name)
            if own is None:
                match = _NAME.fullmatch(name)
                if match is None:
                    continue
                own = self._names[name] = ((int(match[1]), int(match[2])), match[3])
            key, kind = own
            if kind == ASK:
                asking.add(key)
                continue
            stamps.setdefault(key, {})[kind] = stamp
            if kind != HEARTBEAT and name not in self._read:
                new.append(name)
        return _Batch(desired, self._fetch(new), stamps, frozenset(asking))

    def take(self, batch: _Batch) -> None:
        """Take in what was fetched. Without a desired state there are no facts: all are gone."""
        began, self._looking_since = self._looking_since, None
        if began is not None:
            self._blind_s += max(self._clock() - began - LOOK_S, 0.0)
        if batch.desired is None:
            self.facts, self.memory = Facts(), {}
            self._read, self._changes = set(), {}
            return
        for name, record in batch.records.items():
            self.facts.add(record)
            self._read.add(name)
        self.asking = batch.asking
        now = self._now()
        for key, own in batch.stamps.items():
            last = self._changes.get(key)
            if last is None or last.stamps != own:
                self._changes[key] = _Change(own, now, is_first=last is None)
        self.facts.add({**batch.desired, "t": DESIRED})

    def refresh(self) -> Facts:
        self.take(self.fetch())
        return self.facts

    def ages(self, ended_s: Mapping[AttemptKey, float]) -> Ages:
        """Return how long nothing has changed, as of the last refresh."""
        now, changes = self._now(), self._changes
        return Ages(
            {key: now - change.since for key, change in changes.items()},
            ended_s,
            {
                key: change.stamps[HEARTBEAT] / 1e9
                for key, change in changes.items()
                if change.is_first and HEARTBEAT in change.stamps
            },
        )

    def heartbeat_age_s(self, rank: int, attempt: int) -> float:
        change = self._changes.get((rank, attempt))
        return 0.0 if change is None else self._now() - change.since

    def exit_of(self, key: AttemptKey) -> Json | None:
        """Return the record of an end, as of the last refresh."""
        one = self.facts.attempt(*key)
        return None if one is None or one.exit is None else dict(one.exit)

    def claims(self) -> set[AttemptKey]:
        """Return the attempts that were claimed, as of the last refresh."""
        attempts = (one for own in self.facts.ranks.values() for one in own.values())
        return {(one.rank, one.attempt) for one in attempts if one.claim is not None}

    def is_claimed(self, key: AttemptKey) -> bool:
        """Return whether the attempt was claimed, as of the last refresh."""
        one = self.facts.attempt(*key)
        return one is not None and one.claim is not None

    def _now(self) -> float:
        """The time, of which only what the store answered in counts."""
        return self._clock() - self._blind_s

    def _fetch(self, missing: Sequence[str]) -> dict[str, Json]:
        if len(missing) > READS_AT_ONCE:
            with ThreadPoolExecutor(READS_AT_ONCE) as pool:
                texts = list(pool.map(self.record_store.get, missing))
        else:
            texts = [self.record_store.get(name) for name in missing]
        hit = {n: parse_record(n, data) for n, data in zip(missing, texts, strict=True)}
        return {name: record for name, record in hit.items() if record is not None}


def parse_record(name: str, data: bytes | None) -> Json | None:
    """Return the record in a file of that name; None if it is not whole yet."""
    if data is None:
        return None
    text, match = data.decode(errors="replace"), _NAME.fullmatch(name)
    if match is not None and match[3] == EXIT:
        record = read_record(text)
    else:
        try:
            record = json.loads(text)
        except ValueError:
            return None
    if not isinstance(record, dict):
        return None
    # The name is the key: who wrote the record cannot contradict it.
    key = {} if match is None else {"rank": int(match[1]), "attempt": int(match[2])}
    return {**record, "t": name if match is None else match[3], **key}


async def read_result(
    training: Training, rank: int, facts: Facts | None, read: Callable[[int], bytes | None]
) -> tuple[str, bytes] | None:
    """Return the encoding and the bytes of what the newest attempt of a rank set; None if nothing.

    `read` has the file of an attempt. Of a damaged one the encoding is `none`, as of a result that
    the rank could not leave. Raises Temporary if the exit names one that cannot be read.
    """
    status, what = training.status, f"the result of rank {rank}"
    known = {one.rank: one.attempt for one in (*status.removed_ranks, *status.ranks)}
    if (attempt := known.get(rank)) is None:
        return None
    one = None if facts is None else facts.attempt(rank, attempt)
    is_named = one is not None and bool((one.exit or {}).get("result"))
    deadline, trouble = time.monotonic() + RETRY_S, "it is not there"
    while True:
        try:
            data = await asyncio.to_thread(read, attempt)
        except FileNotFoundError:
            data = None
        except (OSError, Temporary) as error:
            data, trouble, is_named = None, str(error), True
        if data is not None:
            try:
                return parse_result(data)
            except ResultError as error:
                return NONE, f"{what} cannot be read: {error}".encode()
        if not is_named:
            return None
        if time.monotonic() >= deadline:
            raise Temporary(f"{what} cannot be read: {trouble}")
        await asyncio.sleep(AGAIN_S)


def read_stacks(store: RecordStore) -> list[Json]:
    """Return the stacks that wrappers took by themselves, of the newest attempt of each rank."""
    newest: dict[int, tuple[int, str]] = {}
    for name in store.entries():
        if match := _STACKS.fullmatch(name):
            rank, attempt = int(match[1]), int(match[2])
            newest[rank] = max(newest.get(rank, (0, "")), (attempt, name))
    with ThreadPoolExecutor(READS_AT_ONCE) as pool:
        documents = pool.map(lambda name: read(store, name), (newest[r][1] for r in sorted(newest)))
        return [document for document in documents if document is not None]
