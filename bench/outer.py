"""Which outer learning rate and momentum: validation loss against synchronous training.

    nice python bench/outer.py [SETTING ...]      all of them without a name

Equal tokens everywhere: N replicas of batch B for H steps a round, against one model with batch
N x B for as many steps. Replicas are simulated in one process with the real outer step and exact
means. Results in bench/results/outer.json, one entry a setting, kept when others are run.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from diloco_gpt import GPT, Text, validate  # noqa: E402

from atoll.diloco.model import ModelFragment, split  # noqa: E402
from atoll.diloco.outer import Floats, OuterConfig, OuterRows  # noqa: E402

SEEDS = (0, 1, 2)


class Setting(NamedTuple):
    width: int
    depth: int
    context: int
    replicas: int
    sync_every: int
    rounds: int
    batch: int
    inner_lr: float


SETTINGS = {
    "short": Setting(32, 1, 32, 4, 10, 20, 4, 3e-3),
    "few-rounds": Setting(48, 2, 32, 2, 50, 8, 4, 3e-3),
    "long": Setting(32, 1, 32, 4, 10, 150, 4, 3e-3),
    "eight": Setting(32, 1, 32, 8, 20, 30, 2, 2e-3),
}
# Name to outer learning rate and momentum; "warm" grows with the rounds, as the default does.
OUTER: dict[str, tuple[float, float | str]] = {
    "0.7/0.9": (0.7, 0.9),
    "0.7/0.6": (0.7, 0.6),
    "0.7/0.5": (0.7, 0.5),
    "0.8/0.4": (0.8, 0.4),
    "0.9/0.3": (0.9, 0.3),
    "1.0/0.0": (1.0, 0.0),
    "0.7/warm": (0.7, "warm"),
}


def momentum(beta: float | str, number: int) -> float:
    if isinstance(beta, str):
        return min(0.9, 1 - 1 / (2 + number / 20))
    return beta


def gpt(setting: Setting) -> GPT:
    return GPT(setting.width, setting.depth, 2, setting.context)


def inner_lr(setting: Setting, share: float) -> float:
    """A cosine to a tenth."""
    return float(setting.inner_lr * (0.55 + 0.45 * np.cos(np.pi * share)))


def synchronous(setting: Setting, seed: int, text: Text) -> float:
    torch.manual_seed(seed)
    model = gpt(setting)
    inner = torch.optim.AdamW(model.parameters(), lr=setting.inner_lr)
    dice = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(setting.replicas)]
    steps = setting.rounds * setting.sync_every
    for step in range(steps):
        inner.param_groups[0]["lr"] = inner_lr(setting, step / steps)
        tokens = torch.cat([text.batch(text.train, setting.batch, each) for each in dice])
        model.loss(tokens).backward()
        inner.step()
        inner.zero_grad()
    return validate(model, text, 1024)


def diloco(setting: Setting, seed: int, text: Text, lr: float, beta: float | str) -> float:
    """All replicas at once: their parameters are stacked, and one call trains each on its own."""
    torch.manual_seed(seed)
    base, count = gpt(setting), setting.replicas
    shapes = [(name, tuple(value.shape)) for name, value in base.named_parameters()]
    (fragment,) = split(shapes, 1)
    outer = OuterRows(fragment.size, OuterConfig(lr, momentum(beta, 0)))
    rows = [value.detach().numpy().reshape(-1) for _, value in base.named_parameters()]
    outer.values[:] = np.concatenate(rows)
    stacked = {name: torch.nn.Parameter(torch.empty(count, *shape)) for name, shape in shapes}
    inner = torch.optim.AdamW(stacked.values(), lr=setting.inner_lr)

    def loss(parameters: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(base, parameters, (tokens[:, :-1],))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    losses = torch.func.vmap(loss)
    dice = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(count)]
    steps = setting.rounds * setting.sync_every
    for number in range(setting.rounds):
        take(fragment, outer.values, stacked)
        for step in range(setting.sync_every):
            at = (number * setting.sync_every + step) / steps
            inner.param_groups[0]["lr"] = inner_lr(setting, at)
            tokens = torch.stack([text.batch(text.train, setting.batch, each) for each in dice])
            with sdpa_kernel(SDPBackend.MATH):  # the only one that knows of stacked parameters
                losses(stacked, tokens).sum().backward()
            inner.step()
            inner.zero_grad()
        ends = torch.cat([v.detach().reshape(count, -1) for v in stacked.values()], 1).numpy()
        outer.configure(OuterConfig(lr, momentum(beta, number)))
        outer.step(number, 0, (outer.values - ends).mean(axis=0))
    take(fragment, outer.values, dict(base.named_parameters()))
    return validate(base, text, 1024)


@torch.no_grad()
def take(
    fragment: ModelFragment, values: Floats, parameters: dict[str, torch.nn.Parameter]
) -> None:
    for span in fragment.spans:
        row = values[span.start : span.stop].reshape(span.shape)
        parameters[span.name].copy_(torch.from_numpy(row))


def measure(name: str) -> dict[str, Any]:
    setting, text = SETTINGS[name], Text(SETTINGS[name].context)
    base = [synchronous(setting, seed, text) for seed in SEEDS]
    print(f"{name}: synchronous {statistics.mean(base):.4f}", flush=True)
    lost = {}
    for label, (lr, beta) in OUTER.items():
        losses = [diloco(setting, seed, text, lr, beta) for seed in SEEDS]
        lost[label] = [round(a - b, 4) for a, b in zip(losses, base, strict=True)]
        print(f"{name}: {label} {statistics.mean(lost[label]):+.4f} {lost[label]}", flush=True)
    return {
        **setting._asdict(),
        "parameters": sum(value.numel() for value in gpt(setting).parameters()),
        "synchronous": [round(each, 4) for each in base],
        "lost": lost,
        "mean_lost": {label: round(statistics.mean(each), 4) for label, each in lost.items()},
    }


def main() -> None:
    torch.set_num_threads(1)
    file = ROOT / "bench" / "results" / "outer.json"
    for name in sys.argv[1:] or SETTINGS:
        began = time.monotonic()
        entry = measure(name)
        results = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**results, name: entry}, indent=1) + "\n")
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
