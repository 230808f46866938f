"""Kills at random instants of everything that can be killed, under both scheduler settings.

What must hold: no rank runs twice at once, no exit is lost that a wrapper could write, and nothing
is left. `ATOLL_STORM_KILLS` and `ATOLL_STORM_SEED` choose another storm.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from atoll.backends.local import processes
from atoll.core.spec import TrainingSpec
from atoll.core.status import Training
from tests.support.control_plane import ControlPlane, make_spec, serving
from tests.support.slurm_cluster import SlurmCluster, needs_slurm, own_pids, slurm_cluster

pytestmark = [needs_slurm, pytest.mark.slurm, pytest.mark.soak, pytest.mark.timeout(3000)]

KILLS = int(os.environ.get("ATOLL_STORM_KILLS", "50"))  # for each of the two settings
SEED = int(os.environ.get("ATOLL_STORM_SEED", "7"))
RANKS = 3
Json = dict[str, Any]
# A rank that holds a lock while it runs, so that two of one number at once are noticed, and writes
# how it will end before it does: what its wrapper should tell.
RANK = """
import fcntl, os, random, sys, time
folder, rank, attempt = sys.argv[1], os.environ["RANK"], os.environ["ATOLL_ATTEMPT"]
lock = open(f"{folder}/{rank}.lock", "w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    open(f"{folder}/twice", "a").write(f"{rank} {attempt}\\n")
with open(f"{folder}/ran", "a") as ran:
    ran.write(f"{rank} {attempt}\\n")
end = time.time() + random.uniform(1.0, 6.0)
while time.time() < end and not os.path.exists(f"{folder}/all"):
    time.sleep(0.02)
code = 0 if os.path.exists(f"{folder}/all") else random.choice([3, 4, 5])
with open(f"{folder}/exits", "a") as exits:
    exits.write(f"{rank} {attempt} {code}\\n")
os._exit(code)
"""


class Storm:
    """One gang whose ranks fail and are restarted again and again, and what is done to it."""

    def __init__(self, cluster: SlurmCluster, plane: ControlPlane, scratch: Path) -> None:
        self.cluster = cluster
        self.plane = plane
        self.scratch = scratch
        self.random = random.Random(SEED)
        self.kills: dict[str, int] = {}
        self.without_wrapper: set[tuple[str, str]] = set()  # attempts whose wrapper was killed
        self.claims: dict[tuple[str, str], Json] = {}
        self.told: dict[tuple[str, str], Json] = {}  # how each attempt ended, by its record
        script = scratch / "rank.py"
        script.write_text(RANK)
        self.spec: TrainingSpec = make_spec(
            [sys.executable, str(script), str(scratch)],
            RANKS, min=1, max_restarts=100_000, stop_grace_s=3.0, start_grace_s=5.0,
        )  # fmt: skip
        self.faults: list[tuple[str, Callable[[], bool]]] = [
            ("slurmctld", self._kill_slurmctld),
            ("slurmd", self._kill_slurmd),
            ("slurmstepd", self._kill_stepd),
            ("wrapper", lambda: self._kill_recorded("claim")),
            ("rank", lambda: self._kill_recorded("start")),
            ("controller", self._kill_controller),
        ]

    @property
    def records(self) -> Path:
        return self.cluster.dir / "trainings" / self.plane.get(self.spec.name).uid / "records"

    def blow(self, kills: int) -> None:
        done = 0
        while done < kills:
            time.sleep(self.random.uniform(0.05, 2.0))  # the instant is what is random
            name, fault = self.random.choice(self.faults)
            if fault():
                self.kills[name] = self.kills.get(name, 0) + 1
                done += 1
            self.cluster.resume_nodes()

    def _kill_slurmctld(self) -> bool:
        self.cluster.kill("slurmctld")
        time.sleep(self.random.uniform(0.0, 2.0))
        self.cluster.restart_controller()
        return True

    def _kill_slurmd(self) -> bool:
        node = self.random.choice(self.cluster.nodes)
        self.cluster.kill(node)
        time.sleep(self.random.uniform(0.0, 2.0))
        self.cluster.start_node(node)
        return True

    def _kill_stepd(self) -> bool:
        return self._hit(self.random.choice(self.cluster.step_daemons() or [0]))

    def _kill_recorded(self, kind: str) -> bool:
        alive = []
        for path in self.records.glob(f"*.{kind}"):
            with contextlib.suppress(OSError, ValueError):
                rank, attempt, _ = path.name.split(".")
                is_over = (path.parent / f"{rank}.{attempt}.exit").exists()
                pid = json.loads(path.read_text()).get("pid")
                if pid and not is_over and self._is_ours(pid):
                    alive.append((pid, (rank, attempt)))
        pid, key = self.random.choice(alive or [(0, ("", ""))])
        if kind == "claim":
            self.without_wrapper.add(key)
        return self._hit(pid)

    def _is_ours(self, pid: int) -> bool:
        return pid in own_pids(self.cluster.dir)

    def _hit(self, pid: int) -> bool:
        with contextlib.suppress(ProcessLookupError):
            if pid:
                os.kill(pid, signal.SIGKILL)
                return True
        return False

    def _kill_controller(self) -> bool:
        self.plane.kill()
        time.sleep(self.random.uniform(0.0, 2.0))
        self.plane.start()
        return True

    def read_told(self) -> None:
        """What the records say of every attempt that has ended, until they are cleared away."""
        for kind, known in (("claim", self.claims), ("exit", self.told)):
            for path in self.records.glob(f"*.{kind}"):
                with contextlib.suppress(FileNotFoundError):
                    rank, attempt, _ = path.name.split(".")
                    known[rank, attempt] = json.loads(path.read_text())

    def ended_by_slurm(self, key: tuple[str, str]) -> bool:
        """Whether a host's daemon says that it has killed the job of the attempt."""
        job = self.claims.get(key, {}).get("job")
        logs = [path.read_text(errors="replace") for path in self.cluster.dir.glob("log/slurmd.*")]
        marks = (f"JOB {job} ON", f"StepId={job}.batch", f"JobId={job} ")
        return bool(job) and any(mark in log for mark in marks for log in logs)

    def lines(self, name: str) -> list[list[str]]:
        path = self.scratch / name
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def left(self, uid: str) -> list[str]:
        ranks = [
            f"process {pid}"
            for pid in processes.all_pids()
            if processes.environment_of(pid).get(b"ATOLL_UID") == uid.encode()
        ]
        active = ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED")
        jobs = [j for j in self.cluster.jobs() if uid in j["name"] and j["job_state"] in active]
        return ranks + [f"job {job['job_id']}" for job in jobs]


@pytest.mark.parametrize("is_tuned", [True, False], ids=["tuned", "default"])
def test_a_storm_of_kills(is_tuned: bool, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with slurm_cluster(tmp_path / "cluster", is_tuned=is_tuned) as cluster:
        options = {"folder": f"{cluster.dir}/trainings", "heartbeat_timeout_s": 10.0}
        env = {
            "SLURM_CONF": str(cluster.conf),
            "ATOLL_TEST_EXECUTOR": json.dumps(["slurm", options]),
        }
        with serving(tmp_path / "state", env=env) as plane:
            storm = Storm(cluster, plane, scratch)
            plane.call("create", spec=msgspec.to_builtins(storm.spec), key=storm.spec.name)
            plane.until_ready(storm.spec.name, RANKS)
            storm.blow(KILLS)
            training = settle(storm, plane)
            report(storm, is_tuned, check_exits(storm, training))
            assert training.status.phase == "succeeded", training.status
            assert storm.lines("twice") == []
            ran = [tuple(line) for line in storm.lines("ran")]
            assert len(ran) == len(set(ran)), "an attempt was run twice"
            wait_until_empty(storm, training.uid)


def settle(storm: Storm, plane: ControlPlane) -> Training:
    """Every rank ends well."""
    (storm.scratch / "all").touch()
    deadline = time.monotonic() + 240
    while not (training := plane.get(storm.spec.name)).status.phase.is_terminal:
        assert time.monotonic() < deadline, training.status
        storm.cluster.resume_nodes()
        storm.read_told()
        time.sleep(0.2)
    storm.read_told()
    return training


def check_exits(storm: Storm, training: Training) -> list[tuple[str, str]]:
    """Every exit that a rank made by itself was told. Those that nobody was left to write."""
    unwritten = []
    last = {str(e.rank): e for e in training.status.rank_exits}
    for rank, attempt, code in storm.lines("exits"):
        record = storm.told.get((rank, attempt))
        if record is None:  # cleared away before it was read: then it is the last, in the status
            ended = last[rank]
            assert (ended.restart_count, ended.exit_code) == (int(attempt), int(code)), ended
        elif record["code"] is None:
            by_whom = (rank, attempt) in storm.without_wrapper
            assert by_whom or storm.ended_by_slurm((rank, attempt)), (rank, attempt, record)
            unwritten.append((rank, attempt))
        else:  # a signal may have come between the rank's note and its end
            assert record["code"] == int(code) or record["signal"] == "SIGKILL", (rank, record)
    return unwritten


def report(storm: Storm, is_tuned: bool, unwritten: list[tuple[str, str]]) -> None:
    sys.stderr.write(
        f"\nstorm: {'tuned' if is_tuned else 'default'}, {sum(storm.kills.values())} kills "
        f"{storm.kills}; {len(storm.lines('ran'))} attempts, {len(storm.lines('exits'))} exits by "
        f"themselves, {len(unwritten)} of them without a wrapper left to write: {unwritten}; "
        f"{len(storm.lines('twice'))} twice at once\n"
    )


def wait_until_empty(storm: Storm, uid: str) -> None:
    storm.plane.until_released(storm.spec.name)
    deadline = time.monotonic() + 30
    while (left := storm.left(uid)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
