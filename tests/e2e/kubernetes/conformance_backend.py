"""The table's faults on ranks that are pods: each one really provoked."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.core.status import Training
from atoll.operator.resource import to_training
from tests.conformance.local_backend import BAD_COMMAND, SCRIPT
from tests.conformance.table import RANKS, Row
from tests.e2e.kubernetes.conftest import REPOSITORY, Operator, Space
from tests.e2e.kubernetes.control_plane import ControlPlane, wait_for
from tests.e2e.kubernetes.nodes import Node

Json = dict[str, Any]
OVER = ("succeeded", "failed", "cancelled")
DEADLINE_S = 12.0  # pods take seconds to start; the row's own second would pass before

CANNOT = {
    "working dir missing": "the container runtime makes the folder",
    "rank frozen": "Kubernetes does not ask whether a process still moves",
    "supervisor killed": "the kubelet is the supervisor: that is the row 'host lost'",
    "supervisor frozen": "the kubelet is the supervisor: that is the row 'host lost'",
    "preempted and requeued": "the row 'preempted' is this one: a Job always replaces evicted pods",
    "step daemon killed": "containerd ends the container of a shim that was killed, and the "
    "kubelet tells that as any other end",
    "listing that fails halfway": "a list is one answer of the API server: whole, or an error",
    "attempt started twice": "an index has one pod at a time: the Job controller waits for the "
    "end of the one before, and the API server keeps names unique",
}


class ArmedOperator(Operator):
    """Without a lease, so that the next one starts at once."""

    def __init__(self, space: Space, folder: Path, options: Json) -> None:
        self.arm_file = folder / "arm"
        super().__init__(space, folder, "armed", [])
        self.kill()
        self._command = [
            *(sys.executable, "-m", "tests.e2e.kubernetes.armed_operator"),
            *(space.name, json.dumps(options), str(self.arm_file)),
        ]
        self.environment["PYTHONPATH"] = f"{REPOSITORY / 'src'}:{REPOSITORY}"
        self.start()

    def arm(self, step: str) -> None:
        self.arm_file.write_text(step)

    def revive(self) -> None:
        """It has killed itself; another one takes over."""
        self.process.wait(60)
        self.arm_file.unlink()
        self.start()


class KubernetesBackend:
    name = "kubernetes"

    def __init__(self, space: Space, folder: Path, spare: Callable[[], Node]) -> None:
        self._space = space
        self._spare = spare
        self._scratch = folder / "scratch"
        self._scratch.mkdir()
        self._scratch.chmod(0o777)
        volume = {"name": "scratch", "hostPath": {"path": str(self._scratch)}}
        self._operator = ArmedOperator(
            space,
            folder,
            {
                "volumes": [volume],
                "volume_mounts": [{"name": "scratch", "mountPath": "/scratch"}],
                "lost_node_s": 2,
            },
        )
        self._node: Node | None = None

    def close(self) -> None:
        self._operator.kill()

    def cannot(self, row: Row) -> str:
        return CANNOT.get(row.fault, "")

    def deploy(self, row: Row) -> str:
        name = f"row-{len(list(self._scratch.iterdir()))}"
        folder = self._scratch / name
        folder.mkdir()
        folder.chmod(0o777)
        if "ignore SIGTERM" in row.fault:
            (folder / "deaf").touch()
        if row.fault == "controller killed":
            self._operator.arm(row.detail)
        if row.fault == "host lost":
            self._node = self._spare()
            self._cordon("cordon")
        script = SCRIPT.format(folder=f"/scratch/{name}")
        spec: Json = {
            "command": BAD_COMMAND.get(row.fault, ["sh", "-c", script]),
            "worldSize": {"min": row.min, "target": RANKS, "max": RANKS},
            "stopGraceS": row.options.get("stop_grace_s", 20.0),
            "maxRestarts": row.options.get("max_restarts", 0),
        }
        if "deadline_s" in row.options:
            spec["deadlineS"] = DEADLINE_S
        if row.fault == "out of memory":
            spec["resources"] = {"memory": "48Mi"}
        if row.fault == "image error":
            spec["image"] = "No Image!"
        self._space.submit(name, **spec)
        return name

    def until_running(self, name: str) -> None:
        self._space.until_ready(name, RANKS)
        wait_for("all ranks have begun", lambda: len(self.attempts(name)) == RANKS)

    def strike(self, row: Row, name: str) -> None:
        match row.fault:
            case "exit":
                self._tell(name, f"{row.at}.0", str(row.detail))
                self._until_ended(name, row.at)
            case "signal":
                self._signal(name, row.at, row.detail)
            case "out of memory":
                self._tell(name, f"{row.at}.0", "oom")
            case "host lost":
                assert self._node is not None
                self._node.kill_kubelet()
                self._cordon("uncordon")
            case "preempted":
                self._evict(name, row.at)
            case "cancel" | "cancel of ranks that ignore SIGTERM":
                cancel = '{"spec":{"cancel":true}}'
                self._space.kubectl("patch", "training", name, "--type=merge", "-p", cancel)
            case "control daemon killed before it told":
                self._manager.kill_manager()
                self._tell(name, f"{row.at}.0", str(row.detail))
                self._until_ended(name, row.at)
                self._manager.start_manager()
            case "control daemon killed after it took a start":
                wait_for("there is a Job", lambda: self._jobs(name))
                self._manager.kill_manager()
                self._manager.start_manager()
            case "records lost":
                self._lose_records(name)
            case "exit while the controller is down":
                self._operator.kill()
                self._tell(name, f"{row.at}.0", str(row.detail))
                self._until_ended(name, row.at)
                self._operator.start()
            case "controller killed":
                self._operator.revive()
            case "exit, then controller killed":
                # Stopping is a wish like any other.
                self._operator.arm(row.detail.replace("stop", "apply"))
                self._tell(name, f"{row.at}.0", "3")
                self._operator.revive()
        if row.options.get("max_restarts"):  # the fault, then the rank back in its place
            wait_for("it is back", lambda: len(self.attempts(name)) == RANKS + 1)

    def end(self, name: str) -> None:
        self._tell(name, "all", "0")

    def until_over(self, name: str) -> Training:
        self._space.until(name, "over", lambda s: s.get("phase") in OVER, timeout=100)
        return to_training(self._space.get(name))

    def attempts(self, name: str) -> list[tuple[int, int]]:
        path = self._scratch / name / "ran"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(a), int(b)) for a, b in (line.split() for line in lines)]

    def left(self, name: str) -> list[str]:
        self._space.until(name, "released", lambda s: s.get("isReleased"))
        if self._node is not None:  # nobody can end what runs where nobody answers
            self._node.stop()
            self._space.site.kubectl("delete", "node", self._node.name, "--wait=false")
            self._node = None
        wait_for("no pod of it runs", lambda: not self._alive(name))
        return self._alive(name)

    def _alive(self, name: str) -> list[str]:
        return [
            p["metadata"]["name"]
            for p in self._pods(name)
            if p["status"]["phase"] in ("Running", "Pending")
        ]

    @property
    def _manager(self) -> ControlPlane:
        """Where the Job controller runs."""
        assert self._space.site.plane is not None
        return self._space.site.plane

    def _jobs(self, name: str) -> list[Json]:
        labelled = self._space.json("get", "jobs", "-l", f"atoll.dev/training={name}")
        items: list[Json] = labelled["items"]
        return items

    def _pods(self, name: str) -> list[Json]:
        found = self._space.json("get", "pods", "-l", f"atoll.dev/training={name}")
        items: list[Json] = found["items"]
        return items

    def _pod(self, name: str, rank: int | None) -> Json:
        index = "batch.kubernetes.io/job-completion-index"
        (found,) = [p for p in self._pods(name) if p["metadata"]["annotations"][index] == str(rank)]
        return found

    def _until_ended(self, name: str, rank: int | None) -> None:
        wait_for(
            "the pod has ended",
            lambda: self._pod_phase(name, rank) in ("Failed", "Succeeded", "gone"),
        )

    def _pod_phase(self, name: str, rank: int | None) -> str:
        index = "batch.kubernetes.io/job-completion-index"
        mine = [p for p in self._pods(name) if p["metadata"]["annotations"][index] == str(rank)]
        first = min(mine, key=lambda p: str(p["metadata"]["creationTimestamp"]), default=None)
        return "gone" if first is None else str(first["status"]["phase"])

    def _tell(self, name: str, file: str, word: str) -> None:
        draft = self._scratch / name / f"{file}.new"
        draft.write_text(word)
        draft.rename(self._scratch / name / file)

    def _signal(self, name: str, rank: int | None, signal: str) -> None:
        pod = self._pod(name, rank)
        container = pod["status"]["containerStatuses"][0]["containerID"].split("//")[1]
        nodes = {node.name: node for node in self._space.site.nodes}
        nodes[pod["spec"]["nodeName"]].kill_container(container, signal)

    def _evict(self, name: str, rank: int | None) -> None:
        pod = self._pod(name, rank)["metadata"]["name"]
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
        path = f"/api/v1/namespaces/{self._space.name}/pods/{pod}/eviction"
        self._space.kubectl("create", "--raw", path, "-f", "-", stdin=body)

    def _lose_records(self, name: str) -> None:
        """Job and pods are gone from the API server before any end was reported to it."""
        self._operator.kill()
        self._manager.kill_manager()
        labels = f"-latoll.dev/training={name}"
        self._space.kubectl("delete", "jobs", labels)
        patch = '{"metadata":{"finalizers":null}}'
        for pod in self._pods(name):
            target = ("pod", pod["metadata"]["name"])
            self._space.kubectl("patch", *target, "--type=merge", "-p", patch)
        self._space.kubectl("delete", "pods", labels, "--force", "--grace-period=0")
        self._manager.start_manager()
        self._operator.start()

    def _cordon(self, verb: str) -> None:
        for node in self._space.site.nodes:
            self._space.site.kubectl(verb, node.name)
