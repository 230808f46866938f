"""The outer loop in a dozen lines. Alone: `python examples/diloco_minimal.py`. Four replicas:
`atoll run --replicas 4 examples/diloco_minimal.py`."""

import torch

from atoll.diloco import DiLoCo

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
inner = torch.optim.AdamW(model.parameters(), lr=1e-2)

with DiLoCo(model, inner, sync_every=20, outer_momentum=0.5) as diloco:
    dice = torch.Generator().manual_seed(diloco.config.rank)
    while diloco.round < 20:
        x = torch.randn(32, 8, generator=dice)
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        loss.backward()
        inner.step()  # every 20th step ends a round
        inner.zero_grad()

print(f"rank {diloco.config.rank}: loss {loss.item():.4f} after {diloco.round} rounds")
