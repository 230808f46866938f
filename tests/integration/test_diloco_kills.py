"""Replicas SIGKILLed at any instant: the same bits after every round, and each sample once."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import defaultdict
from pathlib import Path

import pytest
from tests.allreduce.s3server import S3Server
from tests.support.forked import Forked

from atoll.diloco.data import ranges

SCRIPT = Path(__file__).with_name("kill_replica.py")
WORLD = 3


def storm(uri: str, folder: Path, codec: str, kills: int, length: int, env: dict[str, str]) -> None:
    rng, done, deadline = random.Random(f"{codec}{uri[:4]}"), 0, time.monotonic() + 30 * kills + 300

    def start(rank: int) -> Forked:
        command = [str(SCRIPT), uri, str(rank), str(WORLD), str(folder), str(length), codec]
        return Forked(command, env)

    alive = {rank: start(rank) for rank in range(WORLD)}
    try:
        while alive:
            assert time.monotonic() < deadline, f"{done} kills, and {sorted(alive)} run on"
            time.sleep(rng.uniform(0.05, 1.5))
            for rank, process in list(alive.items()):
                code = process.poll()
                if code == 0:
                    alive.pop(rank).close()
                elif code is not None:
                    assert code == -signal.SIGKILL, read_errors(folder, rank, process.pid)
                    process.close()
                    alive[rank] = start(rank)
            # One that has done a round: a kill of one that is still loading says little.
            able = [
                rank
                for rank, process in sorted(alive.items())
                if (folder / f"rounds.{rank}.{process.pid}").exists()
                and (folder / f"rounds.{rank}.{process.pid}").stat().st_size
            ]
            if done < kills and able:
                rank = rng.choice(able)
                alive[rank].send_signal(signal.SIGKILL)
                alive[rank].wait()
                done += 1
    finally:
        for process in alive.values():
            process.close()
    check(folder, length)
    text = f"{codec} {uri.partition(':')[0]}: {done} kills, {summary(folder)}"
    (Path(os.environ.get("KILLS_LOG", folder)) / f"kills.{codec}.{uri[:4]}").write_text(text)
    assert done == kills, "the data was used up before the last kill: give it more"


def read_errors(folder: Path, rank: int, pid: int) -> str:
    file = folder / f"errors.{rank}.{pid}"
    return file.read_text()[-3000:] if file.exists() else "it has said nothing"


def read_rounds(folder: Path) -> dict[int, dict[str, float]]:
    """By round, the digests of the parameters, each with the first time it was seen."""
    rounds: dict[int, dict[str, float]] = defaultdict(dict)
    for file in folder.glob("rounds.*"):
        for line in file.read_text().splitlines():
            words = line.split()
            if len(words) == 3:  # a kill may have cut the last line
                at = rounds[int(words[0])].setdefault(words[1], float(words[2]))
                rounds[int(words[0])][words[1]] = min(at, float(words[2]))
    return rounds


def check(folder: Path, length: int) -> None:
    rounds = read_rounds(folder)
    assert all(len(digests) == 1 for digests in rounds.values()), rounds
    reports = [json.loads(file.read_text()) for file in sorted(folder.glob("report.*"))]
    assert len(reports) == WORLD
    for used, uses in reports:
        assert used == length
        positions = [at for _, _, part in uses for at in ranges.positions(part)]
        assert sorted(positions) == list(range(length))


def summary(folder: Path) -> str:
    times = [min(each.values()) for _, each in sorted(read_rounds(folder).items())]
    gap = max((b - a for a, b in zip(times, times[1:], strict=False)), default=0.0)
    return f"{len(times)} rounds, longest gap {gap:.1f} s"


@pytest.mark.timeout(600)
def test_a_few_kills(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    storm(tmp_path.as_uri() + "/store", tmp_path, "int4", 3, 1500, env)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("where", ["file", "s3"])
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_fifty_kills_each(tmp_path: Path, codec: str, where: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    kills = int(os.environ.get("KILLS", "50"))
    if where == "file":
        return storm(tmp_path.as_uri() + "/store", tmp_path, codec, kills, 400 * kills, env)
    server = S3Server()
    try:
        server.make_bucket("kills")
        server.fail_share = 0.03
        uri = f"s3://kills/{tmp_path.name}"
        storm(uri, tmp_path, codec, kills, 120 * kills, env | server.environment)
        assert server.failed
    finally:
        server.stop()
