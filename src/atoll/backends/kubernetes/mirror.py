"""A local copy of all objects of one kind, kept up to date by one list and one watch."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from atoll.backends.kubernetes.client import Cluster
from atoll.backends.kubernetes.names import SELECTOR, UID
from atoll.core.errors import Denied, Gone, Permanent, Temporary
from atoll.core.retry import Retry

Json = dict[str, Any]
log = logging.getLogger(__name__)


T = TypeVar("T")


class Mirror(Generic[T]):
    """Objects by training uid and name, each parsed once by `parse`.

    `notify` gets the labels of an object of each training that may have changed. `on_deleted` gets
    each object that no longer exists, and whether that is its very last state.
    """

    def __init__(
        self,
        cluster: Cluster,
        kind: str,
        namespace: str | None,
        parse: Callable[[Json], T],
        notify: Callable[[Json], None],
        on_deleted: Callable[[T, bool], None] = lambda item, is_final: None,
    ) -> None:
        self._cluster = cluster
        self._kind = kind
        self._namespace = namespace
        self._parse = parse
        self._notify = notify
        self._on_deleted = on_deleted
        self._objects: dict[str, dict[str, T]] = defaultdict(dict)
        self._labels: dict[str, Json] = {}  # of an object of each training
        self._version = 0
        self._moved = asyncio.Event()
        self.is_live = False

    def of(self, uid: str) -> Mapping[str, T]:
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
        old, old_labels = self._objects, self._labels
        self._objects, self._labels = defaultdict(dict), {}
        for item in objects.items:
            self.put(item)
        self._advance(objects.version)
        self.is_live = True
        for uid, by_name in old.items():
            for name in by_name.keys() - self.of(uid).keys():
                self._on_deleted(by_name[name], False)
        for labels in (old_labels | self._labels).values():
            self._notify(labels)

    def put(self, item: Json) -> str:
        """Takes over the newest state of an object; returns the uid of its training."""
        labels = item["metadata"].get("labels") or {}
        uid = str(labels.get(UID, ""))
        self._objects[uid][item["metadata"]["name"]] = self._parse(item)
        self._labels[uid] = labels
        return uid

    async def _follow(self) -> None:
        while True:
            async for event in self._cluster.watch(
                self._kind, self._namespace, after=str(self._version), labels=SELECTOR
            ):
                if event.type != "BOOKMARK":
                    self._update(event.type, event.object)
                self._advance(event.object["metadata"]["resourceVersion"])

    def _update(self, type: str, item: Json) -> None:
        uid = self.put(item)
        self._notify(self._labels[uid])
        if type == "DELETED":
            deleted = self._objects[uid].pop(item["metadata"]["name"])
            if not self._objects[uid]:
                del self._objects[uid], self._labels[uid]
            self._on_deleted(deleted, True)

    def _advance(self, version: str) -> None:
        self._version = int(version)
        self._moved.set()

    def _go_stale(self) -> None:
        self.is_live = False
        self._moved.set()
