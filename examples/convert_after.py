"""`convert_before.py` with DiLoCo. Comments say why lines changed; docs/convert.md explains it.

python examples/convert_after.py                                # one replica
atoll run --replicas 4 examples/convert_after.py                  # four; kill any of them
atoll run --replicas 4 --run-id exp-7 examples/convert_after.py   # the same command resumes
"""

import math
import os

import torch
from torch.utils.data import DataLoader, TensorDataset

from atoll.diloco import DiLoCo

STEPS, ACCUMULATE, BATCH = 120, 2, 8

torch.manual_seed(0)
x = torch.randn(4096, 16)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LambdaLR(
    inner, lambda step: 0.5 + 0.5 * math.cos(math.pi * min(step, STEPS) / STEPS)
)

# The schedule follows the step of the run, which a restarted replica gets from its peers.
with DiLoCo(model, inner, sync_every=20, scheduler=schedule) as diloco:
    # The run is in the store; this also stores each replica's AdamW and random state there.
    diloco.checkpoint(inner=True)
    # Each sample is trained on once, by one replica, whichever replicas die or join.
    data = diloco.data(dataset, seed=0, epochs=10, batch=BATCH)
    loader = data.loader(DataLoader(dataset, batch_sampler=data.sampler))
    # `until` counts the run's steps, so all replicas end together.
    for number, (features, targets) in enumerate(diloco.until(loader, steps=STEPS), start=1):
        loss = torch.nn.functional.mse_loss(model(features), targets)
        (loss / ACCUMULATE).backward()
        if number % ACCUMULATE:
            continue
        inner.step()  # every 20th step ends a round; the global parameters are in the store
        inner.zero_grad()
        rate = inner.param_groups[0]["lr"]
        print(f"step {diloco.step} rate {rate:.6f} loss {loss.item():.3f}", flush=True)
    report = diloco.data_report()

print(f"used {report.used} of {report.total} samples: {report.by_rank}")
# After the last round all replicas hold the same model: one of them saves it.
if diloco.config.rank == 0:
    diloco.save(os.environ.get("MODEL", "model.safetensors"))
