"""Tokens of the server in a cluster: hashes in one Secret of the operator's namespace."""

from __future__ import annotations

import base64
import time
from typing import Any

import msgspec

from atoll.core.errors import NotFound
from atoll.kubernetes.client import Cluster

Json = dict[str, Any]

NAME = "atoll-tokens"
KNOWN_FOR_S = 5.0  # how long a token that was taken back may still be good


class KubernetesTokens:
    def __init__(self, cluster: Cluster, home: str) -> None:
        self._cluster = cluster
        self._home = home
        self._known: dict[str, Json] = {}
        self._read_at = float("-inf")

    async def add(self, hashed: str, namespace: str, label: str, now: float) -> None:
        body = {"namespace": namespace, "label": label, "createdAt": now}
        data = {hashed: base64.b64encode(msgspec.json.encode(body)).decode()}
        try:
            await self._cluster.patch("secrets", self._home, NAME, {"data": data})
        except NotFound:
            secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": NAME}}
            await self._cluster.create("secrets", self._home, secret | {"data": data})
        self._read_at = float("-inf")

    async def remove(self, hash_prefix: str) -> int:
        found = [hashed for hashed in await self._all() if hashed.startswith(hash_prefix)]
        if found:
            gone = dict.fromkeys(found)
            await self._cluster.patch("secrets", self._home, NAME, {"data": gone})
            self._read_at = float("-inf")
        return len(found)

    async def all(self) -> list[tuple[str, str, str, float]]:
        """Hash, namespace, label and time of making, oldest first."""
        rows = [
            (hashed, str(t["namespace"]), str(t["label"]), float(t["createdAt"]))
            for hashed, t in (await self._all()).items()
        ]
        return sorted(rows, key=lambda row: row[3])

    async def namespace(self, hashed: str) -> str | None:
        if time.monotonic() - self._read_at > KNOWN_FOR_S or hashed not in self._known:
            await self._all()
        found = self._known.get(hashed)
        return None if found is None else str(found["namespace"])

    async def _all(self) -> dict[str, Json]:
        try:
            data = (await self._cluster.get("secrets", self._home, NAME)).get("data") or {}
        except NotFound:
            data = {}
        self._known = {
            hashed: msgspec.json.decode(base64.b64decode(text)) for hashed, text in data.items()
        }
        self._read_at = time.monotonic()
        return self._known
