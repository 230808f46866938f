"""The example of DiLoCo under Slurm, with the real daemons and an S3 API."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.allreduce.s3server import S3Server
from tests.support.slurm_cluster import SlurmCluster, needs_slurm

pytestmark = [needs_slurm, pytest.mark.slurm]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples/slurm_diloco.py"


def run(cluster: SlurmCluster, folder: Path, **settings: str) -> tuple[list[list[str]], set[str]]:
    """How each replica ended, and the weights that they ended with."""
    aws = S3Server()
    aws.make_bucket("runs")
    settings |= {"STORE": "s3://runs/all", "OMP_NUM_THREADS": "1", "SBATCH": "--mem=1500M"}
    settings |= {"FOLDER": str(folder / "shared"), "CONF": str(cluster.conf)}
    try:
        done = subprocess.run(
            [sys.executable, EXAMPLE],
            cwd=folder,
            env={**os.environ, **aws.environment, **settings},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        aws.stop()
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 3) for line in done.stdout.splitlines()[1:]]
    results = [ast.literal_eval(line[3]) for line in lines]
    return [line[:3] for line in lines], {result["weights"] for result in results if result}


@pytest.mark.timeout(400)  # each replica loads torch, which a busy machine drags out
def test_two_replicas_finish_through_s3_though_one_is_killed(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    ends, weights = run(cluster, tmp_path, ROUNDS="4", RESTARTS="0", STEP_S="0.01")
    assert ends == [["0", "succeeded", "0"], ["1", "failed", "137"], ["2", "succeeded", "0"]]
    assert len(weights) == 1, "the same bits"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_one_that_was_killed_comes_back_and_has_the_same_bits(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    ends, weights = run(cluster, tmp_path, ROUNDS="12", STEP_S="0.3")
    assert ends == [[str(rank), "succeeded", "0"] for rank in range(3)]
    assert len(weights) == 1
