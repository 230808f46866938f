"""An ordinary training script: AdamW, a cosine schedule, accumulation, a shuffling DataLoader,
checkpoints. `convert_after.py` is the same script with DiLoCo; docs/convert.md says what changed.

    python examples/convert_before.py
"""

import math
import os

import torch
from torch.utils.data import DataLoader, TensorDataset

STEPS, ACCUMULATE, BATCH, SAVE_EVERY = 120, 2, 8, 40
CHECKPOINT = os.environ.get("CHECKPOINT", "checkpoint.pt")

torch.manual_seed(0)
x = torch.randn(4096, 16)
dataset = TensorDataset(x, x.sin().sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LambdaLR(
    inner, lambda step: 0.5 + 0.5 * math.cos(math.pi * min(step, STEPS) / STEPS)
)
loader = DataLoader(dataset, batch_size=BATCH, shuffle=True)

step = 0
if os.path.exists(CHECKPOINT):
    saved = torch.load(CHECKPOINT)
    model.load_state_dict(saved["model"])
    inner.load_state_dict(saved["inner"])
    schedule.load_state_dict(saved["schedule"])
    step = saved["step"]

while step < STEPS:
    for number, (features, targets) in enumerate(loader, start=1):
        loss = torch.nn.functional.mse_loss(model(features), targets)
        (loss / ACCUMULATE).backward()
        if number % ACCUMULATE:
            continue
        inner.step()
        schedule.step()
        inner.zero_grad()
        step += 1
        print(f"step {step} rate {schedule.get_last_lr()[0]:.6f} loss {loss.item():.3f}")
        if step % SAVE_EVERY == 0:
            state = {"model": model, "inner": inner, "schedule": schedule}
            torch.save({"step": step, **{k: v.state_dict() for k, v in state.items()}}, CHECKPOINT)
        if step == STEPS:
            break

torch.save(model.state_dict(), "model.pt")
