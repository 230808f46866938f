"""Listeners of another user on this machine. They tell what they were sent; as root they become
`nobody`."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.backends.local.state import listen_locally

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
# Becomes another user, then begins to listen on the socket that it was given.
LISTENER = """
import os, socket, sys
listening = socket.socket(fileno=int(sys.argv[1]))
os.setresuid(65534, 65534, 65534)
listening.listen()
os.write(1, b"listening\\n")
connection, _ = listening.accept()
os.write(1, b"received " + connection.recv(1000) + b"\\n")
"""
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


@contextlib.contextmanager
def listening_on(port: int, received: Path) -> Iterator[None]:
    """While the block runs, another user has that port; what it is sent is in `received`."""
    command = [sys.executable, __file__, str(port), str(received)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as listener:
        assert listener.stdout is not None
        assert listener.stdout.readline() == b"listening\n"
        try:
            yield
        finally:
            listener.kill()


@contextlib.contextmanager
def listening_in(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """While the block runs, another user serves the socket in that directory, once."""
    with listen_locally(directory, 5) as listening:
        file = listening.fileno()
        with subprocess.Popen(
            [sys.executable, "-c", LISTENER, str(file)], stdout=subprocess.PIPE, pass_fds=[file]
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"listening\n"
            yield process


def main(port: int, received: str) -> None:
    file = os.open(received, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    listener = socket.create_server(("127.0.0.1", port))
    watched = selectors.DefaultSelector()
    watched.register(listener, selectors.EVENT_READ)
    os.write(sys.stdout.fileno(), b"listening\n")
    while True:
        for key, _ in watched.select():
            if key.fileobj is listener:
                watched.register(listener.accept()[0], selectors.EVENT_READ)
                continue
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            with contextlib.suppress(OSError):
                os.write(file, connection.recv(2**16))
                connection.sendall(REFUSAL)
            watched.unregister(connection)
            connection.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
