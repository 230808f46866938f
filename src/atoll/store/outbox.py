"""Webhooks in the SQLite file of a store, and what is still to be delivered to them.

An event and its deliveries are written in one transaction, so each is delivered though the control
plane dies or the training is removed. What waits is bounded for each webhook, the oldest dropped.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from atoll.core.errors import Conflict, NotFound
from atoll.core.model import decode, encode
from atoll.core.status import Event
from atoll.core.webhooks import (
    MOST_OF_NAMESPACE,
    MOST_WAITING,
    Delivery,
    Webhook,
    event_body,
    wants,
)
from atoll.store.schema import prepare

AT_ONCE = 4  # deliveries of one webhook

_COLUMNS = "id, namespace, url, events, created_at, delivered, dropped, last_at, last_error, secret"


class Outbox:
    """`writing` is a transaction of the store, `reading` explains errors of its file."""

    def __init__(
        self,
        db: Callable[[], sqlite3.Connection],
        writing: Callable[[], AbstractContextManager[object]],
        reading: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._db = db
        self._writing = writing
        self._reading = reading
        self.on_news: Callable[[], None] = lambda: None

    def _run(self, statement: str, words: tuple[object, ...] = ()) -> sqlite3.Cursor:
        return self._db().execute(statement, words)

    def add(self, namespace: str, url: str, events: Sequence[str], secret: str, now: float) -> str:
        """The id of a new webhook. Raises Conflict if the namespace has too many."""
        id = f"wh-{secrets.token_hex(6)}"
        with self._writing():
            (count,) = self._run(
                "select count(*) from webhooks where namespace = ?", (namespace,)
            ).fetchone()
            if count >= MOST_OF_NAMESPACE:
                raise Conflict(f"this namespace has {count} webhooks: remove one first")
            self._run(
                "insert into webhooks (id, namespace, url, events, created_at, secret) "
                "values (?, ?, ?, ?, ?, ?)",
                (id, namespace, url, encode(list(events)).decode(), now, secret),
            )
        return id

    def all(self, namespace: str) -> list[Webhook]:
        with self._reading():
            rows = self._run(
                f"select {_COLUMNS}, (select count(*) from deliveries where webhook = webhooks.id) "
                "from webhooks where namespace = ? order by created_at, id",
                (namespace,),
            )
            return [_webhook(row) for row in rows.fetchall()]

    def get(self, namespace: str, id: str) -> Webhook:
        """Raises NotFound."""
        for webhook in self.all(namespace):
            if webhook.id == id:
                return webhook
        raise NotFound("webhook", id)

    def remove(self, namespace: str, id: str) -> None:
        """With what waits for it. Raises NotFound."""
        with self._writing():
            gone = self._run("delete from webhooks where namespace = ? and id = ?", (namespace, id))
            if not gone.rowcount:
                raise NotFound("webhook", id)
            self._run("delete from deliveries where webhook = ?", (id,))

    def load(self, webhooks: Iterable[Webhook]) -> None:
        """These are all webhooks there are, and nothing waits for them."""
        with self._writing():
            self._run("delete from deliveries")
            self._run("delete from webhooks")
            for one in webhooks:
                self._run(
                    f"insert into webhooks ({_COLUMNS}) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (
                        *(one.id, one.namespace, one.url, encode(one.events).decode()),
                        *(one.created_at, one.delivered, one.dropped, one.last_at),
                        *(one.last_error, one.secret),
                    ),
                )

    def everywhere(self) -> list[tuple[Webhook, float | None]]:
        """The webhooks of all namespaces, each with the time of the oldest that waits for it."""
        with self._reading():
            rows = self._run(
                f"select {_COLUMNS}, "
                "(select count(*) from deliveries where webhook = webhooks.id), "
                "(select min(created_at) from deliveries where webhook = webhooks.id) "
                "from webhooks order by id"
            )
            return [(_webhook(row[:-1]), row[-1]) for row in rows.fetchall()]

    def note(self, uid: str, event: Event, now: float) -> None:
        """Inside a transaction: the event is delivered to every webhook that wants it."""
        row = self._run("select namespace, name from trainings where uid = ?", (uid,)).fetchone()
        if row is None:
            return
        namespace, name = row
        self._post(namespace, name, uid, event, now)

    def tell(
        self,
        namespace: str,
        name: str,
        uid: str,
        event: Event,
        mark: str,
        since: Callable[[str, float], float],
    ) -> None:
        """As `note`, of a training that is stored elsewhere. Told again, it is the same message.

        `mark` tells the event from others of the training. `since` says of a webhook, from its id
        and when it was made, after which time events are for it.
        """
        with self._writing():
            self._post(namespace, name, uid, event, event.at, mark, since)

    def _post(
        self,
        namespace: str,
        name: str,
        uid: str,
        event: Event,
        now: float,
        mark: str = "",
        since: Callable[[str, float], float] = lambda id, made_at: float("-inf"),
    ) -> None:
        hooks = self._run(
            "select id, events, created_at from webhooks where namespace = ?", (namespace,)
        ).fetchall()
        for id, events, made_at in hooks:
            if event.at > since(id, made_at) and wants(decode(events, list[str]), event):
                body = event_body(namespace, name, uid, event)
                self._run(
                    "insert or ignore into deliveries values (?, ?, ?, ?, 0, ?)",
                    (_message_id(id, uid, mark), id, body, now, now),
                )
                self._bound(id)
                self.on_news()

    def _bound(self, webhook: str) -> None:
        gone = self._run(
            "delete from deliveries where webhook = ?1 and id in (select id from deliveries "
            "where webhook = ?1 order by created_at desc, rowid desc limit -1 offset ?2)",
            (webhook, MOST_WAITING),
        ).rowcount
        if gone:
            self._run("update webhooks set dropped = dropped + ? where id = ?", (gone, webhook))

    def due(self, now: float) -> list[Delivery]:
        """What is to be sent by now, the oldest first; of each webhook only so many, as one that is
        slow must not hold up the others."""
        with self._reading():
            rows = self._run(
                "select d.id, webhook, namespace, url, secret, body, d.created_at, attempts from "
                "(select *, row_number() over (partition by webhook order by created_at, rowid) "
                "as turn from deliveries where due_at <= ?) as d "
                "join webhooks on webhooks.id = webhook where turn <= ? order by d.created_at",
                (now, AT_ONCE),
            ).fetchall()
        return [Delivery(*row) for row in rows]

    def next_due(self) -> float | None:
        with self._reading():
            row = self._run("select min(due_at) from deliveries").fetchone()
        return None if row[0] is None else float(row[0])

    def delivered(self, delivery: Delivery, now: float) -> None:
        with self._settled(delivery):
            self._run(
                "update webhooks set delivered = delivered + 1, last_at = ?, last_error = '' "
                "where id = ?",
                (now, delivery.webhook),
            )

    def given_up(self, delivery: Delivery, error: str, now: float) -> None:
        with self._settled(delivery):
            self._run(
                "update webhooks set dropped = dropped + 1, last_at = ?, last_error = ? "
                "where id = ?",
                (now, error, delivery.webhook),
            )

    def postponed(self, delivery: Delivery, error: str, now: float, due_at: float) -> None:
        with self._writing():
            self._run(
                "update deliveries set attempts = attempts + 1, due_at = ? where id = ?",
                (due_at, delivery.id),
            )
            self._run(
                "update webhooks set last_at = ?, last_error = ? where id = ?",
                (now, error, delivery.webhook),
            )

    @contextlib.contextmanager
    def _settled(self, delivery: Delivery) -> Iterator[None]:
        with self._writing():
            self._run("delete from deliveries where id = ?", (delivery.id,))
            yield


def _message_id(webhook: str, uid: str, mark: str) -> str:
    if not mark:
        return f"msg_{secrets.token_hex(12)}"
    return "msg_" + hashlib.sha256(f"{webhook} {uid} {mark}".encode()).hexdigest()[:24]


def outbox_in_memory() -> Outbox:
    """One whose webhooks and messages are kept elsewhere, too."""
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    prepare(db, Path(":memory:"), is_owner=True)

    @contextlib.contextmanager
    def writing() -> Iterator[None]:
        with db:
            db.execute("begin immediate")
            yield

    return Outbox(lambda: db, writing)


def _webhook(row: tuple[object, ...]) -> Webhook:
    id, namespace, url, events, created_at, delivered, dropped, last_at, error, secret, left = row
    return Webhook(
        id=str(id),
        namespace=str(namespace),
        url=str(url),
        events=decode(str(events), list[str]),
        created_at=float(created_at),  # type: ignore[arg-type]
        delivered=int(delivered),  # type: ignore[call-overload]
        dropped=int(dropped),  # type: ignore[call-overload]
        waiting=int(left),  # type: ignore[call-overload]
        last_at=None if last_at is None else float(last_at),  # type: ignore[arg-type]
        last_error=str(error),
        secret=str(secret),
    )
