"""A real Slurm on this machine: munged, slurmctld and three slurmd, in a directory of its own.

Debian's packages, as root. It ends what it started, by pid. Two scheduler settings: the tuned one
starts jobs at once, and its slurmctld forgets them when it is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGES = "slurm-wlm slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins"
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")
NODES = 3
MARK = "ATOLL_TEST_SLURM"
TUNED = (
    "SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,"
    "sched_min_interval=0,defer_batch"
)
CONF = """\
ClusterName=atolltest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={dir}/run/munge.socket
CryptoType=crypto/munge
StateSaveLocation={dir}/ctld
SlurmdSpoolDir={dir}/spool/%n
SlurmctldPidFile={dir}/run/slurmctld.pid
SlurmdPidFile={dir}/run/slurmd.%n.pid
SlurmctldLogFile={dir}/log/slurmctld.log
SlurmdLogFile={dir}/log/slurmd.%n.log
{tracking}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
SchedulerType=sched/backfill
{scheduler}
MpiDefault=none
ReturnToService=2
SlurmdTimeout=5
SlurmctldTimeout=5
InactiveLimit=0
KillWait=3
MinJobAge=60
MaxArraySize={max_array}
MessageTimeout=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes={names} Default=YES MaxTime=INFINITE State=UP PriorityTier=1 OverSubscribe=NO
PartitionName=high Nodes={names} MaxTime=INFINITE State=UP PriorityTier=10 OverSubscribe=NO PreemptMode=OFF
"""  # noqa: E501
PLAIN = """\
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none"""
CGROUPS = """\
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
JobAcctGatherType=jobacct_gather/none"""
CGROUP_CONF = """\
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
CgroupAutomount=no
ConstrainRAMSpace=yes
ConstrainSwapSpace=no
ConstrainCores=no
ConstrainDevices=no
AllowedRAMSpace=100
MinRAMSpace=10
"""


def why_not() -> str:
    """Why there can be no Slurm here; empty if there can."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found: apt-get install --no-install-recommends {PACKAGES}"
    return "" if os.geteuid() == 0 else "the daemons of Slurm need root"


def is_required() -> bool:
    """Whether tests that need Slurm fail without it, instead of being skipped."""
    return os.environ.get("ATOLL_CI") == "1"


needs_slurm = pytest.mark.skipif(
    bool(why_not()) and not is_required(), reason=f"no Slurm: {why_not()}"
)


def has_cgroups() -> bool:
    """Whether memory can be limited: the first version of control groups, with their memory."""
    return os.path.isdir("/sys/fs/cgroup/memory") and os.access("/sys/fs/cgroup/memory", os.W_OK)


class SlurmCluster:
    """The daemons. `conf` is what SLURM_CONF has to be for commands."""

    def __init__(
        self, directory: Path, *, is_tuned: bool = True, cpus: int = 4, max_array: int = 1001
    ) -> None:
        assert not why_not(), why_not()
        self.dir = directory
        self.conf = directory / "slurm.conf"
        self.has_cgroups = has_cgroups()
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("run", "log", "ctld", "spool"):
            (directory / name).mkdir(parents=True)
        directory.chmod(0o755)
        (directory / "munge.key").write_bytes(os.urandom(128))
        (directory / "munge.key").chmod(0o400)
        ports = free_ports(1 + NODES)
        # Control groups are named after nodes, and several clusters may run at once.
        self.nodes = tuple(f"n{port}" for port in ports[1:])
        host = socket.gethostname()
        nodes = "\n".join(
            f"NodeName={name} NodeAddr=127.0.0.1 NodeHostname={host} Port={port} CPUs={cpus} "
            "RealMemory=4000 State=UNKNOWN"
            for name, port in zip(self.nodes, ports[1:], strict=True)
        )
        tracking = CGROUPS if self.has_cgroups else PLAIN
        scheduler = TUNED if is_tuned else ""
        text = CONF.format(
            dir=directory, host=host, port=ports[0], nodes=nodes, tracking=tracking,
            names=",".join(self.nodes),
            scheduler=scheduler, max_array=max_array,
        )  # fmt: skip
        self.conf.write_text(text)
        (directory / "cgroup.conf").write_text(CGROUP_CONF)

    def start(self) -> None:
        run, log = self.dir / "run", self.dir / "log"
        self._start(
            "munged", "munged", "--foreground", "--force", f"--key-file={self.dir}/munge.key",
            f"--socket={run}/munge.socket", f"--pid-file={run}/munged.pid",
            f"--log-file={log}/munged.log", f"--seed-file={run}/munged.seed",
        )  # fmt: skip
        wait_until((run / "munge.socket").exists, "munged")
        self.start_controller("-c")
        for node in self.nodes:
            self.start_node(node)
        wait_until(self.is_idle, "three idle nodes", timeout=60)

    def start_controller(self, *flags: str) -> None:
        self._start("slurmctld", "slurmctld", "-D", *flags, "-f", str(self.conf))

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node, "-f", str(self.conf))

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Ends one daemon: `slurmctld` or the name of a node."""
        process = self.daemons.pop(name)
        process.send_signal(number)
        process.wait()

    def restart_controller(self) -> None:
        if "slurmctld" in self.daemons:
            self.kill("slurmctld")
        self.start_controller()
        wait_until(self.answers, "slurmctld")

    def answers(self) -> bool:
        return self.run("scontrol", "ping").returncode == 0

    def is_idle(self) -> bool:
        done = self.run("sinfo", "-h", "-o", "%T %D", "-p", "main")
        return done.stdout.split() == ["idle", str(NODES)]

    def resume_nodes(self) -> None:
        """What an administrator does with nodes that Slurm has drained."""
        for node in self.nodes:
            self.run("scontrol", "update", f"nodename={node}", "state=resume")

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, capture_output=True, text=True, env=self.env(), timeout=60, check=False
        )

    def env(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def jobs(self) -> list[dict[str, Any]]:
        done = self.run("squeue", "--json")
        answer: dict[str, Any] = json.loads(done.stdout)
        assert not answer["errors"], answer["errors"]
        jobs: list[dict[str, Any]] = answer["jobs"]
        return jobs

    def step_daemons(self) -> list[int]:
        """Every slurmstepd of this cluster."""
        return [pid for pid in own_pids(self.dir) if words_of(pid).startswith("slurmstepd")]

    def close(self) -> None:
        """Nothing of it is left. Also what its jobs left behind."""
        for node in [*self.nodes, "slurmctld", "munged"]:
            if node in self.daemons:
                self.kill(node)
        for _ in range(50):
            pids = own_pids(self.dir)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not pids:
                break
            time.sleep(0.05)
        for node in self.nodes:
            for group in Path("/sys/fs/cgroup").glob(f"*/slurm_{node}"):
                for folder, _, _ in os.walk(group, topdown=False):
                    with contextlib.suppress(OSError):
                        os.rmdir(folder)

    def _start(self, name: str, *words: str) -> None:
        with (self.dir / "log" / f"{name}.out").open("ab") as out:
            self.daemons[name] = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                env={**self.env(), MARK: str(self.dir)},
            )  # fmt: skip


@contextlib.contextmanager
def slurm_cluster(directory: Path, **options: Any) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(directory, **options)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


def free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def wait_until(holds: Callable[[], object], what: str, timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline, f"no {what} after {timeout:g} s"
        time.sleep(0.05)


def own_pids(directory: Path) -> list[int]:
    """Processes that the daemons of this directory have brought about."""
    marks = (f"{MARK}={directory}".encode(), f"SLURM_CONF={directory}/slurm.conf".encode())
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    own = []
    for pid in pids:
        with contextlib.suppress(OSError):
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if pid != os.getpid() and any(mark in entries for mark in marks):
                own.append(pid)
    return own


def words_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
        return data.replace(b"\0", b" ").decode(errors="replace")
    return ""
