"""Real replicas, SIGKILLed at any instant and started again: every round has one mean, and it is
that of the uploads its manifest names."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from tests.allreduce.s3server import S3Server
from tests.round.replica import SIZE

from atoll.diloco.codecs import Codec, get_codec
from atoll.diloco.round import objects
from atoll.diloco.round.cells import Cut, Share, place_of, table_size, unpack_table
from atoll.diloco.round.objects import Manifest, Member
from atoll.objectstore import ObjectStore

ROOT = Path(__file__).parents[2]


class Fleet:
    """Replicas as processes; `kill` ends one with SIGKILL, which is started again at once."""

    def __init__(self, uri: str, world: int, rounds: int, codec: str) -> None:
        self.uri, self.world, self.rounds, self.codec = uri, world, rounds, codec
        self.lines: list[tuple[int, str]] = []
        self.errors: list[str] = []
        self.seen_at: dict[int, float] = {}
        self.kills = 0
        self._processes: dict[int, subprocess.Popen[str]] = {}
        self._threads: list[threading.Thread] = []
        for rank in range(world):
            self._start(rank)

    def _start(self, rank: int) -> None:
        words = [self.uri, str(rank), str(self.world), str(self.rounds), self.codec]
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.round.replica", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        )
        self._processes[rank] = process
        thread = threading.Thread(target=self._read, args=(process,))
        thread.start()
        self._threads.append(thread)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if line.endswith("\n"):
                round, digest, _ = line.split()
                self.lines.append((int(round), digest))
                self.seen_at.setdefault(int(round), time.monotonic())
        problem = process.stderr.read()
        process.stdout.close()
        process.stderr.close()
        if process.wait() not in (0, -signal.SIGKILL):
            self.errors.append(problem)

    @property
    def round(self) -> int:
        return max((round for round, _ in self.lines), default=-1)

    def kill(self, rank: int) -> None:
        process = self._processes[rank]
        if process.poll() is not None:
            return
        process.kill()
        process.wait()
        self.kills += 1
        self._start(rank)

    def wait(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for thread in list(self._threads):
            thread.join(max(0.1, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in self._threads), self.errors

    def stop(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        for thread in self._threads:
            thread.join(30)


def judge(fleet: Fleet) -> None:
    """Every digest that was printed is that of the mean of the uploads in the manifest."""
    store = ObjectStore.open(fleet.uri)
    codec = get_codec(fleet.codec)
    cut = Cut.of(SIZE, fleet.world, (codec, codec))
    printed: dict[int, set[str]] = {}
    for round, digest in fleet.lines:
        printed.setdefault(round, set()).add(digest)
    for round, digests in sorted(printed.items()):
        assert len(digests) == 1, f"round {round} has {len(digests)} means"
        mean = _mean_of_uploads(store, _read_manifest(store, round), cut, codec)
        assert hashlib.sha1(mean.tobytes()).hexdigest() in digests, round


def _read_manifest(store: ObjectStore, round: int) -> Manifest:
    key = objects.manifest_key(round)
    return objects.read_manifest(key, bytes(store.get(f"run/{key}")))


def _mean_of_uploads(store: ObjectStore, manifest: Manifest, cut: Cut, codec: Codec) -> np.ndarray:
    """Computed by numpy from the bytes of the uploads, which are all kept."""
    rows = [_read_upload(store, member, cut, codec) for member in manifest.members]
    mean = (np.sum(np.array(rows, np.float64), axis=0) / len(rows)).astype(np.float32)
    if manifest.plan == objects.FLAT:
        for cell in range(cut.cells):
            part = slice(cut.bounds[cell], cut.bounds[cell + 1])
            mean[part] = codec.decode(codec.encode(mean[part]), cut.sizes[cell])
    return np.asarray(mean)


def _read_upload(store: ObjectStore, member: Member, cut: Cut, codec: Codec) -> np.ndarray:
    data, at = store.get(f"run/{member.upload}"), 0
    row = np.empty(cut.size, np.float32)
    for shard in range(cut.shards):
        numbers = Share(cut).cells_of(shard)
        head = data[at : at + table_size(len(numbers))]
        table = unpack_table(place_of(member.upload, str(shard)), head, len(numbers))
        starts = [*accumulate(table.lengths, initial=at + head.nbytes)]
        for number, start, length in zip(numbers, starts, table.lengths, strict=False):
            part = slice(cut.bounds[number], cut.bounds[number + 1])
            row[part] = codec.decode(data[start : start + length], cut.sizes[number])
        at = starts[-1]
    return row


def run_kills(uri: str, world: int, kills: int, codec: str, seed: int) -> Fleet:
    chance = random.Random(seed)
    fleet = Fleet(uri, world, rounds=10**6, codec=codec)
    try:
        deadline = time.monotonic() + 60 + 6 * kills
        while fleet.round < 2 and time.monotonic() < deadline and not fleet.errors:
            time.sleep(0.05)
        while fleet.kills < kills and time.monotonic() < deadline and not fleet.errors:
            time.sleep(chance.uniform(0.0, 2.0))
            fleet.kill(chance.randrange(world))
        first = fleet.round
        while fleet.round < first + 3 and time.monotonic() < deadline and not fleet.errors:
            time.sleep(0.05)
        assert not fleet.errors, fleet.errors[0][-2000:]
        assert fleet.kills == kills
        assert fleet.round >= first + 3
    finally:
        fleet.stop()
    judge(fleet)
    return fleet


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_replicas_killed_over_a_folder_agree_on_every_mean(tmp_path: Path, codec: str) -> None:
    run_kills(str(tmp_path), 3, 8, codec, 1)


@pytest.mark.timeout(300)
def test_replicas_killed_over_a_failing_s3_agree_on_every_mean(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = s3.use(monkeypatch, "kills")
    s3.fail_share = 0.05
    try:
        run_kills(uri, 3, 6, "fp32", 2)
    finally:
        s3.fail_share = 0.0
    assert s3.failed


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("codec", ["fp32", "int4"])
@pytest.mark.parametrize("world", [2, 4])
def test_hundreds_of_kills(tmp_path: Path, codec: str, world: int) -> None:
    run_kills(str(tmp_path), world, 60, codec, world)
