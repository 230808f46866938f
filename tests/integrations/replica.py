"""One replica that trains case after case, as a process of its own: importing takes seconds.

    python replica.py FOLDER CASE ...

Rank and world are in the environment. What is to know of a case is in FOLDER/CASE.RANK.json, or
CASE.RANK.PROCESS.json under torchrun.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import small
from transformers import Trainer, TrainerCallback

RANK = int(os.environ["ATOLL_RANK"])
# Under torchrun inside a rank, RANK is of a process of the replica.
PROCESS = f".{os.environ['RANK']}" if "TORCHELASTIC_RUN_ID" in os.environ else ""
CASES: dict[str, Callable[[Path], dict[str, Any]]] = {}


def case(function: Callable[[Path], dict[str, Any]]) -> Callable[[Path], dict[str, Any]]:
    CASES[function.__name__] = function
    return function


def store(folder: Path) -> dict[str, Any]:
    shared = {"uri": f"file://{folder}/store", "timeout": 300.0, "grace_s": 120.0}
    return shared | {"min_replicas": 2}


def train(
    folder: Path, *, resume: bool = False, rounds: Any = None, out: str = "", **options: Any
) -> Any:
    from atoll.integrations.transformers import DiLoCoCallback

    callback = DiLoCoCallback(sync_every=5, rounds=rounds, **store(folder))
    data = small.Sentences()
    args = small.arguments(folder / (out or f"rank{RANK}"), **options)
    trainer = Trainer(small.gpt(seed=RANK), args, train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume or None)
    return small.facts(trainer, callback, read=data.read)


@case
def plain(folder: Path) -> dict[str, Any]:
    return train(folder)


@case
def accumulation(folder: Path) -> dict[str, Any]:
    return train(folder, gradient_accumulation_steps=2)


@case
def workers(folder: Path) -> dict[str, Any]:
    return train(folder, dataloader_num_workers=2, max_steps=10)


@case
def autocast(folder: Path) -> dict[str, Any]:
    return train(folder, bf16=True, max_steps=10)


@case
def compiled(folder: Path) -> dict[str, Any]:
    # One replica compiles and the other does not: they meet all the same.
    if RANK == 0:
        return train(folder, max_steps=10)
    return train(folder, max_steps=10, torch_compile=True, torch_compile_backend="aot_eager")


@case
def rounds(folder: Path) -> dict[str, Any]:
    return train(folder, rounds=2)


@case
def odd_end(folder: Path) -> dict[str, Any]:
    return train(folder, max_steps=12)


@case
def resumed(folder: Path) -> dict[str, Any]:
    saving = {"max_steps": 20, "save_strategy": "steps", "save_steps": 10}
    first = train(folder, out="shared", rounds=2, **saving)
    return train(folder, out="shared", resume=True) | {"first": first}


@case
def raises(folder: Path) -> dict[str, Any]:
    """Rank 1 fails at step 7, and its process goes on."""
    from atoll.integrations.transformers import DiLoCoCallback

    class Failure(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if RANK == 1 and state.global_step == 7:
                raise ValueError("at step 7")

    callback = DiLoCoCallback(sync_every=5, **store(folder) | {"min_replicas": 1})
    trainer = Trainer(
        small.gpt(seed=RANK),
        small.arguments(folder / f"rank{RANK}"),
        train_dataset=small.Sentences(),
        callbacks=[callback, Failure()],
    )
    error = ""
    try:
        with callback:
            trainer.train()
    except ValueError as raised:
        error = str(raised)
    return small.facts(trainer, callback, error=error)


@case
def sft(folder: Path) -> dict[str, Any]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from atoll.integrations.transformers import DiLoCoCallback

    data = Dataset.from_dict({"text": [f"the number {small.LETTERS[at % 26]}" for at in range(80)]})
    callback = DiLoCoCallback(sync_every=5, **store(folder))
    trainer = SFTTrainer(
        small.gpt(seed=RANK),
        args=small.arguments(
            folder / f"rank{RANK}", SFTConfig, bf16=False, max_length=32, max_steps=10
        ),
        train_dataset=data,
        processing_class=small.tokenizer(),
        callbacks=[callback],
    )
    trainer.train()
    return small.facts(trainer, callback)


@case
def adapter(folder: Path) -> dict[str, Any]:
    """SFT of a LoRA adapter: what is trained is all that travels."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    from atoll.integrations.transformers import DiLoCoCallback

    data = Dataset.from_dict({"text": [f"the number {small.LETTERS[at % 26]}" for at in range(80)]})
    callback = DiLoCoCallback(sync_every=5, **store(folder))
    trainer = SFTTrainer(
        small.gpt(seed=0),
        args=small.arguments(
            folder / f"rank{RANK}", SFTConfig, bf16=False, max_length=32, max_steps=10
        ),
        train_dataset=data,
        processing_class=small.tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True),
        callbacks=[callback],
    )
    trainer.train()
    return small.facts(trainer, callback)


@case
def grpo(folder: Path) -> dict[str, Any]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from atoll.integrations.transformers import DiLoCoCallback

    seen: list[str] = []

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        seen.extend(prompts)
        return [float(text.count("a")) for text in completions]

    names = [f"{a} {b}" for a in small.LETTERS[:8] for b in small.LETTERS[:8]]
    callback = DiLoCoCallback(sync_every=2, **store(folder))
    trainer = GRPOTrainer(
        small.gpt(seed=RANK),
        reward_funcs=reward,
        args=small.arguments(
            folder / f"rank{RANK}",
            GRPOConfig,
            bf16=False,
            max_steps=4,
            num_generations=2,
            max_completion_length=8,
        ),
        train_dataset=Dataset.from_dict({"prompt": names}),
        processing_class=small.tokenizer(),
        callbacks=[callback],
    )
    trainer.train()
    return small.facts(trainer, callback, read=sorted(set(seen)))


def fit(folder: Path, **options: Any) -> dict[str, Any]:
    from atoll.integrations.lightning import DiLoCoCallback

    callback = DiLoCoCallback(sync_every=5, **store(folder))
    module, data = small.lightning_module(seed=RANK), small.Sentences()
    small.lightning_trainer(folder, callback, **options).fit(module, small.loader(data))
    return {
        "digest": small.digest(module),
        "round": callback.diloco.round,
        "manifests": [list(report.members) for report in callback.diloco.reports],
        "read": data.read,
    }


@case
def lightning(folder: Path) -> dict[str, Any]:
    return fit(folder)


@case
def lightning_accumulation(folder: Path) -> dict[str, Any]:
    return fit(folder, accumulate_grad_batches=2)


@case
def lightning_files(folder: Path) -> dict[str, Any]:
    """Lightning's own logger and checkpoints, with one folder for all replicas."""
    return fit(folder, logger=True, enable_checkpointing=True, max_steps=10, log_every_n_steps=2)


@case
def lightning_autocast(folder: Path) -> dict[str, Any]:
    return fit(folder, precision="bf16-mixed", max_steps=10)


@case
def killed(folder: Path) -> dict[str, Any]:
    """Rank 1 is killed at step 7 of its first life."""
    from atoll.diloco.data import permutation, ranges
    from atoll.integrations.transformers import DiLoCoCallback

    mark = folder / "killed"
    used: dict[int, list[int]] = {0: [], 1: []}

    class Kill(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if RANK == 1 and mark.exists():
                (folder / "again").touch()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if RANK == 1 and state.global_step == 7 and not mark.exists():
                mark.touch()
                (folder.parent / "first").write_text(" ".join(map(str, data.read)))
                os.kill(os.getpid(), signal.SIGKILL)
            while RANK == 0 and state.global_step == 20 and not (folder / "again").exists():
                time.sleep(0.05)

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            for use in callback.diloco.data_report().rounds:
                used[use.rank] += ranges.positions(use.ranges)

    callback = DiLoCoCallback(sync_every=5, **store(folder) | {"grace_s": 3.0, "min_replicas": 1})
    data = small.Sentences(800)
    trainer = Trainer(
        small.gpt(seed=RANK),
        small.arguments(folder / f"rank{RANK}", max_steps=60),
        train_dataset=data,
        callbacks=[Kill(), callback],
    )
    trainer.train()
    return small.facts(
        trainer,
        callback,
        read=data.read,
        count=sum(map(len, used.values())),
        used={
            rank: permutation.indexes(places, 800, 0, is_shuffled=True).tolist()
            for rank, places in used.items()
        },
    )


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        result = CASES[name](folder / name)
        (folder / f"{name}.{RANK}{PROCESS}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
