"""Trainings as rows, in memory and always current, so that lists of thousands are cheap.

The text of a row is decided here, with `core/describe.py`; a browser only draws it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from msgspec.structs import replace

from atoll.controller.informer import Informer
from atoll.core.describe import describe_end, describe_phase, describe_status
from atoll.core.errors import ValidationError
from atoll.core.executors import ResourceUse, executor_problem
from atoll.core.model import Model
from atoll.core.phase import Phase, describe_reason
from atoll.core.ports import Store, Update
from atoll.core.settings import GROUP
from atoll.core.status import Training
from atoll.core.text import escape_control

# A cache for answers that are expensive to compute: many tabs that ask often cost a server of one
# core no more than a tenth of it.

MAX_ENTRIES = 64  # charts of some five pages
# An answer is valid for ten times as long as it took: computing takes a tenth of a core at most.
TIMES = 10
MAX_S = 30.0  # and never longer: people expect a chart to move


class TTLCache:
    """Bodies of answers by key. One caller at a time computes each, in a thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._entries: OrderedDict[Hashable, tuple[float, bytes]] = OrderedDict()
        self._locks: dict[Hashable, asyncio.Lock] = {}

    async def body(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        lock = self._locks.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                good_until, body = self._entries.get(key, (0.0, b""))
                if good_until > self._now():
                    return body
                started = self._now()
                body = await asyncio.to_thread(make)
                spent = self._now() - started
                self._entries[key] = (self._now() + min(MAX_S, TIMES * spent), body)
                self._entries.move_to_end(key)
                while len(self._entries) > MAX_ENTRIES:
                    self._entries.popitem(last=False)
                return body
        finally:
            if not lock.locked():
                self._locks.pop(key, None)


RECENT_S = 86_400.0  # a failure needs attention for a day
PENDING_S = 300.0  # longer than pulling most images takes
SORTS = ("since", "name", "phase", "world", "ran", "where")
SENTENCE = 300  # characters: three lines of the table
MAX_RECENT = 10_000  # changes: a tab that missed more reads everything again
HOSTS = 1_000  # host names of one training that the filter searches: some 20 kB
MAX_FAILED = 50  # recent failures of a group that a browser can mark as seen: 2 kB an answer


class TrainingRow(Model, frozen=True, omit_defaults=False):
    """One training in a list. Times are seconds since the epoch."""

    name: str
    display_name: str  # as it was given
    group: str  # of trainings that belong together; may be empty
    uid: str
    phase: str
    cause: str  # the first words, in bold; may be empty
    sentence: str
    ready: int
    target: int
    min: int
    restarts: int
    started_at: float | None
    ended_at: float | None
    since: float  # when it was stored, started or ended: the newest
    where: str
    version: int
    is_over: bool = False
    is_stopping: bool = False
    is_below: bool = False
    is_stalled: bool = False
    round: int | None = None  # committed outer rounds; None if there are none
    loss: float | str | None = None
    spark: list[float] = []

    def needs_attention(self, now: float) -> bool:
        if self.phase == "failed":
            return now - self.since < RECENT_S
        if self.phase in ("pending", "new"):
            return now - self.since > PENDING_S or self.is_below
        return self.is_stalled

    def ran_s(self, now: float) -> float:
        if self.started_at is None:
            return -1.0
        return max(0.0, (self.ended_at or now) - self.started_at)


class RowTotals(Model, frozen=True, omit_defaults=False):
    """How many trainings there are, by phase, before any filter."""

    all: int
    needs_attention: int
    by_phase: dict[str, int]


class RowGroup(Model, frozen=True, omit_defaults=False):
    """Trainings with the same label `group`. `failed` has uids of recent failures, newest first."""

    by_phase: dict[str, int]
    failed: list[str]


class RowPage(Model, frozen=True, omit_defaults=False):
    """`resources`: what ranks of this machine asked for, where the control plane counts that.

    With `groups`, a group that is not open has one of its rows in `items`, and an open one has all
    of them, one after another.
    """

    items: list[TrainingRow]
    groups: dict[str, RowGroup]
    matched: int
    totals: RowTotals
    version: int
    now: float
    resources: list[ResourceUse] = []


def row_of(training: Training) -> TrainingRow:
    status, world = training.status, training.world
    is_over = status.phase.is_terminal
    ends = [e.ended_at for e in status.rank_exits if e.ended_at is not None]
    ended_at = max(ends, default=status.ended_at) if is_over else None
    since = status.ended_at if is_over else status.started_at
    cause, sentence = _sentence(training)
    return TrainingRow(
        name=training.name,
        display_name=training.display_name,
        group=training.spec.labels.get(GROUP, ""),
        uid=training.uid,
        phase=status.phase.value or "new",
        cause=cause[:SENTENCE],
        sentence=sentence[:SENTENCE],
        ready=status.world.ready,
        target=world.target,
        min=world.min,
        restarts=sum(rank.restarts for rank in (*status.ranks, *status.removed_ranks)),
        started_at=status.started_at,
        ended_at=ended_at,
        since=since or training.created_at,
        where=training.executor,
        version=training.resource_version,
        is_over=is_over,
        is_stopping=bool(status.failing) or (training.is_cancelling and not is_over),
        is_below=status.started_at is not None and world.below_minimum and not is_over,
        is_stalled=bool(status.stalled) and not is_over,
    )


def _sentence(training: Training) -> tuple[str, str]:
    """The cause, and the sentence after it."""
    status, name = training.status, training.display_name
    if status.phase.is_terminal:
        terms = describe_end(training).removeprefix(f"{name} ")
        cause = status.root_cause
        if cause is None:
            return "", terms.removeprefix(f"{status.phase.value}: ")
        why = describe_reason(cause.termination_reason, cause.message)
        sentence = terms.removeprefix("failed: ")
        return escape_control(why), sentence.removesuffix(f": {why}") if why else sentence
    if where := executor_problem(training):
        return f"Executor {where.removeprefix('Executor').lower()}", escape_control(status.message)
    waits = [rank for rank in status.ranks if rank.phase == "Pending" and rank.message]
    if status.phase is Phase.PENDING and waits:
        terms = escape_control(waits[0].message)
        more = f" (and {len(waits) - 1} more)" if len(waits) > 1 else ""
        return "", f"rank {waits[0].rank}: {terms}{more}"
    if status.phase is Phase.NONE:
        return "", "stored; its ranks start soon"
    if status.failing or training.is_cancelling:
        return "", describe_status(status)
    return "", describe_phase(status) if status.message else describe_status(status)


class Rows:
    """The rows of every namespace that was read once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows: dict[str, dict[str, TrainingRow]] = {}  # by namespace, then name
        self._readings: dict[str, asyncio.Task[None]] = {}  # by namespace
        self._removed: dict[str, set[str]] = {}  # by namespace: uids removed while it is read
        self._texts: dict[str, str] = {}  # by uid: what the filter searches
        self._changed = asyncio.Condition()
        self._recent: deque[tuple[int, str, str]] = deque(maxlen=MAX_RECENT)
        self.version = 0

    async def follow(self, informer: Informer) -> None:
        """Keeps the rows up to date until it is cancelled."""
        await informer.uids()
        self.version = informer.version
        async for update in informer.updates():
            if update.key[0] in self._rows:
                if update.is_removed:
                    self._drop(update)
                elif update.training is not None:
                    self._put(update.training)
            self.version = max(self.version, update.version)
            self._recent.append((update.version, *update.key))
            async with self._changed:
                self._changed.notify_all()

    async def read(self, namespace: str) -> None:
        """Makes the rows of a namespace once; `follow` keeps them current."""
        reading = self._readings.get(namespace)
        if reading is None or (reading.done() and (reading.cancelled() or reading.exception())):
            reading = asyncio.create_task(self._read(namespace), name=f"rows of {namespace}")
            self._readings[namespace] = reading
        await asyncio.shield(reading)  # other callers wait for it too

    async def _read(self, namespace: str) -> None:
        self._rows.setdefault(namespace, {})
        removed = self._removed[namespace] = set()
        try:
            more: str | None = ""
            while more is not None:
                page = await self._store.page(namespace, after=more)
                for training in page.items:
                    if training.uid not in removed:
                        self._put(training)
                more = page.more
                await asyncio.sleep(0)  # let other requests in between pages
        finally:
            del self._removed[namespace]

    async def wait(self, after: int) -> int:
        """Waits for a version above `after` and returns it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.version > after)
        return self.version

    def _put(self, training: Training) -> None:
        rows = self._rows.setdefault(training.namespace, {})
        if training.name in rows:
            if rows[training.name].version > training.resource_version:
                return
            self._texts.pop(rows[training.name].uid, None)
        row = rows[training.name] = row_of(training)
        hosts = {rank.node for rank in training.status.ranks if rank.node}
        named = (*training.spec.labels.items(), *training.settings.items())
        pairs = " ".join(f"{name}={value}" for name, value in named)
        text = " ".join(
            (
                row.name,
                row.display_name,
                pairs,
                row.cause,
                row.sentence,
                row.where,
                *sorted(hosts)[:HOSTS],
            )
        )
        self._texts[row.uid] = text.lower()

    def _drop(self, update: Update) -> None:
        namespace, name = update.key
        self._removed.get(namespace, set()).add(update.uid)
        rows = self._rows[namespace]
        if name in rows and rows[name].uid == update.uid:
            del rows[name]
            self._texts.pop(update.uid, None)

    def changed(self, namespace: str, after: int) -> list[str] | None:
        """The names that changed after a version; None if the oldest changes are dropped."""
        if self._recent and self._recent[0][0] > after + 1 and len(self._recent) == MAX_RECENT:
            return None
        names = (n for version, ns, n in self._recent if version > after and ns == namespace)
        return list(dict.fromkeys(names))

    def all_of(self, namespace: str) -> list[TrainingRow]:
        return list(self._rows.get(namespace, {}).values())

    def page(
        self,
        namespace: str,
        *,
        q: str,
        phase: str,
        sort: str,
        offset: int,
        limit: int,
        now: float,
        group: str = "",
        opened: Sequence[str] = (),
    ) -> RowPage:
        """The matching rows, sorted; `-since` sorts descending. Raises ValidationError.

        Without a filter and a sort order, trainings of a group are together.
        """
        rows = self.all_of(namespace)
        phases = Counter(row.phase for row in rows)
        attention = sum(row.needs_attention(now) for row in rows)
        totals = RowTotals(all=len(rows), needs_attention=attention, by_phase=dict(phases))
        terms = q.lower().split()
        matching = [
            row
            for row in rows
            if group in ("", row.group) and _matches(row, self._texts[row.uid], terms, phase, now)
        ]
        ordered = _sorted(matching, sort, now)
        groups: dict[str, RowGroup] = {}
        if not (terms or phase or sort or group):
            ordered, groups = _grouped(ordered, opened, now)
        items = ordered[offset : offset + limit]
        return RowPage(
            items=items,
            groups={row.group: groups[row.group] for row in items if row.group in groups},
            matched=len(ordered),
            totals=totals,
            version=self.version,
            now=now,
        )


def _matches(row: TrainingRow, text: str, terms: list[str], phase: str, now: float) -> bool:
    if phase == "attention" and not row.needs_attention(now):
        return False
    if phase not in ("", "attention") and row.phase != phase:
        return False
    for term in terms:
        field, _, value = term.partition(":")
        if value and field == "phase":
            is_match = row.phase.startswith(value)
        elif value and field == "where":
            is_match = row.where.lower().startswith(value)
        else:
            is_match = term in text
        if not is_match:
            return False
    return True


def _sorted(rows: Sequence[TrainingRow], sort: str, now: float) -> list[TrainingRow]:
    name, is_down = sort.removeprefix("-"), sort.startswith("-")
    if name == "":  # groups: running, failed recently, ended; newest first
        return sorted(rows, key=lambda row: (_group(row, now), -row.since, row.name))
    if name not in SORTS:
        raise ValidationError("sort", sort, f"expected one of {', '.join(SORTS)}")
    keys: dict[str, Callable[[TrainingRow], Any]] = {
        "since": lambda row: row.since,
        "name": lambda row: row.name,
        "phase": lambda row: row.phase,
        "world": lambda row: row.ready / max(1, row.target),
        "ran": lambda row: row.ran_s(now),
        "where": lambda row: row.where,
    }
    by_name = sorted(rows, key=lambda row: row.name)
    return sorted(by_name, key=keys[name], reverse=is_down)


def _grouped(
    rows: Sequence[TrainingRow], opened: Sequence[str], now: float
) -> tuple[list[TrainingRow], dict[str, RowGroup]]:
    """The rows, with the trainings of a group where the first of them is, and the groups of two and
    more. Of a group that is not opened, the first row stands for all."""
    members: dict[str, list[TrainingRow]] = {}
    for row in rows:
        members.setdefault(row.group, []).append(row)
    groups = {
        name: RowGroup(
            by_phase=dict(Counter(row.phase for row in each)),
            failed=[row.uid for row in each if row.phase == "failed" and row.needs_attention(now)][
                :MAX_FAILED
            ],
        )
        for name, each in members.items()
        if name and len(each) > 1
    }
    out: list[TrainingRow] = []
    for row in rows:
        if row.group not in groups:
            out.append(row)
        elif members[row.group][0] is row:
            out += members[row.group] if row.group in opened else [row]
    return out, groups


def _group(row: TrainingRow, now: float) -> int:
    """What runs comes first, and of that what needs attention: old failures push nothing away."""
    is_odd = row.needs_attention(now)
    if row.phase in ("new", "pending", "ready"):
        return 0 if is_odd else 1
    return 2 if is_odd else 3


def with_spark(row: TrainingRow, values: Sequence[float], last: float | str) -> TrainingRow:
    return replace(row, loss=last, spark=list(values))
