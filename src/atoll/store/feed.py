"""How a write reaches others: watchers by the feed of changes, webhooks by the outbox."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sqlite3
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from atoll.core.ports import Change, Key
from atoll.core.status import Event
from atoll.core.webhooks import MAX_WAITING, Delivery, Webhook, event_body, message_id

BACKLOG = 1000  # changes of one watcher in memory; a slower one reads the log instead


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
    """The log of changes of a store."""

    def logged(self, after: int, key: Key | None) -> Iterable[Change]:
        """The changes after that version, in order."""

    def check_retained(self, after: int) -> None:
        """Raises Gone if the log begins after the next version."""


def subscription_keys(key: Key) -> tuple[Key | None, ...]:
    """The keys that a change of this training is published under: itself, its namespace, all."""
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
        for key in subscription_keys(change.training.key):
            for subscriber in self._followers.get(key, ()):
                subscriber.push(change)

    def close(self) -> None:
        for followers in self._followers.values():
            for subscriber in followers:
                subscriber.close()


# Messages that wait to be delivered to webhooks, in a SQLite file.
#
# An event and its messages are written in one transaction, so each is delivered though the control
# plane dies or the training is removed. What waits is bounded for each webhook, the oldest dropped.
# Nothing in it depends on the clock: messages are in the order in which they were stored.

SCHEMA = """
    create table deliveries (
        number integer primary key autoincrement, id text not null unique, webhook text not null,
        body blob not null, attempts integer not null default 0);
    create index deliveries_by_webhook on deliveries (webhook, number)
"""

log = logging.getLogger(__name__)


class Outbox:
    """`writing` is a transaction of the file, `reading` explains its errors."""

    def __init__(
        self,
        db: Callable[[], sqlite3.Connection],
        writing: Callable[[], AbstractContextManager[object]],
        reading: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._db = db
        self._writing = writing
        self._reading = reading
        self.webhooks: tuple[Webhook, ...] = ()
        self.on_news: Callable[[], object] = lambda: None

    def configure(self, webhooks: Iterable[Webhook]) -> None:
        """These are all webhooks there are; what waits for others is dropped."""
        self.webhooks = tuple(webhooks)
        marks = ", ".join("?" * len(self.webhooks))
        with self._writing():
            dropped = self._run(
                f"delete from deliveries where webhook not in ({marks})",
                *(webhook.id for webhook in self.webhooks),
            ).rowcount
        if dropped:
            log.warning("%s messages are dropped: their webhooks are not configured", dropped)

    def post_stored(self, uid: str, event: Event) -> None:
        """As `post`, for an event of a training in the same file, which is stored once."""
        if not self.webhooks:
            return
        row = self._run("select namespace, name from trainings where uid = ?", uid).fetchone()
        if row is not None:
            namespace, name = row
            self.post(namespace, name, uid, event, secrets.token_hex(12))

    def post(self, namespace: str, name: str, uid: str, event: Event, mark: str) -> None:
        """Inside a transaction: the event of a training waits for every webhook that wants it.

        `mark` tells the event from others of the training; with the same one it waits once.
        """
        for webhook in self.webhooks:
            if webhook.wants(namespace, event):
                self._run(
                    "insert or ignore into deliveries (id, webhook, body) values (?, ?, ?)",
                    *(message_id(webhook, uid, mark), webhook.id),
                    event_body(namespace, name, uid, event),
                )
                self._bound(webhook)
                self.on_news()

    def _bound(self, webhook: Webhook) -> None:
        dropped = self._run(
            "delete from deliveries where webhook = ?1 and number <= (select number from "
            "deliveries where webhook = ?1 order by number desc limit 1 offset ?2)",
            *(webhook.id, MAX_WAITING),
        ).rowcount
        if dropped:
            log.warning("webhook %s: too many messages wait; the oldest is dropped", webhook.host)

    def waiting(self, webhook: Webhook) -> list[str]:
        """The ids of the messages that wait, the oldest first."""
        with self._reading():
            rows = self._run(
                "select id from deliveries where webhook = ? order by number", webhook.id
            ).fetchall()
        return [row[0] for row in rows]

    def get(self, id: str) -> Delivery | None:
        """None if it was dropped."""
        with self._reading():
            row = self._run("select id, body, attempts from deliveries where id = ?", id).fetchone()
        return None if row is None else Delivery(*row)

    def remove(self, id: str) -> None:
        """It is delivered, or given up."""
        with self._writing():
            self._run("delete from deliveries where id = ?", id)

    def count_attempt(self, id: str) -> None:
        with self._writing():
            self._run("update deliveries set attempts = attempts + 1 where id = ?", id)

    def _run(self, statement: str, *values: object) -> sqlite3.Cursor:
        return self._db().execute(statement, values)
