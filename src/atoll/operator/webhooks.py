"""Webhooks of the operator: kept in one Secret, delivered by the leader alone.

The events of a training are in its status. For each webhook the Secret says until when they were
dealt with, and the next leader goes on from there. It may send a message again, with the same id.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import time
from typing import Any

import msgspec

from atoll.core.errors import AtollError, Gone, NotFound, Temporary
from atoll.core.model import decode, encode
from atoll.core.webhooks import GIVEN_UP_S, Webhook
from atoll.kubernetes.client import Cluster
from atoll.kubernetes.names import WEBHOOKS
from atoll.kubernetes.resource import read_events
from atoll.store.outbox import Outbox

Json = dict[str, Any]
log = logging.getLogger(__name__)

KIND = "trainings"
SAVE_S = 2.0
RETRY_S = 1.0
LISTED = 50
# An event may be stored so much after a later one of another training; not after so long a time.
LATE_S, SETTLED_S = 5.0, 60.0
CLOCKS_S = 2.0  # by which the clocks of events and of webhooks may differ


class StoredWebhook(Webhook, frozen=True):
    """As it is in the Secret."""

    dealt_with: float = 0.0  # the time of the newest event before which none is left


class ClusterWebhooks:
    """The webhooks of all namespaces that are served, and what happens for them."""

    def __init__(
        self,
        cluster: Cluster,
        home: str,
        namespace: str | None,
        outbox: Outbox,
        farewell_s: float = 3.0,
    ) -> None:
        self._cluster = cluster
        self._home = home
        self._namespace = namespace
        self._outbox = outbox
        self._farewell_s = farewell_s
        self._since: dict[str, float] = {}  # by webhook: events after this are to be told
        self._noted: dict[str, tuple[int, int]] = {}  # by training: id and count of the newest
        self._newest: dict[str, float] = {}  # by namespace: the time of the newest event
        self._written: dict[str, str] = {}
        self._version = ""  # of the trainings that were looked at; empty: none yet
        self._wanted = asyncio.Event()
        self._saving = asyncio.Lock()

    async def load(self) -> None:
        """The outbox has the stored webhooks, and what the last leader left to be told.

        A leader does this first: a training that it removes has told all by then.
        """
        stored = await self._read()
        self._since = {one.id: one.dealt_with for one in stored}
        self._noted, self._newest = {}, {}
        self._outbox.load(stored)
        self._wanted.clear()
        self._version = ""
        if stored:
            self._version = await self._note_all()
            self._wanted.set()

    async def save(self) -> None:
        """What the outbox has now is stored."""
        async with self._saving:
            data = {one.id: self._entry(one, oldest) for one, oldest in self._outbox.everywhere()}
            gone: dict[str, str | None] = dict.fromkeys(set(self._written) - set(data))
            changed = {id: text for id, text in data.items() if self._written.get(id) != text}
            if gone or changed:
                await self._write({**gone, **changed})
                self._written = data
            if data:
                self._wanted.set()

    def _entry(self, webhook: Webhook, oldest: float | None) -> str:
        newest = self._newest.get(webhook.namespace, 0.0)
        if time.time() - newest < SETTLED_S:
            newest -= LATE_S
        settled = max(self._since.get(webhook.id, 0.0), newest)
        fields = msgspec.structs.asdict(webhook) | {"waiting": 0}
        stored = StoredWebhook(
            **fields, dealt_with=settled if oldest is None else min(settled, oldest - 0.001)
        )
        return base64.b64encode(encode(stored)).decode()

    async def run(self) -> None:
        """Until it is cancelled; what was dealt with is stored then, too."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow())
                tasks.create_task(self._save_on())
        finally:
            with contextlib.suppress(AtollError, TimeoutError):
                async with asyncio.timeout(self._farewell_s):
                    await self.save()

    async def _save_on(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            try:
                await self.save()
            except AtollError as error:
                log.warning("webhooks could not be stored: %s", error)

    async def _follow(self) -> None:
        while True:
            await self._wanted.wait()  # nobody asks for events where there is no webhook
            self._version = self._version or await self._note_all()
            try:
                await self._watch()
            except Gone:
                self._version = ""
            except Temporary as error:
                log.info("watching events: %s; trying again", error)
                await asyncio.sleep(RETRY_S)

    async def _note_all(self) -> str:
        after = ""
        while True:
            page = await self._cluster.list(KIND, self._namespace, limit=LISTED, after=after)
            for raw in page.items:
                self.note(raw)
            if not page.more:
                return page.version
            after = page.more

    async def _watch(self) -> None:
        events = self._cluster.watch(KIND, self._namespace, after=self._version)
        async with contextlib.aclosing(events):
            async for event in events:
                self._version = event.object["metadata"]["resourceVersion"]
                if event.type != "BOOKMARK":
                    self.note(event.object)
                if event.type == "DELETED":
                    self._noted.pop(event.object["metadata"]["uid"], None)

    def note(self, raw: Json) -> None:
        """Events of a training that were not dealt with yet go to the webhooks that want them."""
        metadata = raw["metadata"]
        namespace, name, uid = metadata["namespace"], metadata["name"], metadata["uid"]
        last = self._noted.get(uid, (0, 0))
        status = raw.get("status") or {}
        if _newest_mark(status) <= last:
            return
        oldest = time.time() - GIVEN_UP_S
        for event in read_events(status):
            mark = (event.id, event.count)
            if mark > last and event.at > oldest:
                self._newest[namespace] = max(self._newest.get(namespace, 0.0), event.at)
                words = f"{event.id}.{event.count}"
                self._outbox.tell(namespace, name, uid, event, words, self._told_since)
            self._noted[uid] = max(self._noted.get(uid, last), mark)

    def _told_since(self, id: str, made_at: float) -> float:
        return max(self._since.get(id, 0.0), made_at - CLOCKS_S)

    async def _read(self) -> list[StoredWebhook]:
        try:
            data = (await self._cluster.get("secrets", self._home, WEBHOOKS)).get("data") or {}
        except NotFound:
            data = {}
        self._written = data
        stored = []
        for id, text in data.items():
            try:
                stored.append(decode(base64.b64decode(text), StoredWebhook))
            except ValueError as error:  # changed by hand
                log.warning("the webhook %s in the Secret %s: %s", id, WEBHOOKS, error)
        return stored

    async def _write(self, data: dict[str, str | None]) -> None:
        try:
            await self._cluster.patch("secrets", self._home, WEBHOOKS, {"data": data})
        except NotFound:
            secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": WEBHOOKS}}
            there = {id: text for id, text in data.items() if text is not None}
            await self._cluster.create("secrets", self._home, {**secret, "data": there})


def _newest_mark(status: Json) -> tuple[int, int]:
    events = status.get("events")
    last = events[-1] if isinstance(events, list) and events else {}
    return (last.get("id", 0), last.get("count", 1)) if isinstance(last, dict) else (0, 0)
