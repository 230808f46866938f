"""Whoever is killed: the etcd of a training lives with its supervisor, and comes back with it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.support.control_plane import ControlPlane, wait_for

from atoll.backends.local.processes import all_pids, is_running, start_ticks
from atoll.backends.local.rendezvous import read_rendezvous
from atoll.core.mesh import MeshState
from atoll.core.spec import RendezvousSpec
from atoll.core.status import Training

ETCD = RendezvousSpec(backend="etcd-v2")
SCRIPT = 'echo "$BASILICA_RDZV_ENDPOINT"; while [ ! -e "$0" ]; do sleep 0.05; done'


def started(plane: ControlPlane, go: Path, **options: object) -> Training:
    command = ["sh", "-c", SCRIPT, str(go)]
    name = plane.create(command, 2, rendezvous=ETCD, stop_grace_s=0.2, **options)
    plane.until_ready(name, 2)
    wait_for(lambda: len(plane.log_lines(name)) == 2)
    return plane.until(name, lambda t: t.status.mesh and t.status.mesh.state is MeshState.READY)


def relatives(plane: ControlPlane, training: Training) -> dict[str, int]:
    """The watchdog, the supervisor and the etcd of a training, by what they run."""
    wanted = str(plane.directory(training)).encode()
    lines = {pid: _line(pid) for pid in all_pids()}
    ours = {pid: line for pid, line in lines.items() if wanted in line}
    etcd = next(pid for pid, line in ours.items() if b"--enable-v2" in line)
    supervisor = _parent(etcd)
    return {"watchdog": _parent(supervisor), "supervisor": supervisor, "etcd": etcd}


def _line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_ranks_and_etcd_outlive_the_control_plane(plane: ControlPlane, tmp_path: Path) -> None:
    training = started(plane, tmp_path / "go")
    etcd = relatives(plane, training)["etcd"]
    at = start_ticks(etcd)
    plane.restart()
    assert is_running(etcd, at)
    again = plane.until_ready(training.name, 2)
    assert again.status.rendezvous_endpoint == training.status.rendezvous_endpoint
    conditions = {c.type: c.status for c in again.status.conditions}
    assert (conditions["MeshCapable"], conditions["DegradedMesh"]) == ("True", "False")
    (tmp_path / "go").touch()
    assert plane.until_released(training.name).status.phase == "succeeded"
    wait_for(lambda: not is_running(etcd, at))
    assert plane.left() == []


@pytest.mark.parametrize("victims", [["supervisor"], ["watchdog", "supervisor"]])
def test_etcd_dies_with_its_supervisor_and_is_back_for_the_next_attempt(
    plane: ControlPlane, tmp_path: Path, victims: list[str]
) -> None:
    training = started(plane, tmp_path / "go", max_restarts=3)
    family = relatives(plane, training)
    at = start_ticks(family["etcd"])
    for victim in victims:
        os.kill(family[victim], signal.SIGKILL)
    wait_for(lambda: not is_running(family["etcd"], at))
    plane.until(
        training.name,
        lambda t: all(r.is_alive and r.restarts for r in t.status.ranks),
    )
    wait_for(lambda: len(plane.log_lines(training.name)) >= 4)
    assert len({line.text for line in plane.log_lines(training.name)}) == 1  # the same endpoint
    assert read_rendezvous(plane.directory(training))["error"] == ""
    assert relatives(plane, training)["etcd"] != family["etcd"]
    (tmp_path / "go").touch()
    assert plane.until_released(training.name).status.phase == "succeeded"
    assert plane.left() == []
