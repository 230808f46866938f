"""The all-reduce against what people do today, and against the store itself.

naive: one object a tensor a rank, everyone reads all of them, one barrier a tensor.
raw:   the same bytes as ours through the same store, with no reduction and free barriers.
Every replica is a process; the store is a moto S3 server on loopback, or a folder.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import queue
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.errors import NotFound
from atoll.diloco.allreduce import ObjectStoreAllReduce
from atoll.objectstore import ObjectStore

RESULTS = Path(__file__).parent / "results" / "allreduce.json"
MB = 1_000_000
POLL_S = 0.05  # twenty times as often as what is compared with


def tensors(total_bytes: int, count: int) -> list[Any]:
    size = total_bytes // 4 // count
    return [np.random.default_rng(i).standard_normal(size, np.float32) for i in range(count)]


def ours(uri: str, rank: int, size: int, data: list[Any], start: Any, rounds: int) -> list[Any]:
    out = []
    with ObjectStoreAllReduce(uri, rank, size) as replica:
        for _ in range(rounds):
            start.wait()
            began, cpu = time.time(), time.process_time()
            replica.allreduce(data)
            report = replica.last_round
            assert report is not None
            assert len(report.members) == size, report
            used = (report.bytes_up + report.bytes_down, report.requests)
            stages = {"total": report.seconds, "cpu": time.process_time() - cpu}
            out.append((began, time.time(), *used, stages))
    return out


def naive(uri: str, rank: int, size: int, data: list[Any], start: Any, rounds: int) -> list[Any]:
    blobs, out = ObjectStore.open(uri), []
    for number in range(rounds):
        start.wait()
        began, before, heads = time.time(), blobs.traffic, 0
        for index, mine in enumerate(data):
            folder = f"naive/{number:04d}/{index:04d}"
            blobs.put(f"{folder}/{rank}", mine.tobytes())
            total = mine.copy()
            for peer in range(size):
                if peer == rank:
                    continue
                while True:
                    heads += 1  # opening a file asks for its size first
                    try:
                        total += np.frombuffer(blobs.get(f"{folder}/{peer}"), np.float32)
                        break
                    except NotFound:
                        time.sleep(POLL_S)
            total /= size
        used = blobs.traffic.since(before)
        out.append((began, time.time(), used.bytes_up + used.bytes_down, used.requests + heads, {}))
    return out


def raw(uri: str, rank: int, size: int, data: list[Any], start: Any, rounds: int) -> list[Any]:
    """PUT (N-1)/N, read N-1 ranges, PUT 1/N, read N-1 objects."""
    blobs, out = ObjectStore.open(uri), []
    complete = sum(t.nbytes for t in data)
    part = complete // size
    body = np.concatenate(data).tobytes()[: part * (size - 1)]
    shard = body[:part]
    peers = [p % size for p in range(rank + 1, rank + size)]
    with ThreadPoolExecutor(8) as pool:
        for number in range(rounds):
            start.wait()
            began, cpu, before = time.time(), time.process_time(), blobs.traffic
            blobs.put(f"raw/{number}/up/{rank}", body)
            start.wait()
            keys = [f"raw/{number}/up/{p}" for p in peers]
            list(pool.map(lambda key: blobs.get(key, 0, part), keys))
            blobs.put(f"raw/{number}/sum/{rank}", shard)
            start.wait()
            list(pool.map(blobs.get, [f"raw/{number}/sum/{p}" for p in peers]))
            used = blobs.traffic.since(before)
            stages = {"cpu": time.process_time() - cpu}
            moved = used.bytes_up + used.bytes_down
            out.append((began, time.time(), moved, used.requests, stages))
            start.wait()
            if rank == 0:
                blobs.delete(b.key for b in blobs.list("raw"))
    return out


WAYS: dict[str, Callable[..., list[Any]]] = {"ours": ours, "naive": naive, "raw": raw}


def replica(way: str, uri: str, rank: int, size: int, shape: Any, start: Any, out: Any) -> None:
    total, count, rounds = shape
    out.put((rank, WAYS[way](uri, rank, size, tensors(total, count), start, rounds)))


def measure(way: str, uri: str, size: int, total: int, count: int, rounds: int) -> dict[str, Any]:
    """Means over ranks and rounds; the first round is warm-up when there are more."""
    context = mp.get_context("spawn")
    start, out = context.Barrier(size), context.Queue()
    shape = (total, count, rounds)
    args = [(way, f"{uri}/{way}", rank, size, shape, start, out) for rank in range(size)]
    processes = [context.Process(target=replica, args=a) for a in args]
    for process in processes:
        process.start()
    matches = dict(out.get(timeout=3600) for _ in processes)
    for process in processes:
        process.join()
    retained = range(1 if rounds > 1 else 0, rounds)
    walls = [
        max(matches[r][k][1] for r in matches) - min(matches[r][k][0] for r in matches)
        for k in retained
    ]
    bytes_each = statistics.mean(matches[r][k][2] for r in matches for k in retained)
    most = max(statistics.mean(matches[r][k][2] for k in retained) for r in matches)
    requests = statistics.mean(matches[r][k][3] for r in matches for k in retained)
    stages = sorted({s for r in matches for k in retained for s in matches[r][k][4]})
    return {
        "wall_s": statistics.median(walls),
        "bytes": bytes_each,
        "bytes_most": most,
        "requests": requests,
        "stages_s": {
            s: round(statistics.median(matches[r][k][4][s] for r in matches for k in retained), 4)
            for s in stages
        },
    }


@contextmanager
def s3_server() -> Iterator[str]:
    """A moto S3 server of its own; the environment points at it."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.environ |= {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_REGION": "us-east-1",
    }
    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(url, timeout=1).close()
                break
            except OSError:
                time.sleep(0.05)
        request = urllib.request.Request(f"{url}/bench", method="PUT")
        urllib.request.urlopen(request, timeout=5).close()
        yield "s3://bench"
    finally:
        server.terminate()
        server.wait()


@contextmanager
def folder() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="atoll-bench-", dir=os.environ.get("BENCH_DIR"))
    try:
        yield f"file://{path}"
    finally:
        shutil.rmtree(path, ignore_errors=True)


STORES = {"s3": s3_server, "file": folder}


def compare(store: str, size: int, total: int, count: int, with_naive: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"store": store, "replicas": size, "MB": total / MB, "tensors": count}
    bound = (1 + 2 * (size - 1) / size) * (total // 4 // count * 4 * count)
    for way in ("naive", "raw", "ours"):
        if way == "naive" and not with_naive:
            continue
        with STORES[store]() as uri:
            row[way] = measure(way, uri, size, total, count, 1 if way == "naive" else 4)
    row["bytes_over_bound"] = row["ours"]["bytes"] / bound - 1
    row["wall_vs_raw"] = row["ours"]["wall_s"] / row["raw"]["wall_s"]
    if with_naive:
        for what in ("wall_s", "bytes", "requests"):
            row[f"naive_vs_ours_{what}"] = row["naive"][what] / row["ours"][what]
    return row


def trainee(uri: str, rank: int, size: int, rounds: int, work_s: float, out: Any) -> None:
    """Compute, average, compute... A restarted one brings little at first, but comes in time."""
    with ObjectStoreAllReduce(uri, rank, size) as replica:
        report = None
        while report is None or report.round < rounds - 1:
            is_new = report is None and (Path(uri[7:]) / "run" / "manifest").exists()
            worked = 0.0 if is_new else work_s
            time.sleep(worked)
            replica.allreduce(tensors(400_000, 10), weight=max(worked, 0.01))
            report = replica.last_round
            assert report is not None
            out.put((rank, report.round, worked if report.is_member else 0.0, time.time()))


def goodput(size: int, rounds: int, work_s: float, share: float) -> dict[str, Any]:
    """The share of all replica-seconds that ended in a mean, while `share` of the rank-rounds
    end with SIGKILL at random instants. The killed are started again at once."""
    context = mp.get_context("spawn")
    chance = random.Random(1)
    kills = round(share * size * rounds)
    with folder() as uri:
        out = context.Queue()

        def start(rank: int) -> Any:
            process = context.Process(
                target=trainee, args=(uri, rank, size, rounds, work_s, out), daemon=True
            )
            process.start()
            return process

        processes = [start(rank) for rank in range(size)]
        done: dict[tuple[int, int], float] = {}
        first: float | None = None
        last, died = 0.0, 0
        times = sorted(chance.uniform(1.0, rounds - 1.5) * work_s for _ in range(kills))
        while any(p.is_alive() for p in processes) or not out.empty():
            try:
                rank, number, worked, last = out.get(timeout=0.05)
                done[rank, number] = worked
                first = first or last  # the end of round 0: everybody has started by then
            except queue.Empty:
                pass
            if first and times and time.time() - first > times[0]:
                times.pop(0)
                victim = chance.randrange(size)
                if processes[victim].is_alive():
                    processes[victim].kill()
                    processes[victim].join()
                    processes[victim] = start(victim)
                    died += 1
        worked = sum(w for (_, number), w in done.items() if number > 0)
        elapsed = last - (first or last)
        return {
            "replicas": size,
            "rounds": len({number for _, number in done}),
            "killed": died,
            "elapsed_s": elapsed,
            "goodput": worked / (size * elapsed),
        }


def show(row: dict[str, Any]) -> None:
    ours = row["ours"]
    print(
        f"{row['store']:>5} N={row['replicas']:<3} {row['MB']:6.1f} MB"
        f" | ours {ours['wall_s']:7.2f} s {ours['bytes'] / MB:8.2f} MB {ours['requests']:6.1f} req"
        f" | over bound {100 * row['bytes_over_bound']:+.3f} %"
        f" | vs raw x{row['wall_vs_raw']:.2f}",
        end="",
    )
    if "naive" in row:
        print(
            f" | naive: time x{row['naive_vs_ours_wall_s']:.1f}"
            f" bytes x{row['naive_vs_ours_bytes']:.2f}"
            f" requests x{row['naive_vs_ours_requests']:.0f}",
            end="",
        )
    print(f"\n      ours {ours['stages_s']} raw {row['raw']['stages_s']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=STORES, action="append")
    parser.add_argument("--replicas", type=int, action="append")
    parser.add_argument("--mb", type=float, default=64.0)
    parser.add_argument("--tensors", type=int, default=290)
    parser.add_argument("--no-naive", action="store_true")
    parser.add_argument("--only-goodput", action="store_true")
    parser.add_argument("--no-goodput", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    lives = {}
    for share in () if options.no_goodput else (0.0, 0.01):
        lives[f"killed {share:.0%} of rank-rounds"] = matches = goodput(16, 10, 30.0, share)
        print(f"goodput, {share:.0%} killed: {matches}", flush=True)
    if options.only_goodput:
        save(options.results, rows, lives)
        return
    for store in options.store or ["s3", "file"]:
        for size in options.replicas or [2, 4, 8, 16]:
            # The naive way makes 144,000 requests at 16 replicas: only where they are cheap.
            slow = options.no_naive or (store == "s3" and size > 8)
            total = int(options.mb * MB)
            rows.append(compare(store, size, total, options.tensors, not slow))
            show(rows[-1])
            save(options.results, rows, lives)


def save(path: Path, rows: list[dict[str, Any]], lives: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
    matches = {"machine": machine, "load": os.getloadavg(), "goodput": lives, "rows": rows}
    path.write_text(json.dumps(matches, indent=1) + "\n")


if __name__ == "__main__":
    main()
