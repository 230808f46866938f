"""A line to a server, for tests in which it breaks."""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import urlsplit


class Proxy:
    """A line to the server that can be cut, refused or left silent."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 443
        self._target = host, port
        self._listening = socket.create_server((host, 0))
        self.url = f"{parts.scheme}://{host}:{self._listening.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.is_refusing = False
        self.is_silent = False
        self.connections = 0
        self._lock = (
            threading.Lock()
        )  # a connection is in `_pairs` or closed, whoever cuts meanwhile
        self._is_closed = False
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            with self._lock:
                if self.is_refusing or self._is_closed:
                    here.close()
                    continue
                try:
                    there = socket.create_connection(self._target)
                except OSError:  # the server is down: so is the line to it
                    here.close()
                    continue
                self._pairs.append((here, there))
            for a, b in ((here, there), (there, here)):
                threading.Thread(target=self._pump, args=(a, b), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not self.is_silent:
                    sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # ends an accept that waits
        self._listening.close()
        self._thread.join(60)
        self.cut()
