"""Trainings and events in memory, for as long as the process lives.

No method waits, so calls on one event loop are never interleaved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence

from msgspec.structs import replace

from atoll.core.attempts import newest_kept
from atoll.core.errors import Conflict, Gone, NotFound
from atoll.core.model import encode
from atoll.core.ports import PAGE_BYTES, Change, Key, TrainingPage
from atoll.core.status import AttemptStatus, Event, Status, Training
from atoll.store.feed import Feed, followed_as
from atoll.store.pages import cut_page

LOG_CHANGES = 1000
EVENTS_KEPT = 1000


class MemoryStore:
    """The Store of `core/ports.py` in memory only."""

    def __init__(self, *, log_changes: int = LOG_CHANGES) -> None:
        self._trainings: dict[Key, Training] = {}
        self._idempotency_keys: dict[Key, str | None] = {}
        self._events: dict[Key, deque[Event]] = {}
        self._attempts: dict[Key, list[AttemptStatus]] = {}
        self._changes: deque[Change] = deque(maxlen=log_changes)
        self._version = 0
        self._event_id = 0
        self._feed = Feed()

    async def create(
        self,
        training: Training,
        *,
        idempotency_key: str | None = None,
        events: Sequence[Event] = (),
    ) -> Training:
        earlier = self._created_with(training.namespace, idempotency_key)
        if earlier is not None:
            if earlier.name != training.name:
                raise Conflict(
                    f"this idempotency key made the training {earlier.name!r}, "
                    f"not {training.name!r}"
                )
            return earlier
        if training.key in self._trainings:
            raise Conflict(
                f"a training named {training.name!r} exists: choose another name, or delete it"
            )
        self._idempotency_keys[training.key] = idempotency_key
        self._events[training.key] = deque(maxlen=EVENTS_KEPT)
        self._attempts[training.key] = []
        for event in events:
            self._add_event(training.key, event)
        return self._write(training)

    async def get(self, key: Key) -> Training:
        try:
            return self._trainings[key]
        except KeyError:
            raise NotFound("training", key[1]) from None

    async def list(self, namespace: str | None = None) -> Sequence[Training]:
        chosen = [t for t in self._trainings.values() if namespace in (None, t.namespace)]
        return sorted(chosen, key=lambda training: (training.name, training.namespace))

    async def page(
        self,
        namespace: str,
        *,
        after: str = "",
        limit: int = 100,
        max_bytes: int = PAGE_BYTES,
        phase: str | None = None,
        prefix: str = "",
    ) -> TrainingPage:
        chosen = [
            (training, len(encode(training)))
            for training in await self.list(namespace)
            if training.name > after
            and phase in (None, training.status.phase)
            and training.name.startswith(prefix)
        ]
        return cut_page(iter(chosen), limit, max_bytes)

    async def update_spec(self, training: Training) -> Training:
        current = self._current(training)
        is_changed = current.spec != training.spec
        return self._write(
            replace(
                current,
                spec=training.spec,
                deletion_requested_at=training.deletion_requested_at,
                generation=current.generation + is_changed,
            )
        )

    async def update_status(
        self,
        training: Training,
        status: Status,
        events: Sequence[Event] = (),
        attempts: Sequence[AttemptStatus] = (),
    ) -> Training:
        current = self._current(training)
        for event in events:
            self._add_event(current.key, event)
        if attempts:
            known = self._attempts[current.key]
            self._attempts[current.key] = newest_kept([*known, *attempts])
        return self._write(replace(current, status=status))

    async def remove(self, training: Training) -> None:
        current = self._trainings.get(training.key)
        if current is None or current.uid != training.uid:
            return
        for table in (self._trainings, self._events, self._attempts, self._idempotency_keys):
            del table[training.key]
        self._log(training, is_removed=True)

    async def record(self, key: Key, event: Event) -> None:
        await self.get(key)
        self._add_event(key, event)

    async def events(self, key: Key, *, since: float | None = None) -> Sequence[Event]:
        await self.get(key)
        recent = [event for event in self._events[key] if event.at >= (since or 0.0)]
        return sorted(recent, key=lambda event: (event.at, event.id), reverse=True)

    async def attempts(self, key: Key) -> Sequence[AttemptStatus]:
        await self.get(key)
        return list(self._attempts[key])

    def watch(self, after: int, key: Key | None = None) -> AsyncIterator[Change]:
        return self._feed.follow(self, after, key)

    async def source(self, training: Training) -> bytes:
        source = (await self.get(training.key)).spec.source
        if source is None:
            raise NotFound("source of training", training.name)
        return source.content

    async def code(self, training: Training) -> bytes:
        code = (await self.get(training.key)).spec.code
        if code is None:
            raise NotFound("code of training", training.name)
        return code.content

    async def version(self) -> int:
        return self._version

    def logged(self, after: int, key: Key | None) -> Iterable[Change]:
        return [
            change
            for change in self._changes
            if change.version > after and key in followed_as(change.training.key)
        ]

    def check_kept(self, after: int) -> None:
        oldest = self._version - len(self._changes)
        if not oldest <= after <= self._version:
            raise Gone(after, oldest)

    def _created_with(self, namespace: str, idempotency_key: str | None) -> Training | None:
        if idempotency_key is None:
            return None
        for key, known in self._idempotency_keys.items():
            if key[0] == namespace and known == idempotency_key:
                return self._trainings[key]
        return None

    def _current(self, training: Training) -> Training:
        current = self._trainings.get(training.key)
        if current is None or current.uid != training.uid:
            raise NotFound("training", training.name)
        if current.resource_version != training.resource_version:
            raise Conflict(
                f"training {training.name!r} was changed since version "
                f"{training.resource_version}: read it again"
            )
        return current

    def _write(self, training: Training) -> Training:
        stored = self._log(training)
        self._trainings[stored.key] = stored
        return stored

    def _log(self, training: Training, *, is_removed: bool = False) -> Training:
        """The training with the version of this write, which is logged."""
        self._version += 1
        stored = replace(training, resource_version=self._version)
        change = Change(version=self._version, training=stored, is_removed=is_removed)
        self._changes.append(change)
        self._feed.publish(change)
        return stored

    def _add_event(self, key: Key, event: Event) -> None:
        """Adds the event, or counts it onto the newest one if that says the same."""
        events = self._events[key]
        last = events[-1] if events else None
        if last is not None and _words(last) == _words(event):
            events[-1] = replace(last, count=last.count + 1, at=event.at)
            return
        self._event_id += 1
        events.append(replace(event, id=self._event_id))


def _words(event: Event) -> tuple[str, str, str]:
    return event.type, event.reason, event.message
