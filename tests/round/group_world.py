"""Replicas of several gloo processes in one run, forked from one Python so that torch loads once.

    python -m tests.round.group_world FOLDER ROUNDS KILLS CODEC P,P,P...

P is the number of processes of each replica in its lives, as in 2/1/3: when a process fails, the
others of its replica end, and its next life begins, as under torchrun. KILLS of them are killed at
random moments. Every process prints `round chain digest-of-what-it-carries`, and writes what it
carries to FOLDER/RANK.PROCESS.npy at its end.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch.distributed as dist

from atoll.diloco.codecs import get_codec
from atoll.diloco.group import ReplicaGroup
from atoll.diloco.packing import TensorSpec, Vector
from atoll.diloco.round.cells import Cut, RunLayout, Share
from atoll.diloco.round.driver import RoundDriver
from atoll.diloco.round.effects import Offer, RoundConfig
from atoll.diloco.round.pace import Pace
from atoll.diloco.round.reduce import Fragment, ReplicaValues
from atoll.objectstore import ObjectStore

SIZE = 50_000


class Sum:
    """An outer rule that adds the means up."""

    def __init__(self, size: int) -> None:
        self.values = np.zeros(size, np.float32)

    is_wanted = True

    @property
    def rows(self) -> Mapping[str, Vector]:
        return {"values": self.values}

    def room(self, start: int, size: int) -> None:
        return None

    def step(self, round: int, start: int, mean: Vector) -> None:
        self.values[start : start + mean.size] += mean


def live(folder: Path, rank: int, world: int, life: tuple[int, int, int], plan: list[str]) -> None:
    """One process of one life of a replica."""
    process, processes, number = life
    rounds, codec = int(plan[0]), get_codec(plan[2])
    store = f"file://{folder}/gloo-{rank}-{number}"
    dist.init_process_group("gloo", init_method=store, rank=process, world_size=processes)
    group = ReplicaGroup(range(processes), timeout=60) if processes > 1 else None
    nonce = secrets.token_hex(8)
    if group is not None:
        nonce = group.broadcast_from_leader(nonce if process == 0 else None)
    cut = Cut.of(SIZE, world, (codec, codec))
    layout = RunLayout(((TensorSpec("float32", (SIZE,)),),), world, codec.name, codec.name, "sum")
    share = Share(cut, process, processes)
    fragment = Fragment(share, Sum(share.size))
    config = RoundConfig(
        *(rank, world, nonce, layout.digest, world, (cut.cells,)),
        processes=processes,
        quorum=2 if int(plan[1]) else world,
        timeout_s=60,
        launch="test",
    )
    with ThreadPoolExecutor(4) as pool:
        objects = ObjectStore.open(folder / "store")
        values = ReplicaValues(objects, "run/", rank, nonce, [fragment], codec, codec, pool)
        pace = Pace(60, grace_s=1.0, is_folder=True)
        driver = RoundDriver(values, layout, config, pace, group=group)
        driver.open()
        while driver.round < rounds:
            driver.prepare()
            if driver.round >= rounds:
                break
            whole = np.random.default_rng([rank, driver.round, number]).standard_normal(SIZE)
            fragment.add(0, whole.astype(np.float32)[share.start : share.stop])
            result = driver.run(Offer(1.0, 1))
            line = f"{result.rounds} {result.chain} {rank}.{process}/{processes}\n"
            os.write(1, line.encode())
        driver.finish()
        np.save(folder / f"{rank}.{process}.{driver.round}.npy", fragment.outer.rows["values"])


def start(
    folder: Path, rank: int, world: int, number: int, lives: str, plan: list[str]
) -> set[int]:
    counts = [int(each) for each in lives.split("/")]
    processes = counts[min(number, len(counts) - 1)]
    pids = set()
    for process in range(processes):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                live(folder, rank, world, (process, processes, number), plan)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.add(pid)
    return pids


def main() -> None:
    folder, plan = Path(sys.argv[1]), sys.argv[2:5]
    lives = sys.argv[5].split(",")
    kills, chance = int(plan[1]), random.Random(5)
    replicas = {
        rank: start(folder, rank, len(lives), 0, each, plan) for rank, each in enumerate(lives)
    }
    numbers = dict.fromkeys(replicas, 0)
    next_kill = time.monotonic() + 3
    while any(replicas.values()):
        time.sleep(0.05)
        if kills and time.monotonic() > next_kill:
            victims = [rank for rank, pids in replicas.items() if pids]
            pid = chance.choice(sorted(replicas[chance.choice(victims)]))
            os.kill(pid, signal.SIGKILL)
            kills, next_kill = kills - 1, time.monotonic() + chance.uniform(0.3, 2.5)
        for rank, pids in replicas.items():
            failed = False
            for pid in list(pids):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    pids.discard(pid)
                    failed = failed or status != 0
            if failed:  # as torchrun: the whole replica is started again
                began = time.monotonic()
                while pids and time.monotonic() < began + 20:
                    for pid in list(pids):
                        if os.waitpid(pid, os.WNOHANG)[0]:
                            pids.discard(pid)
                    time.sleep(0.02)
                if pids:
                    os.write(1, b"a process outlived its replica by 20 s\n")
                    for pid in list(pids):
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
                    pids.clear()
                numbers[rank] += 1
                replicas[rank] = start(folder, rank, len(lives), numbers[rank], lives[rank], plan)
                break
    os.write(1, f"restarts {sum(numbers.values())}\n".encode())


if __name__ == "__main__":
    main()
