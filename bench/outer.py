"""Which outer learning rate and momentum: validation loss against synchronous training.

    nice python bench/outer.py [SETTING ...]      all of them without a name

Equal tokens everywhere: N replicas of batch B for H steps a round, against one model with batch
N x B for as many steps, all at one learning rate. The training is that of bench/quality.py.
Results in bench/results/outer.json, one entry a setting, kept when others are run.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any, NamedTuple

import torch

from quality import GPT, ROOT, Row, Stack, Text, run_rounds, settings_of, train, validate, windows

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
# Name to kind of bench/quality.py and turns of each length in a ramp.
OUTER = {
    "default": ("default", 0),
    "default, ramp": ("default", 2),
    "0.7/0.9": ("0.7/0.9", 0),
    "average": ("average", 0),
}


def measure_one(setting: Setting, seed: int, text: Text, label: str) -> float:
    """The loss of a run; "synchronous" is one model with the batch of all."""
    torch.manual_seed(seed)
    model = GPT(setting.width, setting.depth, 2, setting.context)
    stacked = 1 if label == "synchronous" else setting.replicas
    steps, stack = setting.rounds * setting.sync_every, Stack(model, stacked)
    batches = windows(text, seed, stacked, stacked, setting.replicas * setting.batch)
    training = train(stack, batches, steps, setting.inner_lr)
    if label == "synchronous":
        for _ in training:
            pass
    else:
        kind, ramp = OUTER[label]
        row = Row("", kind, setting.replicas, setting.sync_every, ramp)
        run_rounds(stack, training, steps, *settings_of(row))
    return validate(stack, text)


def measure(name: str) -> dict[str, Any]:
    setting, text = SETTINGS[name], Text(SETTINGS[name].context)
    base = [measure_one(setting, seed, text, "synchronous") for seed in SEEDS]
    print(f"{name}: synchronous {statistics.mean(base):.4f}", flush=True)
    lost = {}
    for label in OUTER:
        losses = [measure_one(setting, seed, text, label) for seed in SEEDS]
        lost[label] = [round(a - b, 4) for a, b in zip(losses, base, strict=True)]
        print(f"{name}: {label} {statistics.mean(lost[label]):+.4f} {lost[label]}", flush=True)
    model = GPT(setting.width, setting.depth, 2, setting.context)
    return {
        **setting._asdict(),
        "parameters": sum(value.numel() for value in model.parameters()),
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
