"""HTTP/1.1 as the gate and the etcd client need it: one encoder, one parser, one blocking request.

The parser does no I/O, so that the blocking gate and the asyncio client share it. Every rank that
waits at the gate loads this file, and every agent: http.client would cost each of them 25 ms of
imports, a general asyncio client a fifth of a second and ten times the CPU for each key.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import socket
    from collections.abc import Generator, Mapping

MAX_HEAD_BYTES = 64 << 10  # of all headers, for the same reason as MAX_BODY_BYTES
MAX_BODY_BYTES = 64 << 20  # so that a peer that is no etcd cannot fill the memory


class Response(NamedTuple):
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes
    is_reusable: bool  # the connection may carry another request


def render_request(
    endpoint: tuple[str, int], method: str, path: str, form: str = "", *, is_last: bool = False
) -> bytes:
    """One request with an optional form; with `is_last` the server closes the connection."""
    name, port = endpoint
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: [{name}]:{port}" if ":" in name else f"Host: {name}:{port}",
        f"Content-Length: {len(form)}",
    ]
    if form:
        lines.append("Content-Type: application/x-www-form-urlencoded")
    if is_last:
        lines.append("Connection: close")
    return ("\r\n".join(lines) + f"\r\n\r\n{form}").encode("ascii", "replace")


class ResponseParser:
    """Parses one response from the bytes that `feed` gets. Raises ValueError, EOFError."""

    def __init__(self) -> None:
        self.status: int | None = None  # known before the rest is there
        self._data = bytearray()
        self._is_closed = False
        self._steps = self._parse()

    def feed(self, data: bytes) -> Response | None:
        """Takes what was received, b"" if the connection was closed. Returns a complete response.

        Raises ValueError if this is not HTTP, EOFError if the rest will never come.
        """
        self._data += data
        self._is_closed = not data
        try:
            next(self._steps)
        except StopIteration as done:
            response: Response = done.value
            return response
        return None

    def _parse(self) -> Generator[None, None, Response]:
        head = (yield from self._head()).decode("latin-1")
        pairs = (line.partition(":") for line in head.split("\r\n")[1:])
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        assert self.status is not None
        is_reusable = headers.get("connection", "").lower() != "close"
        if headers.get("transfer-encoding", "").lower() == "chunked":
            body = yield from self._chunks()
        elif "content-length" in headers:
            size = _checked(int(headers["content-length"]), MAX_BODY_BYTES)
            body = yield from self._exactly(size)
        else:  # it ends with the connection
            while not self._is_closed:
                _checked(len(self._data), MAX_BODY_BYTES)
                yield
            body, is_reusable = bytes(self._data), False
        return Response(self.status, headers, body, is_reusable)

    def _head(self) -> Generator[None, None, bytes]:
        """Everything before the empty line; the status as soon as the first line is there."""
        while True:
            if self.status is None and (end := self._data.find(b"\n")) >= 0:
                self.status = _status_of(bytes(self._data[:end]))
            if (end := self._data.find(b"\r\n\r\n")) >= 0:
                break
            _checked(len(self._data), MAX_HEAD_BYTES)
            if self._is_closed:
                raise EOFError("the connection was closed before an answer came")
            yield
        head = bytes(self._data[: _checked(end, MAX_HEAD_BYTES)])
        del self._data[: end + 4]
        return head

    def _chunks(self) -> Generator[None, None, bytes]:
        body = bytearray()
        while size := int((yield from self._line()).split(b";")[0] or b"x", 16):
            _checked(len(body) + size, MAX_BODY_BYTES)
            body += (yield from self._exactly(size + 2))[:-2]
        yield from self._line()
        return bytes(body)

    def _line(self) -> Generator[None, None, bytes]:
        while (end := self._data.find(b"\n")) < 0:
            _checked(len(self._data), MAX_HEAD_BYTES)
            if self._is_closed:
                raise EOFError("the connection was closed before an answer came")
            yield
        line = bytes(self._data[:end]).rstrip(b"\r")
        del self._data[: end + 1]
        return line

    def _exactly(self, size: int) -> Generator[None, None, bytes]:
        while len(self._data) < size:
            if self._is_closed:
                raise EOFError("the connection was closed in the middle of an answer")
            yield
        part = bytes(self._data[:size])
        del self._data[:size]
        return part


def _status_of(line: bytes) -> int:
    """The 200 of `HTTP/1.1 200 OK`."""
    parts = line.split()
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/") or len(parts[1]) != 3:
        raise ValueError("the answer is not HTTP")
    if not parts[1].isdigit():
        raise ValueError("the answer is not HTTP")
    return int(parts[1])


def _checked(size: int, limit: int) -> int:
    if not 0 <= size <= limit:
        raise ValueError(f"an answer of {size} bytes, expected at most {limit}")
    return size


def http_status(
    endpoint: tuple[str, int], path: str, limit: float, method: str = "GET", form: str = ""
) -> tuple[int | None, str]:
    """The HTTP status of one request, or None if none came within `limit` s; and the reason."""
    deadline = time.monotonic() + limit
    parser = ResponseParser()
    try:
        with _connect(*endpoint, deadline) as link:
            link.sendall(render_request(endpoint, method, path, form, is_last=True))
            while parser.status is None:
                link.settimeout(_remaining_s(deadline))  # for all of it, so that a trickle ends too
                parser.feed(link.recv(256))
    except (OSError, ValueError, EOFError, RuntimeError) as error:
        if parser.status is None:
            return None, str(error) or type(error).__name__
    return parser.status, f"HTTP {parser.status}"


def _connect(name: str, port: int, deadline: float) -> socket.socket:
    import socket

    error = OSError(f"no address found for {name!r}")
    for family, kind, proto, _, address in _addresses(name, port, deadline):
        link = socket.socket(family, kind, proto)
        try:
            link.settimeout(_remaining_s(deadline))
            link.connect(address)
            return link
        except OSError as refused:
            link.close()
            error = refused
    raise error


def _addresses(name: str, port: int, deadline: float) -> list[tuple[int, int, int, str, tuple]]:  # type: ignore[type-arg]
    """Resolved in a thread: a resolver takes no deadline and may hang."""
    import socket
    import threading

    addresses: list[tuple] = []  # type: ignore[type-arg]

    def resolve(flags: int = 0) -> None:
        try:
            addresses.extend(socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=flags))
        except (OSError, ValueError):
            pass

    resolve(socket.AI_NUMERICHOST)
    if not addresses:
        thread = threading.Thread(target=resolve, daemon=True)
        thread.start()
        thread.join(_remaining_s(deadline))
    return list(addresses)


def _remaining_s(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left
