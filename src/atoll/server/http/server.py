"""The uvicorn server: listening sockets, TLS, and limits on connections.

Anybody may connect, so a connection counts as unauthenticated until one of its requests has a valid
token. Unauthenticated connections have a share of their own, and a new one replaces the oldest of
them: clients with a token send it at once. The server does not wait for a request that does not
arrive, nor for a client that does not read.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

import atoll
from atoll.backends.local.state import peer_uid
from atoll.core.errors import Permanent, Temporary, ValidationError

if TYPE_CHECKING:
    from starlette.types import ASGIApp


BACKLOG = 2048  # clients that wait to be accepted, as after a restart with many watchers
# Connections that asyncio accepts in a row: it logs each one that finds no file descriptor left.
ACCEPT_BATCH = 16
HEAD_BYTES = 2**16  # of the head of a request, as most servers allow
MAX_FILES = 2**16  # descriptors to ask the kernel for: 4,096 connections with room for ranks
SWEEP_S = 1.0  # between two checks of all deadlines


@dataclass(frozen=True)
class Limits:
    """Limits of one server. Times are in seconds."""

    connections: int = 4096
    unauthenticated: int = 1024  # a quarter of them
    per_namespace: int = 2048  # half of them: no namespace can take all
    head_s: float = 10.0  # for the head of a request, and for a TLS handshake
    idle_s: float = 100.0  # between two requests: longer than clients keep idle connections
    unauthenticated_idle_s: float = 10.0
    body_s: float = 30.0  # for a body, plus one second for every `body_rate` bytes
    body_rate: float = 50_000.0  # bytes a second of the slowest upload that is accepted
    write_timeout_s: float = 60.0  # for a client that reads nothing of its answer


def limits_for(files: int, **changes: Any) -> Limits:
    """The limits of a server that may open `files` files; half of them are for other work."""
    most = max(16, min(files // 2, Limits.connections * 4))
    return Limits(
        **{
            "connections": most,
            "unauthenticated": max(8, most // 4),
            "per_namespace": max(8, most // 2),
            **changes,
        }
    )


def raise_file_limit() -> int:
    """Raises the soft limit of open files as far as allowed and useful, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        return target
    return MAX_FILES if soft == resource.RLIM_INFINITY else soft


class ConnectionLimiter:
    """All connections of one server. uvicorn calls `protocol` for each new one."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.unauthenticated: dict[Connection, None] = {}  # the oldest first
        self.authenticated: Counter[str] = Counter()  # connections by namespace
        self.open: set[Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    def protocol(self, *args: Any, **options: Any) -> Connection:
        return Connection(self, *args, **options)

    def enter(self, connection: Connection) -> None:
        self.open.add(connection)
        self.unauthenticated[connection] = None
        if len(self.unauthenticated) > self.limits.unauthenticated:
            oldest = next(
                (c for c in self.unauthenticated if c.is_waiting), next(iter(self.unauthenticated))
            )
            self.unauthenticated.pop(oldest)
            oldest.give_up()
        if self._sweep is None:
            self._schedule(connection.loop)

    def leave(self, connection: Connection) -> None:
        self.open.discard(connection)
        self.unauthenticated.pop(connection, None)
        if connection.namespace is not None:
            self.authenticated[connection.namespace] -= 1

    def authenticate(self, connection: Connection, namespace: str) -> None:
        """Counts the connection to its namespace. Raises Temporary if that has too many."""
        if connection.namespace == namespace or connection not in self.open:
            return
        limits = self.limits
        if self.authenticated[namespace] >= limits.per_namespace:
            raise Temporary(
                f"the namespace {namespace!r} has {limits.per_namespace} connections open, as many "
                "as it may: close some, then try again"
            )
        if self.authenticated.total() >= limits.connections - limits.unauthenticated:
            raise Temporary("too many connections are open: try again later")
        if connection.namespace is not None:
            self.authenticated[connection.namespace] -= 1
        self.unauthenticated.pop(connection, None)
        connection.namespace = namespace
        self.authenticated[namespace] += 1

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        self._sweep = loop.call_later(
            min(SWEEP_S, self.limits.head_s / 4), self._check_deadlines, loop
        )

    def _check_deadlines(self, loop: asyncio.AbstractEventLoop) -> None:
        """Closes connections whose deadline has passed; goes on while there are connections."""
        now = time.monotonic()
        for connection in list(self.open):
            connection.check(now)
        self._sweep = None
        if self.open:
            self._schedule(loop)


class Connection(HttpToolsProtocol):
    """One connection of uvicorn, with a deadline for what the server waits for."""

    def __init__(self, limiter: ConnectionLimiter, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.limiter = limiter
        self.namespace: str | None = None
        self._deadline: float | None = None
        self._head_bytes = 0
        self._is_head = True
        self._body_bytes = 0
        self._body_since = 0.0
        self._pending_bytes = 0
        self._stuck_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection.family == socket.AF_UNIX and peer_uid(connection) != os.geteuid():
            transport.abort()  # another user: read nothing from it
            return
        self._deadline = time.monotonic() + self.limiter.limits.head_s
        self.limiter.enter(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.limiter.leave(self)
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
        self._deadline = time.monotonic() + self.limiter.limits.head_s

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._is_head = False
        self._body_bytes, self._body_since = 0, time.monotonic()
        self._deadline = self._body_since + self.limiter.limits.body_s

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        self._body_bytes += len(body)
        limits = self.limiter.limits
        self._deadline = self._body_since + limits.body_s + self._body_bytes / limits.body_rate

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._deadline = None  # from here on the client waits for the server

    def on_response_complete(self) -> None:
        is_all_here = not self.cycle.more_body
        super().on_response_complete()
        if self.pipeline or self.transport.is_closing():
            return
        if not is_all_here:  # answered before the body came: nobody needs it
            self.transport.close()
        limits = self.limiter.limits
        idle_s = limits.unauthenticated_idle_s if self.namespace is None else limits.idle_s
        self._deadline = time.monotonic() + idle_s

    def authenticate(self, namespace: str) -> None:
        self.limiter.authenticate(self, namespace)

    @property
    def is_waiting(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def check(self, now: float) -> None:
        """Ends the connection if it is late, or if the client does not read its answer."""
        pending_bytes = self.transport.get_write_buffer_size()
        if self._deadline is not None and self.flow.read_paused:
            self._body_since += SWEEP_S  # the server itself does not read
            self._deadline += SWEEP_S
        elif self._deadline is not None and now > self._deadline and pending_bytes == 0:
            self.give_up()
        if pending_bytes == 0 or pending_bytes < self._pending_bytes:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = now
        elif now - self._stuck_since > self.limiter.limits.write_timeout_s:
            self.transport.abort()
        self._pending_bytes = pending_bytes

    def give_up(self) -> None:
        """Closes the connection, with a reason if a request had begun."""
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


class GuardedServer(uvicorn.Server):
    """A uvicorn server with a ConnectionLimiter; `serve` takes open sockets."""

    def __init__(
        self, app: ASGIApp, *, tls: ssl.SSLContext | None = None, limits: Limits | None = None
    ) -> None:
        self.limiter = ConnectionLimiter(limits or limits_for(raise_file_limit()))
        self.tls = tls
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                lifespan="on",
                http="httptools",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                headers=[("Atoll-Release", atoll.__version__)],
                timeout_keep_alive=int(self.limiter.limits.idle_s),
                timeout_graceful_shutdown=3,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise Permanent("the server cannot start; its log says why")
        self.servers = []
        for listening in sockets or ():
            await self.accept_from(listening)
        self.started = True

    async def accept_from(self, listening: socket.socket) -> None:
        """Serves clients of the socket, which is closed when the server stops."""

        def accept() -> asyncio.Protocol:
            return self.limiter.protocol(self.config, self.server_state, self.lifespan.state)

        # A socket of this machine that only its user can open needs no certificate.
        tls = None if listening.family == socket.AF_UNIX else self.tls
        server = await asyncio.get_running_loop().create_server(
            accept,
            sock=listening,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self.limiter.limits.head_s,
            backlog=ACCEPT_BATCH,
        )
        listening.listen(BACKLOG)  # for those that wait to be accepted
        self.servers.append(server)


def listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket. Raises Permanent and names the option that is wrong."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With IPPROTO_TCP asyncio sets TCP_NODELAY; without it an answer may take 40 ms longer.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
        return listening
    except (OSError, OverflowError) as error:
        listening.close()
        reason = getattr(error, "strerror", None) or str(error)
        is_host = isinstance(error, socket.gaierror) or (
            isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL
        )
        wrong = "host" if is_host else "port"
        raise Permanent(
            f"cannot listen on {host}:{port}: {reason}; choose another --{wrong}"
        ) from error


def load_tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """The TLS context of a server, or None for plain HTTP. Raises ValidationError for files that
    are missing, unreadable or no pair."""
    if certificate is None and key is None:
        return None
    for option, path in (("--tls-cert", certificate), ("--tls-key", key)):
        if path is None:
            raise ValidationError(option, None, "expected both --tls-cert and --tls-key")
        try:
            path.read_bytes()
        except OSError as error:
            reason = f"cannot read this file: {error.strerror}"
            raise ValidationError(option, str(path), reason) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(str(certificate), str(key), password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        is_pair = "KEY_VALUES_MISMATCH" in str(error)
        expected = f"expected the key of {certificate}" if is_pair else _reason(error)
        raise ValidationError("--tls-key", str(key), expected) from error
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted: expected one without a password")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return f"expected a certificate and its key in PEM ({error.reason or error})"
    return str(error)


# Limits how often the log repeats a message, so that nobody can fill the disk from outside.

WINDOW_S = 10.0  # with 50 messages of 200 bytes: at most 1 kB/s for each kind
MAX_EQUAL = 50  # equal messages in a window
MAX_TRACED = 5  # those with a traceback
MAX_KEYS = 1000


class RateLimitFilter(logging.Filter):
    """Drops messages that repeat too often; the next one that passes says how many."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._counts: dict[tuple[str, str], tuple[float, int]] = {}  # start of the window, count

    def filter(self, record: logging.LogRecord) -> bool:
        key, now = (record.name, str(record.msg)[:200]), self._clock()
        since, count = self._counts.get(key, (now, 0))
        most = MAX_TRACED if record.exc_info else MAX_EQUAL
        if now - since >= WINDOW_S:
            if count > most:
                text = record.getMessage()
                record.msg, record.args = f"{text} ({count - most} more like this before)", ()
            since, count = now, 0
        if len(self._counts) >= MAX_KEYS and key not in self._counts:
            self._counts.clear()
        self._counts[key] = since, count + 1
        return count < most


def configure_log(level: int) -> None:
    """Configures the log of a server, on standard error."""
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(RateLimitFilter())
