"""Replicas of several gloo processes, of which single ones are killed: one chain, the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


def run(folder: Path, rounds: int, kills: int, codec: str, lives: str) -> int:
    words = [str(folder), str(rounds), str(kills), codec, lives]
    done = subprocess.run(
        [sys.executable, "-m", "tests.round.group_world", *words],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    *lines, last = done.stdout.splitlines()
    assert last.startswith("restarts "), done.stderr[-2000:]
    chains: dict[int, set[str]] = {}
    for line in lines:
        assert "outlived" not in line
        round, chain, _ = line.split()
        chains.setdefault(int(round), set()).add(chain)
    assert {len(found) for found in chains.values()} == {1}
    assert max(chains) == rounds
    found = [_values(folder, rank, rounds) for rank in range(lives.count(",") + 1)]
    assert all(np.array_equal(values, found[0]) for values in found)
    assert found[0].size == 50_000
    return int(last.split()[1])


def _values(folder: Path, rank: int, rounds: int) -> np.ndarray:
    paths = sorted(folder.glob(f"{rank}.*.{rounds}.npy"))
    return np.concatenate([np.load(path) for path in paths])


def test_replicas_of_several_processes_have_the_values_of_one(tmp_path: Path) -> None:
    """The same work in replicas of other sizes gives the same bits, with a lossy codec, too."""
    for codec in ("fp32", "int4"):
        ends = []
        for number, lives in enumerate(("1,1,1", "2,1,3", "4,2,1")):
            folder = tmp_path / f"{codec}-{number}"
            folder.mkdir()
            assert run(folder, 8, 0, codec, lives) == 0
            ends.append(_values(folder, 0, 8))
        assert all(np.array_equal(end, ends[0]) for end in ends)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_single_processes_are_killed_and_replicas_return_with_another_number(
    tmp_path: Path, codec: str
) -> None:
    assert (
        run(tmp_path, 150, 6, codec, "2/3/1/2,1/2,3/1/2") >= 1
    )  # a quick run ends before all kills
