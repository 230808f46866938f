"""A local copy of all objects of one kind, kept up to date by one list and one watch."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from atoll.backends.kubernetes.client import Cluster
from atoll.backends.kubernetes.names import SELECTOR, UID
from atoll.core.errors import Denied, Gone, Permanent, Temporary
from atoll.core.retry import Retry

Json = dict[str, Any]
log = logging.getLogger(__name__)


class Mirror:
    """Objects by training uid and name. `notify` gets each object that may have changed.

    `on_deleted` gets each object that has left, and whether that is its very last state.
    """

    def __init__(
        self,
        cluster: Cluster,
        kind: str,
        namespace: str | None,
        notify: Callable[[Json], None],
        on_deleted: Callable[[Json, bool], None] = lambda item, is_final: None,
    ) -> None:
        self._cluster = cluster
        self._kind = kind
        self._namespace = namespace
        self._notify = notify
        self._on_deleted = on_deleted
        self._objects: dict[str, dict[str, Json]] = defaultdict(dict)
        self._version = 0
        self._moved = asyncio.Event()
        self.is_live = False

    def of(self, uid: str) -> Mapping[str, Json]:
        return self._objects.get(uid, {})

    async def reach(self, version: int, timeout_s: float) -> bool:
        """Waits until the copy has that version of the cluster; False if it does not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.is_live and self._version < version:
                    self._moved.clear()
                    await self._moved.wait()
        except TimeoutError:
            return False
        return self.is_live

    async def run(self) -> None:
        """Runs until cancelled, and retries while the API server does not answer."""
        retry = Retry(0.2, 10.0)
        while True:
            try:
                await self._load()
                retry.has_worked()
                await self._follow()
            except Gone:
                log.info("the watch on %s fell behind; listing again", self._kind)
            except (Temporary, Denied, Permanent) as error:
                # The first failure shows in other requests too; the next is worth a warning.
                level = logging.WARNING if retry.failures == 1 else logging.INFO
                log.log(level, "cannot watch %s: %s; trying again", self._kind, error)
                self._go_stale()
                await asyncio.sleep(retry.pause_s() or 0.0)
            finally:
                self._go_stale()

    async def _load(self) -> None:
        objects = await self._cluster.list(self._kind, self._namespace, labels=SELECTOR)
        old = [o for by_name in self._objects.values() for o in by_name.values()]
        self._objects.clear()
        for item in objects.items:
            self._objects[_uid(item)][item["metadata"]["name"]] = item
        self._advance(objects.version)
        self.is_live = True
        for item in old:
            if item["metadata"]["name"] not in self._objects.get(_uid(item), {}):
                self._on_deleted(item, False)
        for item in (*old, *objects.items):
            self._notify(item)

    async def _follow(self) -> None:
        while True:
            async for event in self._cluster.watch(
                self._kind, self._namespace, after=str(self._version), labels=SELECTOR
            ):
                if event.type != "BOOKMARK":
                    self._update(event.type, event.object)
                self._advance(event.object["metadata"]["resourceVersion"])

    def _update(self, type: str, item: Json) -> None:
        by_name = self._objects[_uid(item)]
        if type == "DELETED":
            by_name.pop(item["metadata"]["name"], None)
            if not by_name:
                self._objects.pop(_uid(item), None)
            self._on_deleted(item, True)
        else:
            by_name[item["metadata"]["name"]] = item
        self._notify(item)

    def _advance(self, version: str) -> None:
        self._version = int(version)
        self._moved.set()

    def _go_stale(self) -> None:
        self.is_live = False
        self._moved.set()


def _uid(item: Json) -> str:
    return str((item["metadata"].get("labels") or {}).get(UID, ""))
