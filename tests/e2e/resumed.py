"""A training for tests of resume: it trains until its run has done so many rounds.

    python resumed.py ROUNDS

It says where it began, what its learning rate was at each step, and which samples it read.
"""

from __future__ import annotations

import math
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from atoll.diloco import DiLoCo

STEPS = 40


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.arange(400.0).reshape(-1, 1)
    dataset = TensorDataset(x, (x / 400).sin())
    model = torch.nn.Linear(1, 1)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        inner, lambda step: 0.5 + 0.5 * math.cos(math.pi * step / STEPS)
    )
    with DiLoCo(model, inner, sync_every=5, scheduler=schedule) as diloco:
        say("began", diloco.round, diloco.step)
        data = diloco.data(dataset, batch=4)
        loader = data.loader(DataLoader(dataset, batch_sampler=data.sampler))
        for features, targets in diloco.until(loader, rounds=int(sys.argv[1])):
            (model(features / 400) - targets).square().mean().backward()
            inner.step()
            inner.zero_grad()
            say("rate", diloco.step, f"{inner.param_groups[0]['lr']:.6f}")
        report = diloco.data_report()
    say("used", report.used, sum(len(part.ranges) > 0 for part in report.rounds))
    norm = sum(float(each.detach().double().square().sum()) for each in model.parameters())
    say("norm", f"{norm:.12f}")


if __name__ == "__main__":
    main()
