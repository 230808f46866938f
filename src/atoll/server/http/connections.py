"""Connections: how many there may be, and how long each may keep the server waiting.

Nobody needs a token to connect, so a connection counts as a stranger until a request of it shows a
valid one. Strangers have a share of their own, and the oldest of them is closed for a new one: who
has a token shows it at once. A request that does not arrive, or an answer that nobody reads, is not
waited for.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from atoll.backends.local.plane_socket import peer_uid
from atoll.core.errors import Temporary

HEAD_BYTES = 2**16
MAX_FILES = 2**16
SWEEP_S = 1.0


@dataclass(frozen=True)
class Limits:
    """What one server allows. Times are in seconds."""

    connections: int = 4096
    strangers: int = 1024  # of these
    of_namespace: int = 2048  # of these
    head_s: float = 10.0  # for the head of a request, and a TLS handshake
    idle_s: float = 100.0  # between two requests; longer than clients keep theirs
    stranger_idle_s: float = 10.0
    body_s: float = 30.0  # for the body, and as long again for each `body_rate`
    body_rate: float = 50_000.0  # bytes per second of the slowest upload
    unread_s: float = 60.0  # for an answer of which nothing is read


def limits_of(files: int, **changes: Any) -> Limits:
    """The limits of a server that may open so many files. Half of them are for its other work."""
    most = max(16, min(files // 2, Limits.connections * 4))
    return Limits(
        **{
            "connections": most,
            "strangers": max(8, most // 4),
            "of_namespace": max(8, most // 2),
            **changes,
        }
    )


def raise_file_limit() -> int:
    """Raises the soft limit of open files as far as is allowed and useful; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return MAX_FILES if soft == resource.RLIM_INFINITY else soft


class Door:
    """All connections of one server. `protocol` is what uvicorn makes one of for each."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.strangers: dict[Connection, None] = {}  # the oldest first
        self.known: Counter[str] = Counter()  # connections by namespace
        self.open: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    def protocol(self, *args: Any, **options: Any) -> Connection:
        return Connection(self, *args, **options)

    def enter(self, connection: Connection) -> None:
        self.open.add(connection)
        self.strangers[connection] = None
        if len(self.strangers) > self.limits.strangers:
            oldest = next((c for c in self.strangers if c.is_waiting), next(iter(self.strangers)))
            self.strangers.pop(oldest)
            oldest.give_up()
        if self._sweep is None:
            self._plan(connection.loop)

    def leave(self, connection: Connection) -> None:
        self.open.discard(connection)
        self.strangers.pop(connection, None)
        if connection.namespace is not None:
            self.known[connection.namespace] -= 1

    def introduce(self, connection: Connection, namespace: str) -> None:
        """The connection has shown a token. Raises Temporary if its namespace has too many."""
        if connection.namespace == namespace or connection not in self.open:
            return
        limits = self.limits
        if self.known[namespace] >= limits.of_namespace:
            raise Temporary(
                f"the namespace {namespace!r} has {limits.of_namespace} connections open, as many "
                "as it may: close some, then try again"
            )
        if self.known.total() >= limits.connections - limits.strangers:
            raise Temporary("too many connections are open: try again later")
        if connection.namespace is not None:
            self.known[connection.namespace] -= 1
        self.strangers.pop(connection, None)
        connection.namespace = namespace
        self.known[namespace] += 1

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        self._sweep = loop.call_later(min(SWEEP_S, self.limits.head_s / 4), self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ends what has kept the server waiting for too long. Without connections it rests."""
        now = time.monotonic()
        for connection in list(self.open):
            connection.check(now)
        self._sweep = None
        if self.open:
            self._plan(loop)


class Connection(HttpToolsProtocol):
    """One connection of uvicorn, with a deadline for whatever is waited for."""

    def __init__(self, door: Door, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.door = door
        self.namespace: str | None = None
        self._deadline: float | None = None
        self._head_bytes = 0
        self._is_head = True
        self._body_bytes = 0
        self._body_since = 0.0
        self._unread = 0
        self._unread_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection.family == socket.AF_UNIX and peer_uid(connection) != os.geteuid():
            transport.abort()  # of another user: not a byte of it is read
            return
        self._deadline = time.monotonic() + self.door.limits.head_s
        self.door.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.door.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        was_head = self._is_head
        super().data_received(data)
        if self._is_head:
            self._head_bytes += len(data) if was_head else 1
            if self._head_bytes > HEAD_BYTES:
                self._refuse(b"431 Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["connection"] = self
        self._is_head, self._head_bytes = True, 0
        self._deadline = time.monotonic() + self.door.limits.head_s

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._is_head = False
        self._body_bytes, self._body_since = 0, time.monotonic()
        self._deadline = self._body_since + self.door.limits.body_s

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._body_bytes += len(body)
        limits = self.door.limits
        self._deadline = self._body_since + limits.body_s + self._body_bytes / limits.body_rate

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._deadline = None  # from here on the server is waited for

    def on_response_complete(self) -> None:
        is_all_here = not self.cycle.more_body
        super().on_response_complete()
        if self.pipeline or self.transport.is_closing():
            return
        if not is_all_here:  # it was answered before its body came, which nobody wants any more
            self.transport.close()
        limits = self.door.limits
        idle_s = limits.stranger_idle_s if self.namespace is None else limits.idle_s
        self._deadline = time.monotonic() + idle_s

    def belongs_to(self, namespace: str) -> None:
        self.door.introduce(self, namespace)

    @property
    def is_waiting(self) -> bool:
        """Whether no request of it is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def check(self, now: float) -> None:
        """Ends the connection if it is late, or if nobody reads what it is sent."""
        unread = self.transport.get_write_buffer_size()
        if self._deadline is not None and self.flow.read_paused:
            self._body_since += SWEEP_S  # it is the server that does not read
            self._deadline += SWEEP_S
        elif self._deadline is not None and now > self._deadline and unread == 0:
            self.give_up()
        if unread == 0 or unread < self._unread:
            self._unread_since = None
        elif self._unread_since is None:
            self._unread_since = now
        elif now - self._unread_since > self.door.limits.unread_s:
            self.transport.abort()
        self._unread = unread

    def give_up(self) -> None:
        """Closes the connection; says why where a request had begun."""
        if self.transport.is_closing():
            self.transport.abort()
        elif self._is_head and self._head_bytes or self._is_body_due():
            self._refuse(b"408 Request Timeout")
        else:
            self.transport.close()

    def _is_body_due(self) -> bool:
        return self.cycle is not None and self.cycle.more_body and not self.cycle.response_started

    def _refuse(self, status: bytes) -> None:
        self.transport.write(
            b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-length: 0\r\n\r\n" % status
        )
        self.transport.close()
