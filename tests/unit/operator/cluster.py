"""The objects of a cluster in memory, as far as the operator's own parts ask for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from copy import deepcopy
from typing import Any

from atoll.backends.kubernetes.client import ObjectList, WatchEvent
from atoll.core.errors import Conflict, NotFound

Json = dict[str, Any]


class Objects:
    """Get, list, create, patch and watch, without versions that anybody checks."""

    def __init__(self) -> None:
        self.kept: dict[tuple[str, str, str], Json] = {}
        self.version = 1
        self.writes: list[tuple[str, str]] = []
        self._watchers: list[tuple[str, asyncio.Queue[WatchEvent]]] = []

    def time(self) -> float:
        return time.time()

    def put(self, kind: str, body: Json, type: str = "MODIFIED") -> None:
        """As somebody else would write it."""
        self.version += 1
        metadata = body["metadata"]
        metadata["resourceVersion"] = str(self.version)
        key = (kind, metadata["namespace"], metadata["name"])
        self.kept[key] = body
        if type == "DELETED":
            del self.kept[key]
        for watched, queue in self._watchers:
            if watched == kind:
                queue.put_nowait(WatchEvent(type, deepcopy(body)))

    @property
    def is_watched(self) -> bool:
        return bool(self._watchers)

    async def get(self, kind: str, namespace: str, name: str) -> Json:
        try:
            return deepcopy(self.kept[kind, namespace, name])
        except KeyError:
            raise NotFound(kind, name) from None

    async def list(
        self, kind: str, namespace: str | None = None, *, labels: str = "", **_: Any
    ) -> ObjectList:
        items = [
            deepcopy(body)
            for (each, place, _), body in self.kept.items()
            if each == kind
            and namespace in (None, place)
            and (not labels or labels in body["metadata"].get("labels", {}))
        ]
        return ObjectList(items, str(self.version), "")

    page = list

    async def pages(
        self, kind: str, namespace: str | None = None, **_: Any
    ) -> AsyncGenerator[ObjectList, None]:
        yield await self.list(kind, namespace)

    async def create(self, kind: str, namespace: str, body: Json) -> Json:
        name = body["metadata"]["name"]
        if (kind, namespace, name) in self.kept:
            raise Conflict(f"{name} exists")
        body = deepcopy(body)
        body["metadata"]["namespace"] = namespace
        self.writes.append((kind, name))
        self.put(kind, body, "ADDED")
        return body

    async def patch(
        self, kind: str, namespace: str, name: str, body: Json, *, type: str = "merge"
    ) -> Json:
        key = (kind, namespace, name)
        if key not in self.kept:
            if type != "apply":
                raise NotFound(kind, name)
            return await self.create(kind, namespace, body)
        self.writes.append((kind, name))
        stored = self.kept[key]
        for part in ("data", "binaryData"):
            merged = {**(stored.get(part) or {}), **(body.get(part) or {})}
            stored[part] = {name: value for name, value in merged.items() if value is not None}
        self.put(kind, stored)
        return stored

    async def watch(
        self, kind: str, namespace: str | None = None, **_: Any
    ) -> AsyncGenerator[WatchEvent, None]:
        queue: asyncio.Queue[WatchEvent] = asyncio.Queue()
        entry = (kind, queue)
        self._watchers.append(entry)
        try:
            while True:
                yield await queue.get()
        finally:
            self._watchers.remove(entry)
