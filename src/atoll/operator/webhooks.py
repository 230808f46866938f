"""Webhooks of the operator: the leader puts the events of trainings into its outbox, a file.

The events of a training are in its status. The file says how far they were read, so the next leader
continues from there if it has the same volume. One with another file sends the newest events again,
with the same ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from atoll.backends.kubernetes.client import Cluster
from atoll.core.errors import AtollError, Gone, Temporary
from atoll.core.status import Event
from atoll.core.webhooks import Webhook
from atoll.metrics.file import MetricFile
from atoll.operator.resource import read_list
from atoll.store.feed import SCHEMA, Outbox

Json = dict[str, Any]
Mark = tuple[int, int]  # id and count of an event

log = logging.getLogger(__name__)

KIND = "trainings"
RETRY_S = 1.0  # until a watch that broke is opened again
LISTED = 50  # objects of one request, each of at most 1 MB
# Events are made by leaders alone, so those that the last one did not read are about as old as the
# change of the lead: a lease of 15 s, and a pod that has to be started on another node.
EVENTS_BACK_S = 600.0
NOTED = """;
    create table noted (
        uid text primary key, event integer not null, count integer not null) without rowid
"""


class WebhookEvents:
    """Reads the events of all trainings that are served, while this operator leads."""

    def __init__(
        self, cluster: Cluster, namespace: str | None, path: Path, webhooks: Sequence[Webhook]
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._file = MetricFile(path, SCHEMA + NOTED, "messages to webhooks")
        self.outbox = Outbox(lambda: self._file.db, self._writing, lambda: self._file)
        self.outbox.configure(webhooks)
        with self._file:
            rows = self._file.db.execute("select uid, event, count from noted").fetchall()
        self._noted: dict[str, Mark] = {uid: (event, count) for uid, event, count in rows}
        self._since = cluster.time() - EVENTS_BACK_S
        self._version = ""  # of the trainings that were read; empty: none yet

    def close(self) -> None:
        self._file.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with self._file, self._file.transaction():
            yield

    async def begin(self) -> None:
        """Stores the events of all trainings. A leader does this before it removes any of them."""
        try:
            self._version = await self._note_all()
        except AtollError as error:  # trainings are looked after all the same
            log.warning("events for webhooks cannot be read: %s; trying again", error)

    async def run(self) -> None:
        """Until it is cancelled; returns at once if there is no webhook."""
        while self.outbox.webhooks:
            try:
                self._version = self._version or await self._note_all()
                await self._watch()
            except Gone:
                self._version = ""
            except Temporary as error:
                log.info("watching events: %s; trying again", error)
                await asyncio.sleep(RETRY_S)

    async def _note_all(self) -> str:
        """Returns the version of the trainings that it has read."""
        if not self.outbox.webhooks:
            return ""
        after, uids = "", set()
        while True:
            page = await self._cluster.page(KIND, self._namespace, limit=LISTED, after=after)
            for raw in page.items:
                uids.add(raw["metadata"]["uid"])
                self.note(raw)
            if not page.more:
                break
            after = page.more
        for uid in self._noted.keys() - uids:
            self._forget(uid)
        return page.version

    async def _watch(self) -> None:
        events = self._cluster.watch(KIND, self._namespace, after=self._version)
        async with contextlib.aclosing(events):
            async for event in events:
                if event.type != "BOOKMARK":
                    self.note(event.object)
                if event.type == "DELETED":
                    self._forget(event.object["metadata"]["uid"])
                self._version = event.object["metadata"]["resourceVersion"]

    def note(self, raw: Json) -> None:
        """Events of a training that were not read yet wait for the webhooks that want them."""
        metadata, status = raw["metadata"], raw.get("status") or {}
        uid = metadata["uid"]
        newest = last = self._noted.get(uid, (0, 0))
        if _newest_mark(status) <= last:
            return
        with self._writing():
            for event in read_list(status.get("events"), Event):
                mark = (event.id, event.count)
                if mark > last and event.at > self._since:
                    event_mark = f"{event.id}.{event.count}"
                    self.outbox.post(
                        metadata["namespace"], metadata["name"], uid, event, event_mark
                    )
                newest = max(newest, mark)
            self._file.db.execute("insert or replace into noted values (?, ?, ?)", (uid, *newest))
        self._noted[uid] = newest

    def _forget(self, uid: str) -> None:
        with self._writing():
            self._file.db.execute("delete from noted where uid = ?", (uid,))
        self._noted.pop(uid, None)


def _newest_mark(status: Json) -> Mark:
    events = status.get("events")
    last = events[-1] if isinstance(events, list) and events else {}
    return (last.get("id", 0), last.get("count", 1)) if isinstance(last, dict) else (0, 0)
