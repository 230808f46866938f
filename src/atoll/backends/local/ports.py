"""Port leases: a port is reserved until it is released, without being bound.

A rank must be able to bind its MASTER_PORT itself, so the port cannot be kept bound for it. What
is kept instead is a socket in Linux's abstract name space, `\\0atoll-port-<port>`: one holder at a
time among all processes and users, gone with its holder, and seen by exactly those who share the
ports, as both belong to the network namespace. A lock file would be none of these three.
"""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from typing import NamedTuple

from atoll.core.errors import Temporary

LOWEST, HIGHEST = 15_000, 32_767
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class PortLease(NamedTuple):
    """`holder` keeps the lease: closed, or the process dead, the port is free again.

    Programs started afterwards do not inherit it, unless it is passed to them.
    """

    port: int
    holder: socket.socket

    def release(self) -> None:
        self.holder.close()


def lease_port(host: str = "127.0.0.1", preferred: int = 0) -> PortLease:
    """A TCP port that nobody listens on and no other lease holds; `preferred` if it is free.

    Outside the range the kernel hands out to outgoing connections, so that none of those takes it
    between now and the rank's bind. Raises Temporary when every port is taken.
    """
    candidates = outside(_ephemeral(), LOWEST, HIGHEST)
    # A random start: leases made at the same time then rarely ask for the same port.
    start = int.from_bytes(os.urandom(4)) % len(candidates)
    first = [preferred] if preferred else []
    for port in first + candidates[start:] + candidates[:start]:
        holder = _hold(port)
        if holder is None:
            continue
        lease = PortLease(port, holder)
        try:
            if _can_bind(host, port):
                return lease
        except OSError:
            lease.release()
            raise
        lease.release()
    raise Temporary(f"every port from {LOWEST} to {HIGHEST} is in use", retry_after_s=5.0)


def outside(ephemeral: tuple[int, int], lowest: int, highest: int) -> list[int]:
    """Ports not in `ephemeral`; all of them if nothing would be left."""
    ports = [port for port in range(lowest, highest + 1) if not _within(port, ephemeral)]
    return ports or list(range(lowest, highest + 1))


def _within(port: int, span: tuple[int, int]) -> bool:
    return span[0] <= port <= span[1]


def _ephemeral() -> tuple[int, int]:
    try:
        low, high = EPHEMERAL.read_text().split()
        return int(low), int(high)
    except (OSError, ValueError):
        return 32_768, 60_999


def _hold(port: int) -> socket.socket | None:
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        holder.bind(f"\0atoll-port-{port}")
    except OSError:
        holder.close()
        return None
    return holder


def _can_bind(host: str, port: int) -> bool:
    """Tried on every address as well: torch's TCPStore listens on all of them."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for address in {host, "::" if family == socket.AF_INET6 else "0.0.0.0"}:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
                # Two sockets may be bound to one port until one of them listens.
                probe.listen(1)
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise  # not an address of this machine: no port will do
                return False
    return True
