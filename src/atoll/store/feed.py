"""Passes each change to the watchers in the process that wrote it.

A subscriber that falls far behind must read the log again, so that no queue grows without bound.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Protocol

from atoll.core.ports import Change, Key

BACKLOG = 1000


class Subscriber:
    """A queue of changes. `next()` is None when the log has to be read again, or at the end."""

    def __init__(self) -> None:
        self._waiting: list[Change] = []
        self._is_behind = False
        self._wake = asyncio.Event()
        self.is_closed = False

    def push(self, change: Change) -> None:
        if len(self._waiting) >= BACKLOG:
            self._waiting.clear()
            self._is_behind = True
        elif not self._is_behind:
            self._waiting.append(change)
        self._wake.set()

    def close(self) -> None:
        self.is_closed = True
        self._wake.set()

    async def next(self) -> list[Change] | None:
        await self._wake.wait()
        if self.is_closed:
            return None
        self._wake.clear()
        if self._is_behind:
            self._is_behind = False
            return None
        batch, self._waiting = self._waiting, []
        return batch


class ChangeLog(Protocol):
    """The log of changes that a store still keeps."""

    def logged(self, after: int, key: Key | None) -> Iterable[Change]:
        """The changes after that version, in order."""

    def check_retained(self, after: int) -> None:
        """Raises Gone unless every change after that version is kept."""


def followed_as(key: Key) -> tuple[Key | None, ...]:
    """The keys under which a change of this training is told: itself, its namespace, all."""
    return key, (key[0], ""), None


class Feed:
    """The subscribers, each to one training, to those of a namespace, or to all of them."""

    def __init__(self) -> None:
        self._followers: defaultdict[Key | None, set[Subscriber]] = defaultdict(set)

    @contextlib.contextmanager
    def subscribe(self, key: Key | None) -> Iterator[Subscriber]:
        subscriber = Subscriber()
        self._followers[key].add(subscriber)
        try:
            yield subscriber
        finally:
            self._followers[key].discard(subscriber)
            if not self._followers[key]:
                del self._followers[key]

    async def follow(self, log: ChangeLog, after: int, key: Key | None) -> AsyncIterator[Change]:
        """Implements `watch` of a store: the log from that version on, then new changes."""
        log.check_retained(after)
        with self.subscribe(key) as live:
            cursor = after
            while True:
                for change in log.logged(cursor, key):
                    cursor = change.version
                    yield change
                while (batch := await live.next()) is not None:
                    for change in batch:
                        if change.version > cursor:
                            cursor = change.version
                            yield change
                if live.is_closed:
                    return
                log.check_retained(cursor)  # fell so far behind that the log must be read again

    def publish(self, change: Change) -> None:
        for key in followed_as(change.training.key):
            for subscriber in self._followers.get(key, ()):
                subscriber.push(change)

    def close(self) -> None:
        for followers in self._followers.values():
            for subscriber in followers:
                subscriber.close()
