"""The series of trainings, in a file of the leader and as copies in the cluster.

Each training has one ConfigMap beside it, which Kubernetes deletes with it. Another operator that
takes the lead goes on from there. A copy is bounded, and so is what is written in a second: etcd
holds the whole cluster. What a leader that was killed had not copied yet is missed, and counted.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import sqlite3
import time
from typing import Any

from atoll.core.errors import AtollError, Gone, NotFound, ValidationError
from atoll.core.ports import Store
from atoll.core.status import Training
from atoll.kubernetes.client import Cluster
from atoll.kubernetes.names import MANAGED, SERIES, TRAINING, UID
from atoll.kubernetes.render import owner_of
from atoll.series.keep import SeriesKeeper

Json = dict[str, Any]
log = logging.getLogger(__name__)

COPY_KIB = 256  # of one training
LARGEST_COPY_KIB = 900  # an object of the cluster has 1 MiB at most
EVERY_S = 30.0
RATE = 256 * 2**10  # bytes a second that all copies take together
TICK_S = 1.0
LISTED = 20
KEY = "series"


class SeriesCopies:
    """Writes copies of what `keeper` keeps, and reads them back. `most_bytes` of 0: neither."""

    def __init__(
        self,
        cluster: Cluster,
        keeper: SeriesKeeper,
        namespace: str | None,
        most_bytes: int,
        farewell_s: float = 3.0,
    ) -> None:
        self._cluster = cluster
        self._keeper = keeper
        self._namespace = namespace
        self._most_bytes = most_bytes
        self._farewell_s = farewell_s  # for the last copies of a leader
        self._trainings: dict[str, Training] = {}
        self._copied: dict[str, int] = {}  # `changes` of the keeper, as of the last copy
        self._due: dict[str, float] = {}

    async def restore(self) -> None:
        """What other operators copied is kept here."""
        after = "" if self._most_bytes else None
        while after is not None:
            page = await self._cluster.list(
                "configmaps", self._namespace, labels=SERIES, limit=LISTED, after=after
            )
            for item in page.items:
                await asyncio.to_thread(self._take, item)
            after = page.more or None

    def _take(self, item: Json) -> None:
        uid = item["metadata"]["labels"].get(UID, "")
        try:
            data = base64.b64decode((item.get("binaryData") or {}).get(KEY, ""))
            is_taken = self._keeper.restore(uid, data)
        except (ValidationError, ValueError, sqlite3.Error) as error:
            log.warning("the copy of the series of training %s: %s", uid, error)
            return
        if is_taken:
            self._copied[uid] = self._keeper.changes(uid)

    async def run(self, store: Store) -> None:
        """Until it is cancelled; then what is new is copied once more."""
        if not self._most_bytes:
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow(store))
                tasks.create_task(self._copy_on())
        finally:
            # Without pauses, and not for long: the lease is not waited for.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._farewell_s):
                    for uid in self._changed():
                        await self._copy(uid)

    async def _follow(self, store: Store) -> None:
        while True:
            after = await store.version()
            self._trainings = {training.uid: training for training in await store.list()}
            try:
                async for change in store.watch(after):
                    uid = change.training.uid
                    if change.is_removed:
                        for known in (self._trainings, self._copied, self._due):
                            known.pop(uid, None)
                    else:
                        self._trainings[uid] = change.training
            except Gone:
                continue

    async def _copy_on(self) -> None:
        while True:
            now = time.monotonic()
            for uid in [u for u in self._changed() if self._due.get(u, 0.0) <= now]:
                size = await self._copy(uid)
                self._due[uid] = time.monotonic() + EVERY_S
                await asyncio.sleep(size / RATE)
            await asyncio.sleep(TICK_S)

    def _changed(self) -> list[str]:
        """Trainings with more than was copied, the longest ago first."""
        return sorted(
            (u for u in self._trainings if self._keeper.changes(u) != self._copied.get(u, 0)),
            key=lambda uid: self._due.get(uid, 0.0),
        )

    async def _copy(self, uid: str) -> int:
        """Returns how many bytes were written."""
        training = self._trainings.get(uid)
        if training is None:
            return 0
        changes = self._keeper.changes(uid)
        data = await asyncio.to_thread(self._keeper.copied, uid, self._most_bytes)
        try:
            body = render_copy(training, data)
            name = body["metadata"]["name"]
            await self._cluster.patch("configmaps", training.namespace, name, body, type="apply")
        except NotFound:  # its namespace is going
            return 0
        except AtollError as error:
            log.warning("the series of training %s were not copied: %s", training.name, error)
            return 0
        self._copied[uid] = changes
        return len(data)


def render_copy(training: Training, data: bytes) -> Json:
    """The ConfigMap with the copy of a training's series."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"atoll-series-{training.uid}",
            "labels": {
                MANAGED: "atoll",
                SERIES: "copy",
                TRAINING: training.name,
                UID: training.uid,
            },
            "ownerReferences": [owner_of(training)],
        },
        "binaryData": {KEY: base64.b64encode(data).decode()},
    }
