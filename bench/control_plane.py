"""What the control plane costs and how fast it notices, beside torchrun in the same run.

    python bench/control_plane.py [--rounds 7] [--finished 1000] [--only launch,…]

Prints a table and writes bench/results/control_plane.json. Absolute times depend on the machine
and its load, which is noted; read the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
os.environ["PYTHONPATH"] = str(ROOT / "src")

from tests.support.control_plane import (  # noqa: E402
    ControlPlane,
    cpu_seconds,
    journal_records,
    serving,
    wait_for,
)

from atoll.backends.local import processes  # noqa: E402
from atoll.core.status import Training  # noqa: E402

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
SLEEP = ["sleep", "1000"]
DEAF = ["sh", "-c", "trap '' TERM; echo up; while :; do sleep 0.1; done"]
GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""
WITHIN_S = 5.0

Result = dict[str, Any]


class Bench:
    def __init__(self, rounds: int, finished: int, scratch: Path) -> None:
        self.rounds = rounds
        self.finished = finished
        self.scratch = scratch
        self.gloo = scratch / "gloo.py"
        self.gloo.write_text(GLOO)

    def plane(self, name: str, **options: Any) -> Any:
        return serving(self.scratch / name, **options)

    def launch(self) -> Result:
        """create -> 4 no-op ranks -> succeeded, against torchrun of the same no-op."""
        ours, theirs = [], []
        with self.plane("launch") as plane:
            run(plane, ["true"])
            for _ in range(self.rounds):
                ours.append(timed(run, plane, ["true"]))
                theirs.append(timed(quietly, [*TORCHRUN, "--no-python", "true"]))
        return against(ours, theirs, "torchrun")

    def overhead(self) -> Result:
        """What the launcher adds to 4 processes that meet over gloo."""
        bare, ours, theirs = [], [], []
        command = [sys.executable, str(self.gloo)]
        with self.plane("overhead") as plane:
            for _ in range(self.rounds):
                bare.append(timed(bare_gloo, command))
                ours.append(timed(run, plane, command, env={"OMP_NUM_THREADS": "1"}))
                theirs.append(timed(quietly, [*TORCHRUN, str(self.gloo)]))
        # Pairs of one round: the load of the machine moves less within it than over all of them.
        mine = statistics.median(a - b for a, b in zip(ours, bare, strict=True))
        other = statistics.median(a - b for a, b in zip(theirs, bare, strict=True))
        return {
            "bare_s": statistics.median(bare),
            "atoll_s": statistics.median(ours),
            "torchrun_s": statistics.median(theirs),
            "atoll_added_s": mine,
            "torchrun_added_s": other,
            "atoll_added_over_torchrun_added": mine / other,
        }

    def orphans(self) -> Result:
        """SIGKILL of supervisor and control plane at once: ranks left 5 s later, 20 times."""
        clean = {"supervisor": 0, "watchdog and supervisor": 0}
        worst_s = 0.0
        for who in clean:
            with self.plane(f"orphans-{len(who)}") as plane:
                for _ in range(20):
                    training = started(plane, SLEEP)
                    watchdog, supervisor = plane.supervision_pids(training)
                    pids = [plane.pid, supervisor, *([watchdog] if "watchdog" in who else [])]
                    took = timed(kill_together, pids, gone, plane)
                    plane.reap()
                    clean[who] += not plane.left_pids()
                    worst_s = max(worst_s, took)
                    plane.start()
                    plane.until_over(training.name)
        left = []
        for _ in range(3):
            agent, ranks = torchrun_started(SLEEP)
            agent.kill()
            agent.wait()
            time.sleep(WITHIN_S)
            left.append(sum(alive(pid) for pid in ranks))
            for pid in ranks:
                processes.kill(pid)
        return {
            "atoll_clean_of_20": clean,
            "atoll_slowest_s": worst_s,
            "torchrun_left_of_4": left,
        }

    def verdict(self) -> Result:
        """SIGKILL of one rank until the end is known: stored by atoll, exited by torchrun."""
        ours, theirs = [], []
        with self.plane("verdict") as plane:
            for _ in range(self.rounds):
                training = started(plane, SLEEP)
                pid = rank_pids(plane, training)[1]
                ours.append(timed(kill_together, [pid], plane.until_over, training.name))
                agent, ranks = torchrun_started(SLEEP)
                theirs.append(timed(kill_together, [ranks[1]], agent.wait))
        return against(ours, theirs, "torchrun")

    def deaf_peers(self) -> Result:
        """The same with peers that ignore SIGTERM; atoll with a grace of 1 s, torchrun's is 30."""
        ours = []
        with self.plane("deaf") as plane:
            for _ in range(self.rounds):
                training = started(plane, DEAF, stop_grace_s=1.0)
                wait_for(lambda name=training.name: len(plane.log_lines(name)) == 4)
                pid = rank_pids(plane, training)[1]
                ours.append(timed(kill_together, [pid], plane.until_over, training.name))
        agents = [torchrun_started(DEAF) for _ in range(self.rounds)]
        begun = time.perf_counter()
        for _, ranks in agents:
            os.kill(ranks[1], 9)
        theirs = []
        for agent, _ in agents:
            agent.wait()
            theirs.append(time.perf_counter() - begun)
        result = against(ours, theirs, "torchrun")
        return {**result, "atoll_over_its_grace_s": result["atoll_s"] - 1.0}

    def reconcile(self) -> Result:
        """One change among many: asked until observed, 1,000 idle trainings against 10."""
        few, many = [], []
        with self.plane("few", slots=0) as small, self.plane("many", slots=0) as large:
            of_few, of_many = filled(small, 10), filled(large, 1000)
            for turn in range(max(self.rounds, 100)):
                target = 3 - turn // 10 % 2
                few.append(timed(changed, small, of_few[turn % 10], target))
                many.append(timed(changed, large, of_many[turn % 10], target))
        return {
            "among_10_s": statistics.median(few),
            "among_1000_s": statistics.median(many),
            "ratio": statistics.median(many) / statistics.median(few),
        }

    def finished_memory(self) -> Result:
        """Memory of the control plane before and after many real trainings, all kept."""
        with self.plane("finished") as plane:
            for _ in range(10):
                run(plane, ["true"], ranks=1)
            before = resident_mb(plane.pid)
            names: list[str] = []
            for number in range(self.finished):
                names.append(plane.create(["true"], 1))
                if number >= 8:
                    plane.until_over(names[number - 8])
            for name in names[-8:]:
                plane.until_over(name)
            after = resident_mb(plane.pid)
            plane.restart()
            time.sleep(1.0)
            reopened = resident_mb(plane.pid)
        return {
            "trainings": self.finished,
            "before_mb": before,
            "after_mb": after,
            "after_restart_mb": reopened,
            "kb_each": (after - before) * 1024 / self.finished,
        }

    def idle_cpu(self) -> Result:
        """CPU of the control plane while 1,000 trainings wait and nothing happens."""
        used = {}
        for size in (0, 1000):
            with self.plane(f"idle-{size}", slots=0) as plane:
                filled(plane, size)
                time.sleep(1.0)
                before = cpu_seconds(plane.pid)
                time.sleep(10.0)
                used[size] = cpu_seconds(plane.pid) - before
        return {"cpu_s_in_10_s_with_0": used[0], "cpu_s_in_10_s_with_1000": used[1000]}


MEASURES = (
    "launch", "overhead", "orphans", "verdict", "deaf_peers", "reconcile", "finished_memory",
    "idle_cpu",
)  # fmt: skip


def against(ours: list[float], theirs: list[float], peer: str) -> Result:
    mine, other = statistics.median(ours), statistics.median(theirs)
    return {"atoll_s": mine, f"{peer}_s": other, f"{peer}_over_atoll": other / mine}


def timed(act: Callable[..., object], *about: Any, **options: Any) -> float:
    begun = time.perf_counter()
    act(*about, **options)
    return time.perf_counter() - begun


def run(plane: ControlPlane, command: list[str], ranks: int = 4, **options: Any) -> None:
    name = plane.create(command, ranks, **options)
    phase = plane.until_over(name, timeout=600).status.phase
    if phase != "succeeded":
        raise RuntimeError(f"{command} {phase}")


def started(plane: ControlPlane, command: list[str], **options: Any) -> Training:
    return plane.until_ready(plane.create(command, 4, **options), 4)


def idle(plane: ControlPlane) -> str:
    """One that waits for room that never comes."""
    return plane.create(["true"], 2, min=1, start_grace_s=86_400)


def filled(plane: ControlPlane, size: int) -> list[str]:
    names = [idle(plane) for _ in range(size)]
    for name in names:
        plane.until(name, lambda t: t.status.phase == "pending")
    return names


def changed(plane: ControlPlane, name: str, target: int) -> None:
    generation = plane.ask(name, target=target).generation
    plane.until(name, lambda t: t.status.observed_generation >= generation)


def rank_pids(plane: ControlPlane, training: Training) -> list[int]:
    records = journal_records(plane.directory(training) / "journal")
    return [r["pid"] for r in records if r["t"] == "start"]


def kill_together(pids: list[int], then: Callable[..., object], *about: Any) -> None:
    """Stopped first, so that none can react to the end of another."""
    for pid in pids if len(pids) > 1 else ():
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    then(*about)


def gone(plane: ControlPlane) -> None:
    deadline = time.monotonic() + WITHIN_S
    while plane.left_pids() and time.monotonic() < deadline:
        time.sleep(0.005)


def quietly(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def bare_gloo(command: list[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "4"}
    shared["OMP_NUM_THREADS"] = "1"
    ranks = [subprocess.Popen(command, env={**shared, "RANK": str(rank)}) for rank in range(4)]
    if sum(rank.wait() for rank in ranks):
        raise RuntimeError("a bare rank failed")


def torchrun_started(command: list[str]) -> tuple[subprocess.Popen[bytes], list[int]]:
    agent = subprocess.Popen(
        [*TORCHRUN, "--no-python", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    found: list[int] = []

    def is_up() -> bool:
        found[:] = [pid for pid in processes.children(agent.pid) if is_running(pid, command[0])]
        return len(found) == 4

    wait_for(is_up, timeout=300)
    time.sleep(0.5)  # a trap of the shell's is set by now
    return agent, found


def is_running(pid: int, program: str) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == program
    except OSError:
        return False


def alive(pid: int) -> bool:
    return processes.is_running(pid, processes.start_ticks(pid))


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def flat(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    if isinstance(value, dict):
        return ", ".join(f"{name}: {flat(inner)}" for name, inner in value.items())
    return str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--finished", type=int, default=1000)
    parser.add_argument("--only", default=",".join(MEASURES))
    asked = parser.parse_args()
    path = ROOT / "bench" / "results" / "control_plane.json"
    scratch = Path(tempfile.mkdtemp(prefix="atoll-bench-"))
    results: Result = json.loads(path.read_text()) if path.exists() else {}
    results["machine"] = {"cores": os.cpu_count(), "kernel": platform.release()}
    try:
        bench = Bench(asked.rounds, asked.finished, scratch)
        for name in asked.only.split(","):
            loads = [os.getloadavg()[0]]
            found = getattr(bench, name)()
            loads.append(os.getloadavg()[0])
            results[name] = {**found, "rounds": asked.rounds, "load_average": loads}
            print(f"{name}: {(getattr(bench, name).__doc__ or '').strip()}")
            for key, value in results[name].items():
                print(f"    {key:32} {flat(value)}", flush=True)
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(results, indent=1) + "\n")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


if __name__ == "__main__":
    main()
