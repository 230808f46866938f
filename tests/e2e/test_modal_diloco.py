from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.allreduce.s3server import S3Server
from tests.support.modal_stand_in import ModalStandIn

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/modal_diloco.py"


def run(**settings: str) -> tuple[list[list[str]], set[str], list[tuple[int, int]]]:
    """How each replica ended, the weights that they ended with, and what was started."""
    modal, s3 = ModalStandIn(), S3Server()
    try:
        s3.make_bucket("runs")
        modal.secrets["aws"] = s3.environment
        env = {
            **os.environ, **modal.environment, **s3.environment,
            "STORE": "s3://runs/all", "IMAGE_PYTHON": "python", "OMP_NUM_THREADS": "1", **settings,
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, EXAMPLE], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        lines = [line.split(" ", 3) for line in done.stdout.splitlines()[1:]]
        results = [ast.literal_eval(line[3]) for line in lines]
        weights = {result["weights"] for result in results if result}
        assert modal.running() == []
        started = sorted((box.rank, box.attempt) for box in modal.sandboxes.values())
        return [line[:3] for line in lines], weights, started
    finally:
        modal.close()
        s3.stop()


def test_two_replicas_finish_through_s3_though_one_is_killed() -> None:
    ends, weights, started = run(RESTARTS="0", ROUNDS="4", STEP_S="0.01", POLL_S="0.2")
    assert ends == [["0", "succeeded", "0"], ["1", "failed", "137"], ["2", "succeeded", "0"]]
    assert len(weights) == 1, "both have the same bits"
    assert started == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_one_that_was_killed_comes_back_and_has_the_same_bits() -> None:
    ends, weights, started = run(POLL_S="0.5")
    assert ends == [[str(rank), "succeeded", "0"] for rank in range(3)]
    assert len(weights) == 1
    assert started == [(0, 0), (1, 0), (1, 1), (2, 0)]
