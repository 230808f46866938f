"""Messages that wait to be delivered to webhooks, in a SQLite file.

An event and its messages are written in one transaction, so each is delivered though the control
plane dies or the training is removed. What waits is bounded for each webhook, the oldest dropped.
Nothing in it depends on the clock: messages are in the order in which they were stored.
"""

from __future__ import annotations

import logging
import secrets
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

from atoll.core.status import Event
from atoll.core.webhooks import MAX_WAITING, Delivery, Webhook, event_body, message_id

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
