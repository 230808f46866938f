"""What a round costs against the number of replicas, tensors and rounds, and after kills.

    python bench/rounds.py [requests] [tensors] [model] [recovery] [simulated]

requests:  replicas as threads over one store in memory; requests and bytes a rank and round.
tensors:   4 KB in 1 tensor and in 2,900.
model:     a round of DiLoCo with 16 KB in 1, 290 and 2,900 parameters, without the inner step.
recovery:  replicas as processes that are killed again and again; the longest gap between rounds.
simulated: 256 replicas, one after the other in the exchange but for their waits.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from obstore.store import MemoryStore

from atoll.diloco.allreduce import ObjectStoreAllReduce
from atoll.objectstore import ObjectStore

RESULTS = Path(__file__).parent / "results" / "rounds.json"


def world(size: int, rounds: int, values: int) -> dict[str, float]:
    """Replicas as threads; the first two rounds are not counted."""
    store: Any = MemoryStore()
    reports: list[Any] = []
    start = threading.Barrier(size)

    def take_part(rank: int) -> None:
        data = [np.full(values, rank, np.float32)]
        with ObjectStoreAllReduce(
            ObjectStore(store, "memory"), rank, size, grace_s=3600, timeout_s=7200
        ) as replica:
            for number in range(rounds):
                start.wait()
                replica.allreduce(data)
                assert replica.last_round is not None
                assert len(replica.last_round.members) == size
                if number >= min(2, rounds - 1):
                    reports.append(replica.last_round)

    run_all([lambda rank=rank: take_part(rank) for rank in range(size)])  # type: ignore[misc]
    up, down = (1, 1) if size == 2 else (1 + 1 / size, 2 * (size - 1) / size)
    bound = 4 * values * (up + down)
    moved = statistics.mean(r.bytes_up + r.bytes_down for r in reports)
    return {
        "MB": 4e-6 * values,
        "requests": statistics.mean(r.requests for r in reports),
        "most requests of a rank": max(r.requests for r in reports),
        "bytes a rank": moved,
        "over the bound": moved / bound - 1,
    }


def run_all(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def requests() -> dict[str, Any]:
    few = {f"{size} replicas": world(size, 8, 1 << 18) for size in (2, 4, 8, 16)}
    return few | {"64 replicas": world(64, 4, 1 << 16)}


def simulated() -> dict[str, Any]:
    return {"256 replicas": world(256, 1, 1 << 16)}


def tensors() -> dict[str, Any]:
    shapes = {"1 tensor": [1024], "2,900 tensors": [1] * 2900}
    took: dict[str, list[float]] = {name: [] for name in shapes}
    replicas = {name: ObjectStoreAllReduce(f"memory:///{name}", 0, 1) for name in shapes}
    for _ in range(20):
        for name, sizes in shapes.items():
            data = [np.ones(size, np.float32) for size in sizes]
            began = time.process_time()
            replicas[name].allreduce(data)
            took[name].append(time.process_time() - began)
    for replica in replicas.values():
        replica.close()
    return {f"{name}, processor ms": 1e3 * statistics.median(each) for name, each in took.items()}


def model() -> dict[str, Any]:
    """Rounds of DiLoCo, and steps of the inner optimiser alone, in turns."""
    import torch

    from atoll.diloco import DiLoCo

    torch.set_num_threads(1)
    results = {}
    for count in (1, 290, 2900):
        size = max(1, 4096 // count)
        model = torch.nn.ParameterList(
            [torch.nn.Parameter(torch.randn(size)) for _ in range(count)]
        )
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        inner, alone = (torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True) for _ in "ab")
        took: dict[str, list[float]] = {"round": [], "inner step": []}
        with DiLoCo(
            model, inner, sync_every=1, uri=f"memory:///model-{count}", rank=0, world_size=1
        ):
            for turn in range(30):
                for name, optimizer in (("round", inner), ("inner step", alone)):
                    began = time.process_time()
                    optimizer.step()
                    if turn >= 5:  # replicas compare themselves in the first rounds
                        took[name].append(time.process_time() - began)
        step_ms, round_ms = (1e3 * statistics.median(took[n]) for n in ("inner step", "round"))
        results[f"{count:,} parameters"] = {
            "inner step ms": step_ms,
            "round ms": round_ms - step_ms,
        }
    return results


def trainee(uri: str, rank: int, size: int, stop: Any, out: Any) -> None:
    """Joins, as DiLoCo does, and then one round after the other."""
    with ObjectStoreAllReduce(uri, rank, size, min_replicas=1) as replica:
        while not stop.is_set():
            time.sleep(0.2)
            replica.allreduce([np.ones(50_000, np.float32)])
            assert replica.last_round is not None
            out.put((rank, replica.last_round.round, time.time()))


def recovery(size: int = 4, kills: int = 8) -> dict[str, Any]:
    """One of the replicas, never the first, is killed at a random moment and started again."""
    context, chance = mp.get_context("spawn"), random.Random(3)
    with tempfile.TemporaryDirectory(prefix="atoll-rounds-") as folder:
        out, stop = context.Queue(), context.Event()

        def start(rank: int) -> Any:
            process = context.Process(
                target=trainee, args=(f"file://{folder}", rank, size, stop, out), daemon=True
            )
            process.start()
            return process

        processes = [start(rank) for rank in range(size)]
        done: dict[int, float] = {}
        after: list[float] = []

        def follow(seconds: float) -> None:
            until = time.time() + seconds
            while time.time() < until:
                try:
                    _, number, at = out.get(timeout=0.1)
                except Exception:
                    continue
                done.setdefault(number, at)

        while len(done) < 12:
            follow(1.0)
        for _ in range(kills):
            victim = chance.randrange(1, size)
            processes[victim].kill()
            killed = time.time()
            processes[victim].join()
            processes[victim] = start(victim)
            follow(chance.uniform(4.0, 7.0))
            while not any(at > killed for at in done.values()):
                follow(0.5)
            after.append(min(at for at in done.values() if at > killed) - killed)
        stop.set()
        follow(1.0)
        for process in processes:
            process.kill()
    times = sorted(done.values())
    gaps = [b - a for a, b in zip(times[5:], times[6:], strict=False)]
    return {
        "replicas": size,
        "kills": kills,
        "rounds": len(done),
        "median gap s": statistics.median(gaps),
        "longest gap s": max(gaps),
        "longest from kill to next round s": max(after),
    }


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "requests": requests,
    "tensors": tensors,
    "model": model,
    "recovery": recovery,
    "simulated": simulated,
}


def main() -> None:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
    for name in sys.argv[1:] or PARTS:
        load = os.getloadavg()
        results[name] = {"load average at start": load[0], **PARTS[name]()}
        print(name, json.dumps(results[name], indent=1), flush=True)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
