"""A client for etcd's v2 keys over plain HTTP. It moves keys and decides nothing.

A missing key is an answer (None, False), never an error; a failure that may pass is Temporary.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

import msgspec

from atoll.core.errors import Permanent, Temporary, ValidationError
from atoll.core.mesh import escaped, key_path, split_endpoint
from atoll.mesh.http import Response, ResponseParser, render_request

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

KEY_NOT_FOUND, NOT_A_FILE, INDEX_CLEARED = 100, 102, 401  # error codes of etcd's v2 API
REQUEST_S = 5.0  # for one request; callers try again
WATCH_S = 30.0  # after which a watch asks again, in case etcd was replaced by an empty one
READ_BYTES = 64 << 10  # at a time; what a StreamReader holds back by default
MAX_IDLE = 4  # connections kept open for the next request: as many as `MeshWatch` writes at once


class KeyChange(NamedTuple):
    """One change under a watched key; `value` is None when it was removed."""

    key: str
    value: str | None
    version: int


class EtcdKeys:
    """The keys of one etcd. Safe to share among tasks; close it, or use it with `async with`."""

    def __init__(self, endpoint: str, request_s: float = REQUEST_S) -> None:
        host_port = split_endpoint(endpoint)
        if host_port is None:
            raise ValidationError("etcd endpoint", endpoint, "expected host:port")
        self._host_port = host_port
        self._endpoint = endpoint
        self._request_s = request_s
        self._idle: list[Connection] = []

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
        while self._idle:
            _, writer = self._idle.pop()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def put(self, key: str, value: str, ttl_s: int | None = None) -> None:
        form = {"value": value} | ({} if ttl_s is None else {"ttl": str(ttl_s)})
        await self._ask("PUT", key, form=form)

    async def get(self, key: str) -> str | None:
        """The value of the key; None if there is no such key, or it is a directory."""
        answer, _ = await self._ask("GET", key)
        return None if answer is None else answer["node"].get("value")

    async def list(self, key: str) -> tuple[dict[str, str], int]:
        """Every key below with its value, and the version to watch from so as to miss nothing."""
        answer, version = await self._ask("GET", key, {"recursive": "true"})
        values: dict[str, str] = {}
        if answer is not None:
            _collect(answer["node"], values)
        return values, version

    async def delete(self, key: str) -> bool:
        """Deletes the key; True if it existed."""
        return (await self._ask("DELETE", key))[0] is not None

    async def delete_all(self, key: str) -> bool:
        """Deletes the key and all below it; True if it existed."""
        return (await self._ask("DELETE", key, {"recursive": "true", "dir": "true"}))[0] is not None

    async def next_change(self, key: str, after: int, wait_s: float = WATCH_S) -> KeyChange | None:
        """The first change at or below `key` after that version; None if none came in `wait_s`.

        Raises Temporary with `retry_after_s` 0 when etcd no longer has that version: list again.
        """
        params = {"wait": "true", "recursive": "true", "waitIndex": str(after + 1)}
        try:
            answer, _ = await self._ask("GET", key, params, within_s=wait_s)
        except _NothingCame:
            return None
        if answer is None:
            return None
        node = answer["node"]
        is_deleted = answer.get("action") in ("delete", "expire", "compareAndDelete")
        value = None if is_deleted else node.get("value")
        return KeyChange(node["key"].lstrip("/"), value, node["modifiedIndex"])

    async def _ask(
        self,
        method: str,
        key: str,
        params: Mapping[str, str] | None = None,
        form: Mapping[str, str] | None = None,
        within_s: float | None = None,
    ) -> tuple[dict[str, Any] | None, int]:
        """The decoded answer (None for a key that is not there), and etcd's version."""
        path = key_path(key) + (f"?{_encoded(params)}" if params else "")
        try:
            async with asyncio.timeout(self._request_s if within_s is None else within_s):
                answer = await self._exchange(method, path, _encoded(form or {}))
        except TimeoutError as error:
            raise _NothingCame(f"etcd at {self._endpoint} did not answer in time") from error
        except (OSError, EOFError, ValueError) as error:
            why = str(error) or type(error).__name__
            raise Temporary(f"etcd at {self._endpoint}: {why}") from error
        version = answer.headers.get("x-etcd-index", "0")
        return self._decoded(answer), int(version) if version.isdigit() else 0

    async def _exchange(self, method: str, path: str, form: str) -> Response:
        """Sends over an idle connection if there is one; that may be stale, so others follow.

        etcd may thus see a request more than once, which does no harm to any request made here.
        """
        request = render_request(self._host_port, method, path, form)
        while self._idle:
            with contextlib.suppress(OSError, EOFError):
                return await self._send(self._idle.pop(), request)
        return await self._send(await asyncio.open_connection(*self._host_port), request)

    async def _send(self, connection: Connection, request: bytes) -> Response:
        reader, writer = connection
        parser, response = ResponseParser(), None
        try:
            writer.write(request)
            await writer.drain()
            while response is None:
                response = parser.feed(await reader.read(READ_BYTES))
        finally:
            if response and response.is_reusable and len(self._idle) < MAX_IDLE:
                self._idle.append(connection)
            else:
                writer.close()
        return response

    def _decoded(self, answer: Response) -> dict[str, Any] | None:
        where = f"etcd at {self._endpoint}"
        is_good = 200 <= answer.status < 300
        if answer.status >= 500:
            raise Temporary(f"{where} answered {answer.status}")
        if not answer.body and is_good:
            raise _NothingCame(f"{where} ended a watch")
        try:
            body = msgspec.json.decode(answer.body)
            code = 0 if is_good else body.get("errorCode", 0)
        except (msgspec.DecodeError, AttributeError) as error:
            raise Permanent(f"{where} is not an etcd with the v2 API") from error
        if is_good and isinstance(body.get("node"), dict):
            return dict(body)
        if code in (KEY_NOT_FOUND, NOT_A_FILE):
            return None
        if code == INDEX_CLEARED:
            raise Temporary(f"{where}: {body.get('cause')}", retry_after_s=0.0)
        raise Permanent(f"{where} answered {answer.status}: {body.get('message')}")


class _NothingCame(Temporary):
    """No answer came in time; for a watch that means that nothing changed."""


def _encoded(form: Mapping[str, str]) -> str:
    return "&".join(f"{escaped(name)}={escaped(value)}" for name, value in form.items())


def _collect(node: Mapping[str, Any], values: dict[str, str]) -> None:
    if "value" in node:
        values[node["key"].lstrip("/")] = node["value"]
    for child in node.get("nodes", ()):
        _collect(child, values)
