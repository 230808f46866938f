"""Trainers and followers of a weight channel are killed at any instant, over a folder and S3.

No follower ever has other bits than the publisher of a version gave. `make soak` goes on until ten
thousand versions are committed.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.allreduce.s3server import S3Server
from tests.integration.weights_process import weights

from atoll.weights import Follower, Publisher

SCRIPT = Path(__file__).with_name("weights_process.py")
ROOT = Path(__file__).parents[2]
STORM = int(os.environ.get("ATOLL_STORM_COUNT", "10000"))  # versions


class Storm:
    """Processes of one channel; some are killed every now and then."""

    def __init__(self, uri: str, folder: Path, seed: int) -> None:
        self.uri, self.folder, self.rng = uri, folder, random.Random(seed)
        self.kills = 0
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.number = 0

    def start(self, kind: str) -> None:
        self.number += 1
        out = self.folder / f"{kind}-{self.number}.txt"
        command = [sys.executable, str(SCRIPT), kind, self.uri, str(out), "1000000"]
        errors = (self.folder / f"{kind}-{self.number}.err").open("wb")
        with errors:
            self.processes[f"{kind}-{self.number}"] = subprocess.Popen(
                command, cwd=ROOT, stderr=errors
            )

    def run(self, versions: int, kills: int) -> None:
        """Until so many versions were answered and so many processes killed."""
        while self.count("published") < versions or self.kills < kills:
            time.sleep(self.rng.uniform(0.0, 0.6))  # kills come at any instant
            for name, process in list(self.processes.items()):
                if process.poll() is not None:
                    problem = (self.folder / f"{name}.err").read_text()
                    assert process.returncode in (0, -9), f"{name}: {problem[-2000:]}"
                    del self.processes[name]
            kinds = [name.split("-")[0] for name in self.processes]
            if kinds.count("train") < 1 or self.rng.random() < 0.05:
                self.start("train")
            if kinds.count("follow") < 2:
                self.start("follow")
            if self.kills < kills and self.rng.random() < 0.3:
                name = self.rng.choice(list(self.processes))
                self.processes[name].kill()
                self.processes[name].wait()
                self.kills += 1

    def stop(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def count(self, what: str) -> int:
        return sum(
            line.startswith(what)
            for path in self.folder.glob("*.txt")
            for line in path.read_text().splitlines()
        )

    def judge(self) -> None:
        assert not self.count("wrong")
        numbers: dict[str, str] = {}
        for path in self.folder.glob("*.txt"):
            for line in path.read_text().splitlines():
                if line.count(" ") == 2:  # the last one may be torn by a kill
                    _, number, step = line.split()
                    assert numbers.setdefault(number, step) == step, f"two versions {number}"
        with Publisher(self.uri) as publisher, Follower(self.uri) as follower:
            version = publisher.publish(weights(5), step=5)
            assert follower.next(timeout=10) == version
            for name, values in weights(5).items():
                assert (follower.tensors()[name].numpy() == values).all()


def run_storm(uri: str, folder: Path, versions: int, kills: int, seed: int = 1) -> Storm:
    folder.mkdir()
    storm = Storm(uri, folder, seed)
    try:
        storm.run(versions, kills)
    finally:
        storm.stop()
    storm.judge()
    return storm


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.mark.timeout(300)
def test_trainers_and_followers_killed_over_a_folder(tmp_path: Path) -> None:
    storm = run_storm(f"file://{tmp_path}/channel", tmp_path / "out", 60, 8)
    assert storm.count("verified") > 5


@pytest.mark.timeout(300)
def test_trainers_and_followers_killed_over_a_failing_s3(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = s3.use(monkeypatch, "weights")
    s3.fail_share = 0.05
    try:
        storm = run_storm(uri, tmp_path / "out", 25, 5)
    finally:
        s3.fail_share = 0.0
    assert s3.failed
    assert storm.count("verified") > 3


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_ten_thousand_versions(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    uri = f"file://{tmp_path}/channel" if kind == "folder" else s3.use(monkeypatch, "storm")
    s3.fail_share = 0.05
    try:
        storm = run_storm(uri, tmp_path / "out", STORM, 200)
    finally:
        s3.fail_share = 0.0
    sys.stderr.write(
        f"{kind}: {storm.count('published')} published, {storm.count('verified')} verified, "
        f"{storm.kills} kills, {s3.failed} failed requests\n"
    )
