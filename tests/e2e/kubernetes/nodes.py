"""A node of the test cluster: its own containerd and kubelet, so that pods really run.

Each has its own directories, sockets and bridge, so one machine holds several and one of them
can be killed. Nothing listens outside this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.e2e.kubernetes.images import ATOLL, BUSYBOX, ETCD, PAUSE, archive

if TYPE_CHECKING:
    from tests.e2e.kubernetes.control_plane import ControlPlane

# What ranks of the tests run in: made here for our own nodes, pulled by a cluster that is there.
IMAGE = BUSYBOX if "KUBEBUILDER_ASSETS" in os.environ else "busybox:1.37"
IMAGE = os.environ.get("ATOLL_TEST_IMAGE", IMAGE)
CNI_RESULTS = Path("/var/lib/cni/results")

CONTAINERD = """
version = 2
root = "{where}/root"
state = "{where}/state"
[grpc]
  address = "{where}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause}"
  restrict_oom_score_adj = true
  disable_tcp_service = true
  stream_server_address = "127.0.0.1"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{where}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{snapshotter}"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.internal.v1.opt"]
  path = "{where}/opt"
"""


class Node:
    """One node, `node-N`; `start()` returns once it is Ready."""

    def __init__(self, plane: ControlPlane, number: int) -> None:
        self.plane = plane
        self.number = number
        self.name = f"node-{number}"
        self.where = plane.where / self.name
        self._bridge = f"atoll{plane.number}n{number}"[:15]
        self.address = f"10.{200 + number}.{plane.number}.1"
        self._subnet = f"10.{200 + number}.{plane.number}"
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def gateway(self) -> str:
        """This machine, as pods of the node reach it."""
        return f"{self._subnet}.1"

    def start(self) -> None:
        self.where.mkdir(parents=True, exist_ok=True)
        self._network()
        self._containerd()
        self._images()
        self._kubelet()

    def stop(self) -> None:
        """Everything of the node is gone: kubelet, containers, containerd, mounts, bridge."""
        self.kill_kubelet()
        self._ctr_all()
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        for line in reversed(Path("/proc/mounts").read_text().splitlines()):
            target = line.split()[1]
            if target.startswith(str(self.where)):
                subprocess.run(["umount", "-l", target], check=False, capture_output=True)
        self._clear_network()
        for controller in Path("/sys/fs/cgroup").iterdir():
            for folder, _, _ in os.walk(controller / self._bridge, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)

    def _clear_network(self) -> None:
        """Nobody took the pods down one by one, so their network namespaces are still there."""
        for result in CNI_RESULTS.glob(f"{self._bridge}-*"):
            for interface in json.loads(result.read_text())["result"]["interfaces"]:
                namespace = interface.get("sandbox", "").rpartition("/")[2]
                command = ["ip", "netns", "del", namespace]
                subprocess.run(command, check=False, capture_output=True)
            result.unlink()
        subprocess.run(["ip", "link", "del", self._bridge], check=False, capture_output=True)

    def kill_kubelet(self) -> None:
        """The node falls silent, as when its machine loses power; its containers are killed too."""
        if self._processes and len(self._processes) > 1:
            kubelet = self._processes.pop()
            kubelet.kill()
            kubelet.wait()
            self._ctr_all()

    def pause_kubelet(self, seconds: float) -> None:
        """It neither acts nor reports for a while; its containers go on."""
        kubelet = self._processes[-1]
        kubelet.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        kubelet.send_signal(signal.SIGCONT)

    def kill_container(self, container: str, signal_name: str) -> None:
        """To its first process alone, from outside the container."""
        for line in self._ctr("tasks", "list").splitlines()[1:]:
            task, pid, _ = line.split()
            if task == container:
                os.kill(int(pid), signal.Signals[signal_name])
                return
        raise LookupError(f"no container {container} on {self.name}")

    def _ctr_all(self) -> None:
        for task in self._ctr("tasks", "list", "-q", is_checked=False).split():
            self._ctr("tasks", "delete", "-f", task, is_checked=False)

    def _ctr(self, *command: str, is_checked: bool = True, stdin: bytes | None = None) -> str:
        address = f"{self.where}/containerd.sock"
        try:
            done = subprocess.run(
                ["ctr", "--connect-timeout", "5s", "-a", address, "-n", "k8s.io", *command],
                input=stdin,
                capture_output=True,
                check=is_checked,
                timeout=100,
            )
        except subprocess.TimeoutExpired:
            if is_checked:
                raise
            return ""
        return done.stdout.decode()

    def _network(self) -> None:
        run = subprocess.run
        run(["ip", "link", "add", self._bridge, "type", "bridge"], check=True)
        run(["ip", "addr", "add", f"{self._subnet}.1/24", "dev", self._bridge], check=True)
        run(["ip", "link", "set", self._bridge, "up"], check=True)
        cni = self.where / "cni"
        cni.mkdir(exist_ok=True)
        ipam = {
            "type": "host-local",
            "dataDir": str(self.where / "ipam"),
            "ranges": [[{"subnet": f"{self._subnet}.0/24"}]],
            "routes": [{"dst": "0.0.0.0/0"}],  # to the API server, and to pods of other nodes
        }
        plugins = [
            {"type": "bridge", "bridge": self._bridge, "isGateway": True, "ipam": ipam},
        ]
        config = {"cniVersion": "0.4.0", "name": self._bridge, "plugins": plugins}
        (cni / "10-bridge.conflist").write_text(json.dumps(config))

    def _containerd(self) -> None:
        from tests.e2e.kubernetes.control_plane import wait_for

        config = self.where / "containerd.toml"
        text = CONTAINERD.format(where=self.where, pause=PAUSE, snapshotter="overlayfs")
        config.write_text(text)
        self._spawn("containerd", "containerd", "--config", str(config))
        wait_for(
            "containerd answers",
            lambda: (
                (self.where / "containerd.sock").exists()
                and "ID" in self._ctr("plugins", "list", is_checked=False)
            ),
        )

    def _images(self) -> None:
        for name in (BUSYBOX, PAUSE, ATOLL, ETCD):
            self._ctr("images", "import", "-", stdin=archive(name))

    def _kubelet(self) -> None:
        config = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": f"{self._subnet}.1",
            "port": 10250,
            "healthzPort": 0,
            "readOnlyPort": 0,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "failCgroupV1": False,
            "failSwapOn": False,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self._bridge}",
            "cgroupsPerQOS": True,
            "enforceNodeAllocatable": [],
            "containerRuntimeEndpoint": f"unix://{self.where}/containerd.sock",
            "resolvConf": "",
            "clusterDomain": "cluster.local",
            "clusterDNS": [self.plane.dns_address],
            "evictionHard": {"memory.available": "10Mi", "nodefs.available": "0%"}
            | {"imagefs.available": "0%", "nodefs.inodesFree": "0%", "imagefs.inodesFree": "0%"},
            "nodeStatusUpdateFrequency": "1s",
            "nodeStatusReportFrequency": "10s",
            "nodeLeaseDurationSeconds": 4,
            "syncFrequency": "5s",
            "imageGCHighThresholdPercent": 100,
            "localStorageCapacityIsolation": False,
            "podLogsDir": str(self.where / "podlogs"),
            "maxPods": 200,
        }
        path = self.where / "kubelet.json"
        path.write_text(json.dumps(config))
        for controller in Path("/sys/fs/cgroup").iterdir():
            if (controller / "tasks").exists():
                (controller / self._bridge).mkdir(exist_ok=True)
        self._spawn(
            "kubelet",
            str(self.plane.binaries / "kubelet"),
            f"--config={path}",
            f"--kubeconfig={self.plane.kubeconfig}",
            f"--hostname-override={self.name}",
            f"--node-ip={self._subnet}.1",
            f"--root-dir={self.where / 'kubelet'}",
            f"--cert-dir={self.where / 'pki'}",
        )

    def _spawn(self, name: str, *command: str) -> None:
        log = (self.where / f"{name}.log").open("ab")
        self._processes.append(
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        )
        log.close()
