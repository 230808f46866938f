"""A model, a tokenizer and data sets that need no network, and a training by each library."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from torch.utils.data import DataLoader, Dataset

LETTERS = "abcdefghijklmnopqrstuvwxyz .,:"


class Sentences(Dataset[Any]):
    """Each sample has its index in its first letters; says which were read."""

    def __init__(self, count: int = 400) -> None:
        self.count, self.read = count, []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(int(index))
        dice = torch.Generator().manual_seed(int(index))
        ids = torch.randint(3, 33, (16,), generator=dice)
        return {"input_ids": ids, "labels": ids}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: at for at, word in enumerate(["<pad>", "<eos>", "<unk>", *LETTERS])}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def gpt(seed: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64,
            n_embd=32,
            n_layer=2,
            n_head=2,
            n_positions=64,
            bos_token_id=1,
            eos_token_id=1,
            pad_token_id=0,
        )
    )


def digest(model: torch.nn.Module) -> str:
    rows = (value.detach().numpy().tobytes() for _, value in sorted(model.named_parameters()))
    return hashlib.sha256(b"".join(rows)).hexdigest()[:16]


def arguments(folder: Path, kind: Any = None, **options: Any) -> Any:
    from transformers import TrainingArguments

    return (kind or TrainingArguments)(
        **{
            "output_dir": str(folder),
            "report_to": [],
            "use_cpu": True,
            "save_strategy": "no",
            "logging_steps": 1,
            "disable_tqdm": True,
            "max_steps": 20,
            "per_device_train_batch_size": 4,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 2,
            "learning_rate": 1e-2,
            **options,
        }
    )


def facts(trainer: Any, callback: Any, **more: Any) -> dict[str, Any]:
    """Of a training with a Trainer."""
    rates = {
        entry["step"]: entry["learning_rate"]
        for entry in trainer.state.log_history
        if "learning_rate" in entry
    }
    return {
        "digest": digest(trainer.model),
        "step": trainer.state.global_step,
        "round": callback.diloco.round,
        "manifests": [list(report.members) for report in callback.diloco.reports],
        "rates": rates,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        **more,
    }


def lightning_module(seed: int) -> Any:
    import lightning.pytorch as pl

    class Small(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.net = torch.nn.Sequential(torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64))
            self.rates: dict[int, float] = {}

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            ids = batch["input_ids"]
            logits = self.net(ids)[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            self.log("train/loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            inner = torch.optim.AdamW(self.parameters(), lr=1e-2)
            plan = torch.optim.lr_scheduler.CosineAnnealingLR(inner, 20)
            return {
                "optimizer": inner,
                "lr_scheduler": {"scheduler": plan, "interval": "step"},
            }

    return Small()


def lightning_trainer(folder: Path, callback: Any, **options: Any) -> Any:
    import lightning.pytorch as pl

    return pl.Trainer(
        **{
            "max_steps": 20,
            "callbacks": [callback],
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "accelerator": "cpu",
            "devices": 1,
            "default_root_dir": str(folder),
            **options,
        }
    )


def loader(data: Dataset[Any]) -> DataLoader[Any]:
    return DataLoader(data, batch_size=4, shuffle=True)
