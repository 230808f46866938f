"""The converted script of the docs, with a kill: learning rates are equal and data is disjoint."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.support.forked import Forked

from atoll.diloco.data import permutation, ranges

SCRIPT = Path(__file__).parent / "converted.py"
STEP = re.compile(r"^step (\d+) rate ([\d.]+)", re.M)


def start(folder: Path, rank: int) -> Forked:
    env = {
        **os.environ,
        "ATOLL_RANK": str(rank),
        "ATOLL_WORLD_MAX": "2",
        "ATOLL_RENDEZVOUS_URI": f"file://{folder}/store",
        "MODEL": str(folder / "model.safetensors"),
    }
    return Forked([str(SCRIPT), str(folder)], env)


def read_until(process: Forked, step: int) -> str:
    said = ""
    assert process.stdout is not None
    while (
        not (said := said + process.stdout.readline())
        .rpartition("\nstep ")[2]
        .startswith(f"{step} ")
    ):
        assert process.poll() is None, process.communicate()
    return said


def rates(said: str) -> dict[int, str]:
    return {int(step): rate for step, rate in STEP.findall(said)}


def indexes(folder: Path, rank: int) -> set[int]:
    files = folder.glob(f"read.{rank}.*")
    return {int(line) for file in files for line in file.read_text().split()}


@pytest.mark.timeout(300)
def test_rates_are_equal_and_data_is_disjoint_after_a_kill(tmp_path: Path) -> None:
    steady, victim = start(tmp_path, 0), start(tmp_path, 1)
    first = read_until(victim, 30)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    second = start(tmp_path, 1)
    ends: list[Any] = [each.communicate(timeout=240) for each in (steady, second)]
    assert [steady.returncode, second.returncode] == [0, 0], ends
    by_life = [rates(said) for said in (ends[0][0], first, ends[1][0])]

    expected = by_life[0]
    assert list(expected) == list(range(1, 121))
    assert min(by_life[2]) > 20
    assert max(by_life[2]) == 120
    for step, rate in expected.items():  # printed after the step, so it is that of the next one
        cosine = 1e-2 * (0.5 + 0.5 * math.cos(math.pi * step / 120))
        assert float(rate) == pytest.approx(cosine, abs=1e-6), step
    for life in by_life[1:]:
        assert life == {step: expected[step] for step in life}

    report = json.loads((tmp_path / "report.0").read_text())
    used: dict[int, list[int]] = {0: [], 1: []}
    for _, rank, part in report["rounds"]:
        used[rank] += ranges.positions(tuple(map(tuple, part)))
    both = used[0] + used[1]
    assert len(both) == len(set(both)) == report["used"]
    for rank in (0, 1):
        # What the rounds say a rank has trained on is what it has read.
        assert used[rank]
        samples = permutation.indexes(used[rank], 4096, 0, is_shuffled=True)
        assert set(samples.tolist()) <= indexes(tmp_path, rank)
    assert (tmp_path / "model.safetensors").exists()
    for each in (steady, victim, second):
        each.close()
