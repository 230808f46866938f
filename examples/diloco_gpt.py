"""A small GPT on the bytes of Python's own standard library: nothing to download.

    python examples/diloco_gpt.py                               # one replica, no store
    atoll run --replicas 4 examples/diloco_gpt.py               # four, through a store
    WIDTH=256 DEPTH=6 ROUNDS=200 CODEC=e3m0 python examples/diloco_gpt.py

Settings, all from the environment: ROUNDS, SYNC_EVERY, BATCH, CONTEXT, WIDTH, DEPTH, HEADS, LR,
OUTER_LR, OUTER_MOMENTUM, CODEC, FRAGMENTS, OVERLAP, THREADS, SEED.
"""

import os
import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from atoll.diloco import DiLoCo


def setting(name: str, default: float) -> float:
    return type(default)(os.environ.get(name) or default)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        split = (batch, time, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, 2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.byte, self.config = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        self.head.weight = self.byte.weight
        std = 0.5 / width**0.5  # the usual 0.02 is for widths of 600, and would learn slowly here
        for name, value in self.named_parameters():
            if value.dim() > 1:
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(value, std=std / (2 * depth) ** 0.5 if deep else std)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.byte(tokens) + self.config.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class Text:
    """Random windows of this Python's standard library; the last tenth is for validation."""

    def __init__(self, context: int, most_bytes: int = 8_000_000) -> None:
        library = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))[:most_bytes]
        data = torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))
        self.window = context + 1
        self.train, self.valid = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]

    def batch(self, data: torch.Tensor, size: int, dice: torch.Generator) -> torch.Tensor:
        starts = torch.randint(len(data) - self.window, (size,), generator=dice)
        return data[starts[:, None] + torch.arange(self.window)]


@torch.no_grad()
def validate(model: GPT, text: Text, windows: int = 128) -> float:
    dice = torch.Generator().manual_seed(1234)
    return model.loss(text.batch(text.valid, windows, dice)).item()


def main() -> None:
    torch.set_num_threads(int(setting("THREADS", 1)))
    torch.manual_seed(int(setting("SEED", 0)))
    context, batch = int(setting("CONTEXT", 64)), int(setting("BATCH", 8))
    text = Text(context)
    model = GPT(
        int(setting("WIDTH", 64)), int(setting("DEPTH", 2)), int(setting("HEADS", 4)), context
    )
    inner = torch.optim.AdamW(model.parameters(), lr=setting("LR", 3e-3))
    with DiLoCo(
        model,
        inner,
        sync_every=int(setting("SYNC_EVERY", 20)),
        outer_lr=setting("OUTER_LR", 0.7),
        outer_momentum=setting("OUTER_MOMENTUM", 0.5),
        codec=os.environ.get("CODEC", "fp32"),
        fragments=int(setting("FRAGMENTS", 1)),
        overlap_steps=int(setting("OVERLAP", 0)),
        on_round=lambda r: print(f"round {r.round} members {list(r.members)}", flush=True),
    ) as diloco:
        # Each replica reads its own part of the text; a restarted one does not read it again.
        dice = torch.Generator().manual_seed(10_000 * diloco.config.rank + diloco.round)
        while diloco.round < int(setting("ROUNDS", 10)):
            loss = model.loss(text.batch(text.train, batch, dice))
            loss.backward()
            diloco.count(batch * context)
            inner.step()
            inner.zero_grad()
            if diloco.steps % 20 == 0:
                print(f"step {diloco.steps} loss {loss.item():.3f}", flush=True)
    print(f"rank {diloco.config.rank}: validation loss {validate(model, text):.3f}")
    print({name: round(value, 2) for name, value in diloco.metrics().items()})


if __name__ == "__main__":
    main()
