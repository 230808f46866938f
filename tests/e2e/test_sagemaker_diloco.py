"""The example of DiLoCo on SageMaker, on the stand-in."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.allreduce.s3server import S3Server
from tests.support.sagemaker_stand_in import SageMakerStandIn, why_no_mounts

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/sagemaker_diloco.py"


def test_two_replicas_finish_through_s3_though_one_is_killed(tmp_path: Path) -> None:
    if why := why_no_mounts():
        pytest.skip(f"jobs need a /opt/ml of their own: {why}")
    aws = S3Server()
    aws.make_bucket("runs")
    service = SageMakerStandIn(aws.url, {**aws.environment, "AWS_EC2_METADATA_DISABLED": "true"})
    settings = {"STORE": "s3://runs/all", "ROUNDS": "4", "POLL_S": "0.2"}
    settings |= {"IMAGE_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, EXAMPLE],
            cwd=tmp_path,
            env={**os.environ, **aws.environment, **service.environment, **settings},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        lines = [line.split(" ", 3) for line in done.stdout.splitlines()[1:]]
        ends = [line[:3] for line in lines]
        assert ends == [["0", "succeeded", "0"], ["1", "failed", "137"], ["2", "succeeded", "0"]]
        results = [ast.literal_eval(line[3]) for line in lines]
        assert len({result["weights"] for result in results if result}) == 1, "the same bits"
    finally:
        service.close()
        aws.stop()
