"""etcd's v2 keys over plain HTTP. Moves keys, decides nothing.

Not found is an answer (None, False), never an error; what may work later is Temporary.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

import httpx2
import msgspec

from atoll.core.errors import Permanent, Temporary
from atoll.core.mesh import key_path

KEY_NOT_FOUND, NOT_A_FILE, INDEX_CLEARED = 100, 102, 401
REQUEST_S = 5.0


class KeyChange(NamedTuple):
    """One change under a watched key; `value` is None when it was removed."""

    key: str
    value: str | None
    version: int


class EtcdKeys:
    """The keys of one etcd. Safe to share among tasks; close it, or use it with `async with`."""

    def __init__(self, endpoint: str, request_s: float = REQUEST_S) -> None:
        # No proxy from the environment: etcd is beside us, and a proxy's answer is not etcd's.
        self._http = httpx2.AsyncClient(
            base_url=f"http://{endpoint}", timeout=request_s, trust_env=False
        )
        self._endpoint = endpoint

    async def __aenter__(self) -> EtcdKeys:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def put(self, key: str, value: str, ttl_s: int | None = None) -> None:
        data = {"value": value} | ({} if ttl_s is None else {"ttl": str(ttl_s)})
        await self._ask("PUT", key, data=data)

    async def get(self, key: str) -> str | None:
        """Its value, or None: no such key, or a directory."""
        answer = await self._ask("GET", key)
        return None if answer is None else answer["node"].get("value")

    async def list(self, key: str) -> tuple[dict[str, str], int]:
        """Every key below, with the index to watch from so that nothing is missed in between."""
        answer, index = await self._ask_indexed("GET", key, params={"recursive": "true"})
        found: dict[str, str] = {}
        if answer is not None:
            _collect(answer["node"], found)
        return found, index

    async def delete(self, key: str) -> bool:
        """True if it was there."""
        return await self._ask("DELETE", key) is not None

    async def delete_all(self, key: str) -> bool:
        """The key and all below it are gone; True if it was there."""
        params = {"recursive": "true", "dir": "true"}
        return await self._ask("DELETE", key, params=params) is not None

    async def next_change(self, key: str, after: int, wait_s: float = 30.0) -> KeyChange | None:
        """The first change at or below `key` after that index; None if none came in `wait_s`.

        Raises Temporary with `retry_after_s` 0 when that index is no longer kept: list again.
        """
        params = {"wait": "true", "recursive": "true", "waitIndex": str(after + 1)}
        limits = httpx2.Timeout(REQUEST_S, read=wait_s)
        try:
            answer = await self._ask("GET", key, params=params, limits=limits)
        except _NothingCame:
            return None
        if answer is None:
            return None
        node = answer["node"]
        is_gone = answer.get("action") in ("delete", "expire", "compareAndDelete")
        value = None if is_gone else node.get("value")
        return KeyChange(node["key"].lstrip("/"), value, node["modifiedIndex"])

    async def _ask(self, method: str, key: str, **more: Any) -> dict[str, Any] | None:
        return (await self._ask_indexed(method, key, **more))[0]

    async def _ask_indexed(
        self,
        method: str,
        key: str,
        *,
        params: Mapping[str, str] | None = None,
        data: Mapping[str, str] | None = None,
        limits: Any = httpx2.USE_CLIENT_DEFAULT,
    ) -> tuple[dict[str, Any] | None, int]:
        try:
            answer = await self._http.request(
                method, key_path(key), params=params, data=data, timeout=limits
            )
        except httpx2.ReadTimeout as error:
            raise _NothingCame(f"etcd at {self._endpoint} did not answer in time") from error
        except httpx2.HTTPError as error:
            raise Temporary(f"etcd at {self._endpoint}: {error or type(error).__name__}") from error
        index = answer.headers.get("x-etcd-index", "0")
        return self._body(answer), int(index) if index.isdigit() else 0

    def _body(self, answer: httpx2.Response) -> dict[str, Any] | None:
        where = f"etcd at {self._endpoint}"
        if answer.status_code >= 500:
            raise Temporary(f"{where} answered {answer.status_code}")
        if not answer.content and answer.is_success:
            raise _NothingCame(f"{where} ended a watch")
        try:
            body = msgspec.json.decode(answer.content)
            code = body.get("errorCode", 0) if answer.is_error else 0
        except (msgspec.DecodeError, AttributeError) as error:
            raise Permanent(f"{where} is not an etcd with the v2 API") from error
        if answer.is_success and isinstance(body.get("node"), dict):
            return dict(body)
        if code in (KEY_NOT_FOUND, NOT_A_FILE):
            return None
        if code == INDEX_CLEARED:
            raise Temporary(f"{where}: {body.get('cause')}", retry_after_s=0.0)
        raise Permanent(f"{where} answered {answer.status_code}: {body.get('message')}")


class _NothingCame(Temporary):
    """No answer within the time given; for a watch that is an answer."""


def _collect(node: Mapping[str, Any], found: dict[str, str]) -> None:
    if "value" in node:
        found[node["key"].lstrip("/")] = node["value"]
    for child in node.get("nodes", ()):
        _collect(child, found)
