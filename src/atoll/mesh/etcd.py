"""A client for etcd's v2 keys over plain HTTP. It moves keys and decides nothing.

A missing key is an answer (None, False), never an error; a failure that may pass is Temporary.
The client speaks HTTP itself: an agent on every host loads this file, and a general HTTP client
would cost it a fifth of a second to load and ten times the processor time for each key.
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

KEY_NOT_FOUND, NOT_A_FILE, INDEX_CLEARED = 100, 102, 401
REQUEST_S = 5.0
WATCH_S = 30.0
MAX_BYTES = 64 << 20  # of one answer
MAX_IDLE = 4  # connections kept open for the next request


class KeyChange(NamedTuple):
    """One change under a watched key; `value` is None when it was removed."""

    key: str
    value: str | None
    version: int


class _Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


class EtcdKeys:
    """The keys of one etcd. Safe to share among tasks; close it, or use it with `async with`."""

    def __init__(self, endpoint: str, request_s: float = REQUEST_S) -> None:
        host_port = split_endpoint(endpoint)
        if host_port is None:
            raise ValidationError("etcd endpoint", endpoint, "expected host:port")
        self._host_port = host_port
        self._endpoint = endpoint
        self._request_s = request_s
        self._idle: list[_Connection] = []

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
            await self._idle.pop().close()

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
        """The key is gone; True if it was there."""
        return (await self._ask("DELETE", key))[0] is not None

    async def delete_all(self, key: str) -> bool:
        """The key and all below it are gone; True if it was there."""
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
                answer = await self._exchange(method, path, _encoded(form or {}).encode())
        except TimeoutError as error:
            raise _NothingCame(f"etcd at {self._endpoint} did not answer in time") from error
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            why = str(error) or type(error).__name__
            raise Temporary(f"etcd at {self._endpoint}: {why}") from error
        version = answer.headers.get("x-etcd-index", "0")
        return self._decoded(answer), int(version) if version.isdigit() else 0

    async def _exchange(self, method: str, path: str, body: bytes) -> _Answer:
        """The answer, over an idle connection if there is one; it may be stale, so others follow.

        etcd may thus see a request more than once, which does no harm to any request made here.
        """
        while self._idle:
            with contextlib.suppress(OSError, EOFError):
                return await self._over(self._idle.pop(), method, path, body)
        return await self._over(await _Connection.open(*self._host_port), method, path, body)

    async def _over(self, line: _Connection, method: str, path: str, body: bytes) -> _Answer:
        try:
            answer = await line.ask(method, path, body)
        except BaseException:
            line.drop()
            raise
        if line.is_reusable and len(self._idle) < MAX_IDLE:
            self._idle.append(line)
        else:
            line.drop()
        return answer

    def _decoded(self, answer: _Answer) -> dict[str, Any] | None:
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


class _Connection:
    """One HTTP/1.1 connection, one request at a time."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._host = host
        self.is_reusable = True

    @classmethod
    async def open(cls, name: str, port: int) -> _Connection:
        reader, writer = await asyncio.open_connection(name, port)
        return cls(reader, writer, f"[{name}]:{port}" if ":" in name else f"{name}:{port}")

    def drop(self) -> None:
        self._writer.close()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def ask(self, method: str, path: str, body: bytes) -> _Answer:
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\n"
        if body:
            head += "Content-Type: application/x-www-form-urlencoded\r\n"
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode("ascii") + body)
        await self._writer.drain()
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        version, code = first.split(" ", 2)[:2]
        if not version.startswith("HTTP/"):
            raise ValueError("the answer is not HTTP")
        pairs = (line.partition(":") for line in lines if line)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return _Answer(int(code), headers, await self._body(headers))

    async def _body(self, headers: Mapping[str, str]) -> bytes:
        self.is_reusable = headers.get("connection", "").lower() != "close"
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return await self._chunks()
        if "content-length" in headers:
            return await self._reader.readexactly(_checked(int(headers["content-length"])))
        self.is_reusable = False
        return await self._reader.read(MAX_BYTES)

    async def _chunks(self) -> bytes:
        parts: list[bytes] = []
        total = 0
        while size := int((await self._reader.readline()).split(b";")[0] or b"x", 16):
            total = _checked(total + size)
            parts.append((await self._reader.readexactly(size + 2))[:-2])
        await self._reader.readline()
        return b"".join(parts)


class _NothingCame(Temporary):
    """No answer came in time; for a watch that means that nothing changed."""


def _checked(size: int) -> int:
    if not 0 <= size <= MAX_BYTES:
        raise ValueError(f"an answer of {size} bytes was announced")
    return size


def _encoded(form: Mapping[str, str]) -> str:
    return "&".join(f"{escaped(name)}={escaped(value)}" for name, value in form.items())


def _collect(node: Mapping[str, Any], values: dict[str, str]) -> None:
    if "value" in node:
        values[node["key"].lstrip("/")] = node["value"]
    for child in node.get("nodes", ()):
        _collect(child, values)
