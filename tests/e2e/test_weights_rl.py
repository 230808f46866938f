"""The example of a policy over a bucket, with its kills: the reward rises all the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "weights_rl.py"


@pytest.mark.timeout(280)
def test_the_reward_rises_though_a_worker_and_the_trainer_are_killed(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), f"file://{tmp_path}/policy"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rewards = [float(value) for value in re.findall(r"reward ([0-9.]+)", done.stdout)]
    assert "killing a rollout worker" in done.stdout
    assert "killing the trainer" in done.stdout
    resumed = re.search(r"trainer: resumes at step ([0-9]+)", done.stdout)
    assert resumed is not None
    assert int(resumed[1]) >= 80
    assert sum(rewards[:5]) / 5 < 0.25
    assert sum(rewards[-5:]) / 5 > 0.8
