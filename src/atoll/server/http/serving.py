"""The HTTP server of a control plane: uvicorn behind a door that strangers cannot block."""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

import atoll
from atoll.core.errors import Permanent, ValidationError
from atoll.sdk.release import HEADER
from atoll.server.http.connections import Door, Limits, limits_of, raise_file_limit

if TYPE_CHECKING:
    from starlette.types import ASGIApp

BACKLOG = 2048
# Connections that asyncio accepts in a row. It tells of each that finds no file left.
ACCEPTED_AT_ONCE = 16


class GuardedServer(uvicorn.Server):
    """A uvicorn server with the limits of `connections.py`; it is run with open sockets."""

    def __init__(
        self, app: ASGIApp, *, tls: ssl.SSLContext | None = None, limits: Limits | None = None
    ) -> None:
        self.door = Door(limits or limits_of(raise_file_limit()))
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
                headers=[(HEADER, atoll.__version__)],
                timeout_keep_alive=int(self.door.limits.idle_s),
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
        """Serves who connects to the socket, which is closed when the server stops."""

        def accept() -> asyncio.Protocol:
            return self.door.protocol(self.config, self.server_state, self.lifespan.state)

        # What does not leave this machine, and is the user's own, needs no certificate.
        tls = None if listening.family == socket.AF_UNIX else self.tls
        server = await asyncio.get_running_loop().create_server(
            accept,
            sock=listening,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self.door.limits.head_s,
            backlog=ACCEPTED_AT_ONCE,
        )
        listening.listen(BACKLOG)  # for those that wait to be accepted
        self.servers.append(server)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises Permanent, naming the option that is wrong."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named as TCP: only then does asyncio disable the delay that costs 40 ms per answer.
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


def tls_of(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """The TLS of a server, or None for plain HTTP. Raises ValidationError in one line for what is
    missing, unreadable or no pair."""
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
