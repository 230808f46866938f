"""Launches whose replicas, real processes, start apart: each is one run, or says who is missing."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from atoll import LocalProcessExecutor

GRACE_S = 1.0
SCRIPT = """
import json, os, time
import numpy as np
from atoll import ObjectStoreAllReduce, set_result
from atoll.diloco.round import pace
args = json.loads(os.environ["ATOLL_ENTRYPOINT_ARGS"])
if args["grace_s"]:
    pace.FIRST_GRACE_S = args["grace_s"]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
time.sleep(args["late_s"][rank])
rounds = []
with ObjectStoreAllReduce(os.environ["ATOLL_RENDEZVOUS_URI"], rank, world) as replica:
    for _ in range(2):
        replica.allreduce([np.full(4, rank, np.float32)])
        report = replica.last_round
        rounds.append([report.round, sorted(report.members), sorted(report.missing)])
set_result(rounds)
"""


def launch_many(folder: Path, lateness: list[list[float]], grace_s: float | None) -> list[Any]:
    """The rounds that each replica of each launch saw; launches run side by side."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    known = []
    with LocalProcessExecutor() as executor:
        gangs = []
        for at, late_s in enumerate(lateness):
            args = {
                "rendezvous_uri": str(folder / f"run{at}"),
                "late_s": late_s,
                **({"grace_s": grace_s} if grace_s else {"grace_s": 0}),
            }
            gangs.append(executor.launch_replicas(len(late_s), str(script), args, timeout=300))
        for handles in gangs:
            reports = executor.collect(handles)
            assert [report["exit_code"] for report in reports] == [0] * len(handles), reports
            known.append([report["result"] for report in reports])
    return known


def check_one_run(launch: list[list[Any]]) -> None:
    """No part of the launch was alone in a round, unless the round says who was missing."""
    everybody = list(range(len(launch)))
    rounds = [tuple(map(repr, row)) for rank in launch for row in rank]
    assert len({row[0] for row in rounds}) == len(set(rounds)), "replicas differ in a round"
    for rank in launch:
        for _, members, missing in rank:
            assert sorted({*members, *missing}) == everybody, launch
    assert [0, everybody, []] in launch[0], launch


def skews(count: int, seed: int) -> list[list[float]]:
    dice = random.Random(seed)
    return [
        [dice.uniform(0, 2 * GRACE_S) for _ in range(dice.choice((2, 3, 4)))] for _ in range(count)
    ]


def test_a_few_launches_are_each_one_run(tmp_path: Path) -> None:
    late = [[0, 2 * GRACE_S, 0.1], [1.8, 0], *skews(1, seed=7)]
    for launch in launch_many(tmp_path, late, GRACE_S):
        check_one_run(launch)


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_a_hundred_launches_are_each_one_run(tmp_path: Path) -> None:
    late = skews(100, seed=1)
    for at in range(0, 100, 4):
        folder = tmp_path / str(at)
        folder.mkdir()
        for launch in launch_many(folder, late[at : at + 4], GRACE_S):
            check_one_run(launch)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_three_of_four_that_start_45_s_late_are_waited_for(tmp_path: Path) -> None:
    (launch,) = launch_many(tmp_path, [[0, 45, 45, 45]], None)
    check_one_run(launch)
