"""Rounds against raw transfer of the same bytes, in turns, in one run.

    python bench/transfer.py [--store file] [--shape 8x64] [--shape 16x16] [--repeats 15]

Every replica is a process, and takes all turns of its version itself. What the turns do:

raw:       one file of (N-1)/N of the vector is written, N-1 ranges of 1/N are read from the files
           of the others, a file of 1/N is written, N-1 such files are read: the bytes and files
           of a round. Memory is used again, nothing is checked, and between the steps everybody
           waits at a barrier of the operating system. The files of two turns stay, as those of two
           rounds do; older ones are deleted after a turn, which is not a part of it.
           On S3 the same by PUT and GET with the client of the rounds.
raw, mean: the same, and the mean of what was read is computed before the second write, as the
           rounds compute it (sums in float64, rounded once).
raw, sync: as "raw, mean", and each file is synced before the barrier, as uploads and means are.
round:     `allreduce` of this version; `round, out`: into the result of an earlier call, by `out=`.
before:    `allreduce` of another tree (`--before SRC`), in processes of its own.

A turn lasts from the first process that begins to the last that ends. Ratios are taken within a
repeat, where the turns follow each other in a random order; the median over the repeats counts.
`cpu` is the same of the processor time of all processes, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "transfer.json"
TENSORS = 290
KEPT = 2  # turns whose files stay
WARM_UP = 3  # repeats that do not count
RAW, RAW_MEAN, RAW_SYNC = "raw", "raw, mean", "raw, sync"
ROUND, ROUND_OUT, BEFORE = "round", "round, out", "before"
RAW_WAYS = (RAW, RAW_MEAN, RAW_SYNC)
NOW_WAYS = (*RAW_WAYS, ROUND, ROUND_OUT)


class Files:
    """Raw transfer by plain files."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def write(self, name: str, data: memoryview, *, is_durable: bool) -> None:
        file = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        while data.nbytes:
            data = data[os.write(file, data) :]
        if is_durable:
            os.fsync(file)
        os.close(file)

    def read(self, name: str, start: int, room: memoryview) -> None:
        file = os.open(self._folder / name, os.O_RDONLY)
        while room.nbytes:
            count = os.preadv(file, [room], start)
            assert count
            start, room = start + count, room[count:]
        os.close(file)

    def delete(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)


class Objects:
    """Raw transfer by the store's client."""

    def __init__(self, uri: str) -> None:
        from atoll.objectstore import ObjectStore

        self._blobs = ObjectStore.open(uri)

    def write(self, name: str, data: memoryview, *, is_durable: bool) -> None:
        self._blobs.put(name, data)

    def read(self, name: str, start: int, room: memoryview) -> None:
        data = self._blobs.get(name, start, start + room.nbytes)
        assert data.nbytes == room.nbytes

    def delete(self, name: str) -> None:
        self._blobs.delete([name])


def mean_of(parts: list[Any], out: Any) -> None:
    block = 1 << 15
    sums = np.empty(block, np.float64)
    for start in range(0, out.size, block):
        stop = min(start + block, out.size)
        acc = sums[: stop - start]
        acc.fill(0.0)
        for part in parts:
            np.add(acc, part[start:stop], out=acc)
        np.divide(acc, len(parts), out=out[start:stop], casting="unsafe")


class Raw:
    """What a replica does in a turn of raw transfer."""

    def __init__(self, uri: str, rank: int, size: int, values: int, barrier: Any) -> None:
        from concurrent.futures import ThreadPoolExecutor

        location = uri.removeprefix("file://")
        self._store = Files(f"{location}/raw") if location != uri else Objects(f"{uri}/raw")
        self._rank, self._size, self._barrier = rank, size, barrier
        self._part = values // size
        self._row = np.random.default_rng(rank).standard_normal(values, np.float32)
        self._mean = np.ones(values, np.float32)
        self._rooms = [np.ones(self._part, np.float32) for _ in range(size)]
        self._pool = ThreadPoolExecutor(8) if location == uri else None
        self._turn = 0

    def _read_all(self, reads: list[tuple[str, int, Any]]) -> None:
        read = lambda item: self._store.read(item[0], item[1], _bytes(item[2]))  # noqa: E731
        list((self._pool.map if self._pool else map)(read, reads))

    def turn(self, *, with_mean: bool, is_durable: bool = False) -> None:
        rank, size, part, turn = self._rank, self._size, self._part, self._turn
        peers = [peer % size for peer in range(rank + 1, rank + size)]
        upload = _bytes(self._row[: part * (size - 1)])
        self._store.write(f"{turn}.up.{rank}", upload, is_durable=is_durable)
        self._barrier.wait()
        locations = [(rank if rank < peer else rank - 1) * 4 * part for peer in peers]
        rooms = self._rooms[1:]
        names = [f"{turn}.up.{peer}" for peer in peers]
        self._read_all(list(zip(names, locations, rooms, strict=True)))
        mine = self._mean[rank * part : (rank + 1) * part]
        if with_mean:
            mean_of([self._row[rank * part : (rank + 1) * part], *rooms], mine)
        self._store.write(f"{turn}.mean.{rank}", _bytes(mine), is_durable=is_durable)
        self._barrier.wait()
        self._read_all(
            [(f"{turn}.mean.{p}", 0, self._mean[p * part : (p + 1) * part]) for p in peers]
        )

    def clean(self) -> None:
        self._barrier.wait()
        for what in ("up", "mean"):
            self._store.delete(f"{self._turn - KEPT}.{what}.{self._rank}")
        self._turn += 1


def _bytes(values: Any) -> memoryview:
    return memoryview(values.view(np.uint8))


def replica(
    source: str, uri: str, rank: int, size: int, values: int, barrier: Any, pipe: Any
) -> None:
    """Does what the pipe says, and answers with when it began and ended and what it used."""
    sys.path.insert(0, source)
    from atoll import ObjectStoreAllReduce

    raw = Raw(uri, rank, size, values, barrier)
    chance = np.random.default_rng(rank)
    data = [chance.standard_normal(values // TENSORS, np.float32) for _ in range(TENSORS)]
    remainder = values - TENSORS * (values // TENSORS)
    data += [np.ones(remainder, np.float32)] if remainder else []
    out: list[Any] | None = None
    with ObjectStoreAllReduce(f"{uri}/rounds", rank, size, grace_s=300, timeout_s=600) as ours:
        ways: dict[str, Callable[[], Any]] = {
            RAW: lambda: raw.turn(with_mean=False),
            RAW_MEAN: lambda: raw.turn(with_mean=True),
            RAW_SYNC: lambda: raw.turn(with_mean=True, is_durable=True),
            ROUND: lambda: ours.allreduce(data),
            BEFORE: lambda: ours.allreduce(data),
            ROUND_OUT: lambda: ours.allreduce(data, out=out),
        }
        while way := pipe.recv():
            barrier.wait()
            began, cpu = time.monotonic(), time.process_time()
            result = ways[way]()
            out = result if way == ROUND_OUT else out
            ended, used = time.monotonic(), time.process_time() - cpu
            del result
            stages: dict[str, float] = {}
            if way in RAW_WAYS:
                raw.clean()
            else:
                assert ours.last_round is not None
                assert len(ours.last_round.members) == size, ours.last_round
                spent = {"total": ours.last_round.seconds, "requests": ours.last_round.requests}
                stages = {  # an older tree counts them by kind
                    name: sum(each.values()) if isinstance(each, dict) else each
                    for name, each in spent.items()
                }
            pipe.send((began, ended, used, stages))


class World:
    """The processes of one version."""

    def __init__(self, source: Path, uri: str, size: int, values: int) -> None:
        context = mp.get_context("spawn")
        self._barrier = barrier = context.Barrier(size)
        pairs = [context.Pipe() for _ in range(size)]
        self._pipes = [mine for mine, _ in pairs]
        self._processes = [
            context.Process(
                target=replica, args=(str(source), uri, rank, size, values, barrier, theirs)
            )
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()

    def turn(self, way: str) -> dict[str, Any]:
        for pipe in self._pipes:
            pipe.send(way)
        answers = [pipe.recv() for pipe in self._pipes]
        return {
            "wall": max(a[1] for a in answers) - min(a[0] for a in answers),
            "cpu": sum(a[2] for a in answers),
            "stages": [a[3] for a in answers],
        }

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.send("")
        for process in self._processes:
            process.join()


@contextmanager
def folder() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="atoll-bench-", dir=os.environ.get("BENCH_DIR"))
    try:
        yield f"file://{path}"
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def s3() -> Iterator[str]:
    sys.path.append(str(Path(__file__).parent))  # behind the library, which has a queue, too
    from allreduce import s3_server

    with s3_server() as uri:
        yield uri


STORES = {"file": folder, "s3": s3}


def compare(
    store: str, size: int, megabytes: float, repeats: int, sources: dict[str, Path], ways: list[str]
) -> dict[str, Any]:
    values = int(megabytes * 1e6) // 4 // size * size
    took: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        uri = stack.enter_context(STORES[store]())
        worlds = {}
        for name, source in sources.items():
            worlds[name] = World(source, f"{uri}/{name}", size, values)
            stack.callback(worlds[name].end)
        for repeat in range(WARM_UP + repeats):
            for way in random.Random(repeat).sample(ways, len(ways)):
                result = worlds["before" if way == BEFORE else "now"].turn(way)
                if repeat >= WARM_UP:
                    took[way].append(result)
    row: dict[str, Any] = {
        "store": store, "replicas": size, "MB": 4e-6 * values, "tensors": TENSORS,
        "repeats": repeats, "load average": [load, os.getloadavg()[0]],
    }  # fmt: skip
    for way, turns in took.items():
        mine: dict[str, Any] = {}
        for what in ("wall", "cpu"):
            mine[f"{what} s"] = statistics.median(t[what] for t in turns)
            for base in (*RAW_WAYS, BEFORE):
                if way != base and base in took:
                    mine[f"{what} to {base}"] = statistics.median(
                        t[what] / r[what] for t, r in zip(turns, took[base], strict=True)
                    )
        stages = {name for t in turns for each in t["stages"] for name in each}
        mine["stages"] = {
            name: round(
                statistics.median(each[name] for t in turns for each in t["stages"]), 4
            )
            for name in sorted(stages)
        }  # fmt: skip
        row[way] = {k: round(v, 4) if isinstance(v, float) else v for k, v in mine.items()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", choices=STORES, default="file")
    parser.add_argument("--shape", action="append", help="replicas x MB, as 8x64")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--way", action="append", choices=NOW_WAYS)
    parser.add_argument("--before", type=Path, help="src of an older clone to compare with")
    parser.add_argument("--source", type=Path, default=ROOT / "src")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    ways = list(options.way or NOW_WAYS)
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    sources = {"now": options.source}
    if options.before:
        ways.append(BEFORE)
        sources["before"] = options.before
    for shape in options.shape or ["8x64", "16x16"]:
        size, megabytes = shape.split("x")
        row = compare(options.store, int(size), float(megabytes), options.repeats, sources, ways)
        print(json.dumps(row, indent=1), flush=True)
        results[f"{options.store} {shape}"] = row
        results["machine"] = f"{platform.machine()}, {os.cpu_count()} cores"
        options.results.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
