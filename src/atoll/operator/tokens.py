"""Tokens of the operator's HTTP API: hashes in one Secret of the operator's namespace."""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from atoll.backends.kubernetes.client import Cluster
from atoll.core.errors import Denied, NotFound, ValidationError
from atoll.core.ports import Token, token_of, with_id

Json = dict[str, Any]
log = logging.getLogger(__name__)

NAME = "atoll-tokens"
KNOWN_FOR_S = 5.0  # how long a revoked token may still be accepted
MISSING_FOR_S = 1.0  # how long a new one may be refused: guesses do not reach the API server


class KubernetesTokens:
    """The Tokens of `core/ports.py`, in the Secret."""

    def __init__(self, cluster: Cluster, home: str) -> None:
        self._cluster = cluster
        self.home = home
        self._known: dict[str, Json] = {}
        self._read_at = float("-inf")

    async def namespace_of(self, hashed: str) -> str | None:
        age_s = time.monotonic() - self._read_at
        if age_s > (KNOWN_FOR_S if hashed in self._known else MISSING_FOR_S):
            await self._read()
        known = self._known.get(hashed)
        return None if known is None else str(known["namespace"])

    async def check_namespace(self, namespace: str) -> None:
        """Raises ValidationError if there is no such namespace, if this may be read."""
        try:
            await self._cluster.get("namespaces", None, namespace)
        except NotFound:
            expected = f"this cluster has no such namespace: kubectl create namespace {namespace}"
            raise ValidationError("namespace", namespace, expected) from None
        except Denied as error:
            log.warning("cannot find out whether the namespace %s exists: %s", namespace, error)

    async def add(self, hashed: str, namespace: str, label: str, now: float) -> Token:
        body = {"namespace": namespace, "label": label, "createdAt": now}
        data = {hashed: base64.b64encode(msgspec.json.encode(body)).decode()}
        try:
            await self._cluster.patch("secrets", self.home, NAME, {"data": data})
        except NotFound:
            secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": NAME}}
            await self._cluster.create("secrets", self.home, secret | {"data": data})
        self._read_at = float("-inf")
        return token_of(hashed, namespace, label, now)

    async def all(self) -> Sequence[Token]:
        tokens = [
            token_of(hashed, str(body["namespace"]), str(body["label"]), float(body["createdAt"]))
            for hashed, body in (await self._read()).items()
        ]
        return sorted(tokens, key=lambda token: token.created_at)

    async def remove(self, id: str) -> bool:
        hashed = with_id(id, await self._read())
        if hashed is None:
            return False
        await self._cluster.patch("secrets", self.home, NAME, {"data": {hashed: None}})
        self._read_at = float("-inf")
        return True

    async def _read(self) -> dict[str, Json]:
        try:
            data = (await self._cluster.get("secrets", self.home, NAME)).get("data") or {}
        except NotFound:
            data = {}
        self._known = {
            hashed: msgspec.json.decode(base64.b64decode(text)) for hashed, text in data.items()
        }
        self._read_at = time.monotonic()
        return self._known
