"""The table's faults under a real Slurm, whose daemons and nodes are processes of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

from tests.conformance.local_backend import LocalBackend
from tests.conformance.table import RANKS, Row
from tests.support.control_plane import ControlPlane, PlaneDied, wait_for
from tests.support.slurm_cluster import SlurmCluster, wait_until

from atoll.backends.local import processes
from atoll.core.spec import Resources

# Prints half of what the real one says, and ends well, while the file is there.
SQUEUE = """#!/bin/sh
echo >> {folder}/asked
[ -e {folder}/broken ] || exec {squeue} "$@"
{squeue} "$@" | head -c 400
"""


class SlurmBackend(LocalBackend):
    """Ranks as array tasks. Whatever the local table does to processes is done to those."""

    name = "slurm"

    def __init__(self, plane: ControlPlane, scratch: Path, cluster: SlurmCluster) -> None:
        super().__init__(plane, scratch)
        self._cluster = cluster
        self._folder = cluster.dir / "trainings"
        self._faults.update(
            {
                "preempted": self._preempt,
                "preempted and requeued": self._preempt,
                "control daemon killed before it told": self._kill_daemon_and_exit,
                "control daemon killed after it took a start": self._kill_daemon_early,
                "step daemon killed": self._kill_step_daemon,
                "listing that fails halfway": self._break_listing,
                "attempt started twice": self._start_again,
                "records lost": self._lose_records,
            }
        )

    def cannot(self, row: Row) -> str:
        if row.fault == "image error":
            return "neither pyxis nor apptainer is installed here: no image is pulled"
        if row.fault == "out of memory" and not self._cluster.has_cgroups:
            return "this machine has no writable memory control group"
        return ""

    def options_for(self, row: Row) -> dict[str, Any]:
        if row.fault == "out of memory":
            return {"resources": Resources(memory="64Mi")}
        if row.fault.startswith("preempted"):
            return {"resources": Resources(cpu="4")}  # a node each
        return {}

    def left(self, name: str) -> list[str]:
        for node in self._cluster.nodes:
            if node not in self._cluster.daemons:
                self._cluster.start_node(node)
        try:
            training = self._plane.until_released(name)
        except PlaneDied:  # armed for a step that comes only now
            self._revive()
            training = self._plane.until_released(name)
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not self._left(training.uid), timeout=10)
        left = self._left(training.uid)
        # The next row needs all nodes; one that saw two jobs of the same id is drained.
        self._cluster.resume_nodes()
        wait_until(self._cluster.is_idle, "idle nodes", timeout=90)
        return left

    def _left(self, uid: str) -> list[str]:
        ranks = [
            f"process {pid}"
            for pid in processes.all_pids()
            if processes.environment_of(pid).get(b"ATOLL_UID") == uid.encode()
        ]
        jobs = [job for job in self._cluster.jobs() if uid in job["name"]]
        active = ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED")
        return ranks + [f"job {job['job_id']}" for job in jobs if job["job_state"] in active]

    def _records(self, name: str) -> Path:
        return self._folder / self._plane.get(name).uid / "records"

    def _record(self, name: str, rank: int | None, kind: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(
            (self._records(name) / f"{rank}.0.{kind}").read_text()
        )
        return document

    def _pid(self, name: str, rank: int | None) -> int:
        return int(self._record(name, rank, "start")["pid"])

    def _wrappers(self, name: str) -> list[int]:
        return [int(self._record(name, rank, "claim")["pid"]) for rank in range(RANKS)]

    def _run_out_of_memory(self, row: Row, name: str) -> None:
        self._tell(name, f"{row.at}.0", "oom")

    def _lose_host(self, row: Row, name: str) -> None:
        """Everything on all nodes ends at once, with nobody left to write it down."""
        wrappers, ranks = self._wrappers(name), [self._pid(name, r) for r in range(RANKS)]
        for pid in wrappers:
            os.kill(pid, signal.SIGSTOP)
        daemons = self._cluster.step_daemons()
        for node in self._cluster.nodes:
            self._cluster.kill(node)
        for pid in [*daemons, *wrappers, *ranks]:
            processes.kill(pid)

    def _hit_supervisor(self, name: str, number: int) -> None:
        for pid in self._wrappers(name):
            os.kill(pid, number)

    def _preempt(self, row: Row, name: str) -> None:
        (job,) = [job for job in self._jobs(name) if job["array_task_id"] == row.at]
        if row.fault == "preempted and requeued":  # as a site may have it for every job
            self._slurm("scontrol", "update", f"jobid={job['job_id']}", "requeue=1")
        words = ("--partition=high", "--cpus-per-task=4", f"--nodelist={job['nodes']}")
        other = self._slurm(
            "sbatch", "--parsable", *words, "--output=/dev/null", "--wrap", "sleep 300"
        ).strip()
        wait_for(lambda: self._has_exit(name, row.at))
        self._slurm("scancel", other)

    def _jobs(self, name: str) -> list[dict[str, Any]]:
        uid = self._plane.get(name).uid
        return [job for job in self._cluster.jobs() if uid in job["name"]]

    def _slurm(self, *words: str) -> str:
        done = self._cluster.run(*words)
        assert done.returncode == 0, done
        return done.stdout

    def _has_exit(self, name: str, rank: int | None) -> bool:
        try:
            folder = self._records(name)
        except KeyError:
            return True
        return (folder / f"{rank}.0.exit").exists() or not folder.exists()

    def _exit(self, row: Row, name: str) -> None:
        self._tell(name, f"{row.at}.0", str(row.detail))
        wait_for(lambda: self._has_exit(name, row.at))

    def _exit_unseen(self, row: Row, name: str) -> None:
        records = self._records(name)
        self._plane.kill()
        self._tell(name, f"{row.at}.0", str(row.detail))
        wait_for((records / f"{row.at}.0.exit").exists)
        self._plane.start()

    def _kill_daemon_and_exit(self, row: Row, name: str) -> None:
        self._cluster.kill("slurmctld")
        self._exit(row, name)
        self._cluster.restart_controller()

    def _kill_daemon_early(self, row: Row, name: str) -> None:
        uid = self._plane.get(name).uid
        wait_for(lambda: uid in self._cluster.run("squeue", "-h", "-o", "%j").stdout)
        self._cluster.restart_controller()

    def _kill_step_daemon(self, row: Row, name: str) -> None:
        wrapper = int(self._record(name, row.at, "claim")["pid"])
        os.kill(_parent(wrapper), signal.SIGKILL)

    def _break_listing(self, row: Row, name: str) -> None:
        bin = self._cluster.dir / "bin"
        (bin / "broken").touch()
        asked = (bin / "asked").stat().st_size
        wait_for(lambda: (bin / "asked").stat().st_size >= asked + 3)
        (bin / "broken").unlink()
        training = self._plane.get(name)
        assert [rank.phase for rank in training.status.ranks] == ["Running"] * RANKS

    def _lose_records(self, row: Row, name: str) -> None:
        folder = self._folder / self._plane.get(name).uid
        while folder.exists():  # beats may come in between
            shutil.rmtree(folder, ignore_errors=True)

    def _start_again(self, row: Row, name: str) -> None:
        (job, *_) = self._jobs(name)
        array, script = job["array_job_id"], self._cluster.dir / "again.sh"
        self._slurm("scontrol", "write", "batch_script", str(array), str(script))
        again = self._slurm("sbatch", "--parsable", str(script)).strip()
        wait_for(lambda: self._are_over(int(again)))

    def _are_over(self, array: int) -> bool:
        states = [job["job_state"] for job in self._cluster.jobs() if job["array_job_id"] == array]
        return bool(states) and not {"PENDING", "RUNNING", "COMPLETING"} & set(states)


def put_squeue(cluster: SlurmCluster) -> str:
    """A folder for the front of PATH, in which squeue can be broken."""
    squeue = subprocess.run(["which", "squeue"], capture_output=True, text=True, check=True)
    bin = cluster.dir / "bin"
    bin.mkdir()
    (bin / "asked").touch()
    (bin / "squeue").write_text(SQUEUE.format(folder=bin, squeue=squeue.stdout.strip()))
    (bin / "squeue").chmod(0o755)
    return str(bin)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
