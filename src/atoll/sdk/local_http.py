"""HTTP/1.1 to the user's own control plane, over its Unix socket.

A command that starts and ends within 0.2 s has no time to import a full client. This one does what
the SDK needs, with the names of httpx2: requests, and answers that are streamed. A control plane
with a URL, and event loops, are served by httpx2.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from atoll.backends.local.state import SOCKET, connect_locally

IDLE_S = 5.0  # how long a connection waits for the next request; servers wait longer
PIECE = 1 << 16  # bytes of one read: the buffer of a socket
MAX_LINE = 1 << 16  # bytes of one header, as other clients allow


class Unreachable(OSError):
    """Nobody listens there."""


class Broken(OSError):
    """The connection ended too early, or what came over it is no answer."""


class LocalAnswer:
    """An answer whose body is streamed."""

    def __init__(self, connection: socket.socket, file: BufferedReader) -> None:
        self.socket = connection
        self._file = file
        version, _, remainder = self._line().partition(b" ")
        if not version.startswith(b"HTTP/1.") or not remainder[:3].isdigit():
            raise Broken(f"not an HTTP answer: {version[:40]!r}")
        self.status_code = int(remainder[:3])
        self.headers: dict[str, str] = {}  # by their names in lower case
        while line := self._line():
            name, _, value = line.decode("latin-1").partition(":")
            self.headers[name.lower()] = value.strip()
        self.is_reusable = self.headers.get("connection", "").lower() != "close"
        self.is_complete = False  # read to its end, so that the next one may follow

    def _line(self) -> bytes:
        line = self._file.readline(MAX_LINE)
        if not line.endswith(b"\n"):
            raise Broken("the server closed the connection")
        return line.rstrip(b"\r\n")

    def iter_bytes(self) -> Iterator[bytes]:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := self._size(self._line().partition(b";")[0].decode("latin-1"), 16):
                yield from self._pieces(size)
                self._line()
            while self._line():
                pass
        elif self.status_code != 204:
            yield from self._pieces(self._size(self.headers.get("content-length", ""), 10))
        self.is_complete = True

    def _size(self, text: str, base: int) -> int:
        try:
            return int(text, base)
        except ValueError:
            raise Broken(f"not a length: {text[:40]!r}") from None

    def _pieces(self, size: int) -> Iterator[bytes]:
        while size > 0:
            piece = self._file.read1(min(size, PIECE))
            if not piece:
                raise Broken("the server closed the connection")
            size -= len(piece)
            yield piece

    def read(self) -> bytes:
        return b"".join(self.iter_bytes())


class LocalClient:
    """Connections to the control plane whose socket is in `directory`. Threads may share it."""

    def __init__(self, directory: Path, headers: Mapping[str, str]) -> None:
        self._directory = directory
        self._headers = {"Host": "localhost", **headers}
        self._idle: list[tuple[float, socket.socket]] = []

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()

    @contextlib.contextmanager
    def stream(
        self,
        method: str,
        url: str,
        *,
        params: Mapping[str, Any],
        timeout: tuple[float, float, float, float | None],
        headers: Mapping[str, str] | None = None,
        content: bytes = b"",
    ) -> Iterator[LocalAnswer]:
        """`timeout` is for connecting, and for each time that something is waited for."""
        connect_s, wait_s, *_ = timeout
        lengths = {"Content-Length": str(len(content))} if content or method == "POST" else {}
        head = _head(method, url, params, {**self._headers, **(headers or {}), **lengths})
        connection = self._connected(connect_s, wait_s)
        is_reusable = False
        try:
            with connection.makefile("rb") as file:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(head + content)  # a refusal has an answer with the reason
                answer = LocalAnswer(connection, file)
                yield answer
            is_reusable = answer.is_complete and answer.is_reusable
        finally:
            if is_reusable:
                self._idle.append((time.monotonic(), connection))
            else:
                connection.close()

    def _connected(self, connect_s: float, wait_s: float) -> socket.socket:
        connection = self._idle_connection()
        if connection is None:
            try:
                connection = connect_locally(self._directory, connect_s)
            except TimeoutError:
                raise
            except OSError as error:
                raise Unreachable(unreachable(self._directory, error)) from error
        connection.settimeout(wait_s)
        return connection

    def _idle_connection(self) -> socket.socket | None:
        while True:
            try:
                since, connection = self._idle.pop()
            except IndexError:
                return None
            # One that can be read was closed by the server.
            if time.monotonic() - since < IDLE_S and not select.select([connection], [], [], 0)[0]:
                return connection
            connection.close()


def unreachable(directory: Path, error: OSError) -> str:
    return f"no control plane answers at {directory / SOCKET}: {error.strerror}"


def _head(method: str, path: str, params: Mapping[str, Any], headers: Mapping[str, str]) -> bytes:
    query = urlencode({name: _text(value) for name, value in params.items()}, doseq=True)
    target = quote(path, safe="/%") + (f"?{query}" if query else "")
    lines = [f"{method} {target} HTTP/1.1", *(f"{n}: {v}" for n, v in headers.items())]
    if any("\r" in line or "\n" in line for line in lines):
        raise Broken("a header with a line break cannot be sent")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


def _text(value: Any) -> Any:
    return str(value).lower() if isinstance(value, bool) else value
