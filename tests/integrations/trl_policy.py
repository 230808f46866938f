"""TRL's AsyncGRPOTrainer on a CPU, with rollouts that follow its weights through a folder.

Two things of TRL's need a GPU and are replaced: the kernel for attention, which it loads from the
hub (torch computes the same over the same packed rows), and a figure to which it compares its
speed. Prints one line of JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}

import numpy as np
import torch
from datasets import Dataset
from small import tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    packing,
)
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from atoll.integrations.trl import WeightTransfer
from atoll.weights import Follower

STEPS, GROUP, PROMPT, COMPLETION = 40, 8, 3, 8
VOCABULARY, WANTED = 32, 5  # the token that is rewarded


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor,
    starts_of_keys: torch.Tensor, *_: Any, softmax_scale: float | None = None, **__: Any,
) -> torch.Tensor:  # fmt: skip
    """As `flash_attn_varlen_func`: each segment sees its own keys, causal from the last one."""
    rows = []
    for at in range(len(starts) - 1):
        q = query[starts[at] : starts[at + 1]].transpose(0, 1)
        span = slice(int(starts_of_keys[at]), int(starts_of_keys[at + 1]))
        k, v = key[span].transpose(0, 1), value[span].transpose(0, 1)
        before = k.shape[1] - q.shape[1]
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(before)
        rows.append(
            torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], mask, scale=softmax_scale, enable_gqa=True
            )[0].transpose(0, 1)
        )
    return torch.cat(rows)


packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=attention)
async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # it asks for the name of the GPU


def digest(tensors: dict[str, torch.Tensor]) -> str:
    rows = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        assert tensor.dtype is torch.bfloat16
        rows.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return rows.hexdigest()[:16]


class Rollouts:
    """A `RolloutWorkerProtocol`: samples from the newest version that it followed."""

    def __init__(self, uri: str, folder: Path) -> None:
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(maxsize=2 * GROUP)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self.served: dict[int, str] = {}  # the weights of each version, by its step
        self.requested = 0
        self._model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self._follower = Follower(uri, name="rollouts")
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._error: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()
        self._follower.close()

    def update_model_version(self, model_version: int) -> None:
        self.requested = model_version

    def check_health(self, stale_after_s: float) -> None:
        if self._error is not None:
            raise RuntimeError("the rollouts failed") from self._error

    def _run(self) -> None:
        try:
            group = 0
            while not self._is_over.is_set():
                if version := self._follower.next():
                    self._follower.copy_into(self._model)
                    assert version.step is not None
                    self.served[version.step] = digest(self._follower.tensors())
                if self._follower.version is not None:
                    self._sample(group, self._follower.version.step or 0)
                    group += 1
        except BaseException as error:
            self._error = error

    @torch.no_grad()
    def _sample(self, group: int, step: int) -> None:
        ids = torch.randint(3, VOCABULARY, (1, PROMPT)).repeat(GROUP, 1)
        chances = []
        for _ in range(COMPLETION):
            rows = self._model(ids).logits[:, -1].float().log_softmax(-1)
            token = torch.multinomial(rows.exp(), 1)
            chances.append(rows.gather(1, token))
            ids = torch.cat([ids, token], 1)
        rewards = (ids[:, PROMPT:] == WANTED).float().mean(1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        mask = np.array([0] * PROMPT + [1] * COMPLETION)
        log_probs = torch.cat([torch.zeros(GROUP, PROMPT), *chances], 1)
        for row in range(GROUP):
            sample = RolloutSample(
                prompt=[{"role": "user", "content": ""}],
                completion=[{"role": "assistant", "content": ""}],
                input_ids=ids[row].numpy(),
                completion_mask=mask,
                old_log_probs=log_probs[row].numpy(),
                advantage=float(advantages[row]),
                model_version=step,
                group_id=group,
                metrics={"reward": float(rewards[row])},
            )
            while not self._is_over.is_set():
                try:
                    self.rollout_buffer.put(sample, timeout=0.05)
                    break
                except queue.Full:
                    continue


class Weights(TrainerCallback):
    """What the trainer has when it sends: the first sync is before the first step."""

    def __init__(self) -> None:
        self.trained: dict[int, str] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self._note(1, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        self._note(state.global_step + 1, model)

    def _note(self, sync: int, model: Any) -> None:
        values = {name: each.detach().bfloat16() for name, each in model.named_parameters()}
        self.trained[sync] = digest(values)


def main(folder: Path) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    uri, base = (folder / "channel").as_uri(), folder / "base"
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=True, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(base)
    tokenizer().save_pretrained(base)
    rollouts, weights = Rollouts(uri, base), Weights()
    trainer = AsyncGRPOTrainer(
        model=str(base),
        args=AsyncGRPOConfig(
            output_dir=str(folder / "out"), use_cpu=True, bf16=False, report_to=[],
            save_strategy="no", disable_tqdm=True, max_steps=STEPS, learning_rate=1e-2,
            per_device_train_batch_size=2 * GROUP, gradient_accumulation_steps=1,
            token_budget=0, gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 64}),
        callbacks=[weights],
        rollout_worker=rollouts,
        weight_transfer=WeightTransfer(uri, dtype=torch.bfloat16, files=base, full_every=3),
    )  # fmt: skip
    trainer.train()
    with Follower(uri) as follower:
        last = follower.next()
        assert last is not None
        newest = {"step": last.step, "digest": digest(follower.tensors())}
    rows = [row for row in trainer.state.log_history if "reward" in row]
    facts = {
        "steps": trainer.state.global_step,
        "model_version": trainer.model_version,
        "requested": rollouts.requested,
        "trained": weights.trained,
        "served": rollouts.served,
        "newest": newest,
        "rewards": [row["reward"] for row in rows],
        "ratio": rows[0]["ratio"],
    }
    sys.stdout.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
