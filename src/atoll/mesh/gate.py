"""The gate at which a rank waits until its host's network is ready.

It never raises, and opens by itself after its timeout. It uses plain sockets and reads only the
first line of an HTTP answer: http.client would cost each rank 25 ms of imports.
"""

from __future__ import annotations

import math
import os
import sys
import time
from typing import TYPE_CHECKING, Literal

from atoll.core.mesh import degraded_path, ready_path, split_endpoint
from atoll.core.retry import Retry

if TYPE_CHECKING:
    import socket

MeshStatus = Literal["ready", "degraded", "timeout"]

REQUEST_S = 2.0  # one request, name lookup included
MIN_REQUEST_S = 0.5  # so that `timeout=0` can still get an answer
HOST_NAMES = ("NODE_NAME", "KUBERNETES_NODE_NAME")
# The first variable that is set counts; one that is set to nothing says that the training has no
# gate. A c10d training needs that: there the second variable names a TCPStore, not an etcd.
ENDPOINT_NAMES = ("ATOLL_MESH_ENDPOINT", "BASILICA_RDZV_ENDPOINT")

_last: MeshStatus | None = None


def mesh_status() -> MeshStatus | None:
    """How the last `mesh_wait()` ended; None if nothing was waited for."""
    return _last


def mesh_wait(timeout: float = 60) -> None:
    """Return when this host's network is ready, known to be degraded, or `timeout` has passed.

    Call it before `torch.distributed.init_process_group()`. It never raises; `mesh_status()` says
    which it was. Without a host name or an endpoint in the environment it returns at once.
    """
    global _last
    host = next((value for name in HOST_NAMES if (value := os.environ.get(name))), "")
    endpoint = next((os.environ[name] for name in ENDPOINT_NAMES if name in os.environ), "")
    if not host or not endpoint:
        _last = None
        return
    limit = _seconds(timeout)
    _say(f"BEGIN host={host!r} endpoint={endpoint!r} timeout={limit:g}s")
    host_port = split_endpoint(endpoint)
    if host_port is None:
        _last = "timeout"  # waiting would not make it right
        _say(f"TIMEOUT after=0s bad endpoint {endpoint!r}, expected host:port")
        return
    started = time.monotonic()
    _last, why = _poll(host_port, host, started + limit)
    label = {"ready": "OK", "degraded": "DEGRADED", "timeout": "TIMEOUT"}[_last]
    _say(f"{label} after={time.monotonic() - started:.0f}s host={host!r}{why}")


def _poll(endpoint: tuple[str, int], host: str, deadline: float) -> tuple[MeshStatus, str]:
    outcomes: tuple[tuple[MeshStatus, str], ...] = (
        ("ready", ready_path(host)),
        ("degraded", degraded_path(host)),
    )
    patience_s = deadline - time.monotonic()
    retry = Retry(0.02, 2.0, growth=1.6, patience_s=patience_s, clock=time.monotonic)
    why = ""
    while True:
        for outcome, path in outcomes:
            left = deadline - time.monotonic()
            code, why = http_status(endpoint, path, min(REQUEST_S, max(left, MIN_REQUEST_S)))
            if code == 200:
                return outcome, ""
            if code is None or time.monotonic() >= deadline:
                break  # no answer, or no time left: asking for the second key would not help
        pause_s = retry.pause_s()
        if pause_s is None:
            return "timeout", f" last: {why}"
        time.sleep(pause_s)


def http_status(
    endpoint: tuple[str, int], path: str, limit: float, method: str = "GET", form: str = ""
) -> tuple[int | None, str]:
    """The HTTP status of one request, or None if none came within `limit`; and why, in words."""
    deadline = time.monotonic() + limit
    name, port = endpoint
    host = f"[{name}]" if ":" in name else name
    request = f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
    if form:
        kind = "application/x-www-form-urlencoded"
        request += f"Content-Type: {kind}\r\nContent-Length: {len(form)}\r\n"
    request += f"\r\n{form}"
    try:
        with _connected(name, port, deadline) as link:
            link.sendall(request.encode("ascii", "replace"))
            code = _status_line(link, deadline)
    except (OSError, ValueError, RuntimeError) as error:
        return None, str(error) or type(error).__name__
    return code, f"HTTP {code}" if code else "the answer is not HTTP"


def _connected(name: str, port: int, deadline: float) -> socket.socket:
    import socket

    error = OSError(f"no address found for {name!r}")
    for family, kind, proto, _, address in _addresses(name, port, deadline):
        link = socket.socket(family, kind, proto)
        try:
            link.settimeout(_left(deadline))
            link.connect(address)
            return link
        except OSError as refused:
            link.close()
            error = refused
    raise error


def _addresses(name: str, port: int, deadline: float) -> list[tuple[int, int, int, str, tuple]]:  # type: ignore[type-arg]
    """Looked up in a thread: a resolver takes no deadline and may hang."""
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
        thread.join(_left(deadline))
    return list(addresses)


def _status_line(link: socket.socket, deadline: float) -> int | None:
    """The 200 of `HTTP/1.1 200 OK`; None if the answer does not begin like that."""
    head = b""
    while b"\n" not in head and len(head) < 1024:
        link.settimeout(_left(deadline))  # for the whole line, so that a trickle ends too
        more = link.recv(256)
        if not more:
            break
        head += more
    parts = head.split(b"\n", 1)[0].split()
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/") or len(parts[1]) != 3:
        return None
    return int(parts[1]) if parts[1].isdigit() else None


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left


def _seconds(timeout: object) -> float:
    try:
        seconds = float(timeout)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return 60.0
    return 60.0 if math.isnan(seconds) else max(0.0, seconds)


def _say(text: str) -> None:
    try:
        sys.stderr.write(f"mesh-wait: {text}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass  # no stderr, or a closed one, is no reason not to train
