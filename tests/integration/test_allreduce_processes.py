"""Real processes, really killed: SIGKILL and SIGSTOP at instants nobody chose."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.allreduce.s3server import S3Server

ROOT = Path(__file__).parents[2]


class Replicas:
    """The processes of one run; every line they print is kept."""

    def __init__(self, uri: str, world: int, environment: dict[str, str]) -> None:
        self.uri, self.world = uri, world
        self.environment = os.environ | environment | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        self.lines: list[tuple[int, list[str]]] = []
        self.changed = threading.Condition()
        self.started: list[tuple[subprocess.Popen[str], threading.Thread]] = []

    def start(self, rank: int, rounds: int) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.allreduce.replica", self.uri, str(rank)]
            + [str(self.world), str(rounds)],
            cwd=ROOT,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        reader = threading.Thread(target=self._read, args=(rank, process), daemon=True)
        reader.start()
        self.started.append((process, reader))
        return process

    def _read(self, rank: int, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.endswith("\n"):
                with self.changed:
                    self.lines.append((rank, line.split()))
                    self.changed.notify_all()

    def wait_for_lines(self, rank: int, count: int) -> None:
        """Until the rank has reported `count` more rounds than now."""

        def reported() -> int:
            return sum(r == rank for r, _ in self.lines)

        with self.changed:
            target = reported() + count
            assert self.changed.wait_for(lambda: reported() >= target, timeout=60)

    def of(self, rank: int) -> list[list[str]]:
        return [line for r, line in list(self.lines) if r == rank]

    def finish(self) -> None:
        for process, reader in self.started:
            assert process.wait(timeout=80) in (0, -signal.SIGKILL)
            reader.join()
            assert process.stdout is not None
            process.stdout.close()

    def judge(self) -> dict[int, set[str]]:
        """All agree on every round. The members of each round."""
        matches: dict[int, set[tuple[str, str]]] = defaultdict(set)
        for _, (number, digest, members, _) in self.lines:
            matches[int(number)].add((digest, members))
        assert all(len(views) == 1 for views in matches.values()), matches
        return {n: set(next(iter(v))[1].split(",")) for n, v in matches.items()}


@pytest.fixture(params=["file", "s3"])
def location(
    request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, dict[str, str]]]:
    if request.param == "file":
        yield f"file://{tmp_path}", {}
        return
    server = S3Server()
    yield server.use(monkeypatch, "bucket"), server.environment
    server.stop()


def test_killed_processes_are_survived_and_come_back(location: tuple[str, dict[str, str]]) -> None:
    uri, environment = location
    replicas = Replicas(uri, 3, environment)
    chance = random.Random(5)
    processes = {rank: replicas.start(rank, 10**9) for rank in range(3)}
    survivor = 0
    for _ in range(8):
        replicas.wait_for_lines(survivor, 1)
        victim = chance.choice([r for r in range(3) if r != survivor])
        threading.Event().wait(chance.random() * 0.05)  # somewhere within the round
        processes[victim].send_signal(signal.SIGKILL)
        processes[victim].wait()
        processes[victim] = replicas.start(victim, 10**9)
        survivor = next(r for r in range(3) if r not in (victim, survivor))
        replicas.wait_for_lines(victim, 1)  # it is back in the run
    for rank in range(3):
        replicas.wait_for_lines(rank, 1)
    for process in processes.values():
        process.send_signal(signal.SIGKILL)
    replicas.finish()
    manifests = replicas.judge()
    assert {"0", "1", "2"} in manifests.values()
    assert len(manifests) > 8


def test_a_frozen_process_is_left_out_and_taken_in_again(tmp_path: Path) -> None:
    replicas = Replicas(str(tmp_path), 3, {})
    processes = [replicas.start(rank, 10**9) for rank in range(3)]
    replicas.wait_for_lines(0, 2)
    processes[1].send_signal(signal.SIGSTOP)
    replicas.wait_for_lines(0, 4)  # the others go on without it
    processes[1].send_signal(signal.SIGCONT)
    replicas.wait_for_lines(1, 3)
    before = len(replicas.of(1))
    for _ in range(30):  # and it with them, once it keeps up with their pace
        replicas.wait_for_lines(1, 1)
        if replicas.of(1)[-1][3] == "1":
            break
    for process in processes:
        process.send_signal(signal.SIGKILL)
    replicas.finish()
    manifests = replicas.judge()
    assert {"0", "2"} in manifests.values()
    assert "1" in {line[3] for line in replicas.of(1)[before:]}, "not a member again"
