"""An Accelerate loop as DiLoCo: the two lines are `with DiLoCo(...)` and the end of the loop.

    python examples/diloco_accelerate.py                                          # alone
    atoll run --replicas 2 examples/diloco_accelerate.py                          # two replicas

With `-n 2` instead, Accelerate would join both replicas by DDP, which DiLoCo refuses.
"""

import os

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from atoll.diloco import DiLoCo

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
x = torch.randn(512, 8)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Linear(8, 1)
inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
rank = int(os.environ.get("ATOLL_RANK", 0))
dice = torch.Generator().manual_seed(rank)  # each replica has an order of its own
loader = DataLoader(data, batch_size=16, shuffle=True, generator=dice)
model, inner, loader = accelerator.prepare(model, inner, loader)

with DiLoCo(model, inner, sync_every=8, outer_momentum=0.5) as diloco:
    while diloco.round < 12:
        for features, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(features), targets)
                accelerator.backward(loss)
                inner.step()  # every 8th real step ends a round
                inner.zero_grad()
            if diloco.round >= 12:
                break

digest = sum(value.sum() for value in diloco.global_parameters().values())
print(
    f"rank {diloco.config.rank}: loss {loss.item():.4f} after {diloco.round} rounds, {digest:.9f}"
)
