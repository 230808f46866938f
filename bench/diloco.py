"""DiLoCo: what 4 bits cost in quality, what a round moves, and what overlap hides.

    nice python bench/diloco.py [quality|bits|overlap]      all of them without a name

quality   a byte GPT, 16 replicas, 3 seeds: validation loss with e3m0 against fp32
bits      bits per parameter and round at 16 replicas, counted in the objects
overlap   compute utilisation on a store behind a slow link, blocking against overlapped
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from diloco_gpt import GPT, Text, validate  # noqa: E402

from atoll.worker.allreduce.codecs import Codec, get_codec  # noqa: E402
from atoll.worker.outer import Fragment, split  # noqa: E402

SEEDS = tuple(map(int, os.environ.get("SEEDS", "0 1 2").split()))
REPLICAS, SYNC_EVERY, ROUNDS, BATCH = 16, 10, int(os.environ.get("ROUNDS", 120)), 2
MODEL = {"width": 48, "depth": 2, "heads": 2, "context": 32}
OUTER = {"lr": 0.7, "beta": float(os.environ.get("BETA", 0.5))}
INNER_LR = 2e-3


class Exchange:
    """The arithmetic of the all-reduce for replicas of one process, with its error feedback."""

    def __init__(self, codec: Codec, down: Codec, replicas: int, size: int) -> None:
        self.codec, self.down = codec, down
        self.owed = np.zeros((replicas, size), np.float32)
        self.owed_by_owners = np.zeros(size, np.float32)
        self.edges = np.linspace(0, size, replicas + 1).astype(int)
        self.bits: list[float] = []

    def mean(self, rows: np.ndarray) -> np.ndarray:
        sent, moved = np.empty_like(rows), 0
        for rank, row in enumerate(rows):
            for start, stop in zip(self.edges, self.edges[1:], strict=False):
                wanted = row[start:stop] + self.owed[rank, start:stop]
                data = self.codec.encode(wanted)
                sent[rank, start:stop] = self.codec.decode(data, stop - start)
                self.owed[rank, start:stop] = wanted - sent[rank, start:stop]
                moved += len(data)
        replicas = len(rows)
        up, down = moved / replicas, moved / replicas * (replicas - 1) / replicas
        total, out = sent.sum(axis=0) / replicas + self.owed_by_owners, np.empty(rows.shape[1])
        shares = 0
        for start, stop in zip(self.edges, self.edges[1:], strict=False):
            data = self.down.encode(total[start:stop])
            out[start:stop] = self.down.decode(data, stop - start)
            shares += len(data)
        self.owed_by_owners = (total - out).astype(np.float32)
        # An owner leaves its own share out of its upload and writes the mean of it instead.
        up = up * (replicas - 1) / replicas + shares / replicas
        down += shares * (replicas - 1) / replicas
        self.bits.append((up + down) * 8 / rows.shape[1])
        return out.astype(np.float32)


def train(codec: str, seed: int, text: Text) -> dict[str, object]:
    """All replicas at once: their parameters are stacked, and one call trains each on its own."""
    torch.manual_seed(seed)
    base = GPT(**MODEL)
    shapes = [(name, tuple(value.shape)) for name, value in base.named_parameters()]
    (fragment,) = split(shapes, 1, **OUTER)
    fragment.values[:] = np.concatenate(
        [value.detach().numpy().reshape(-1) for _, value in base.named_parameters()]
    )
    stacked = {name: torch.nn.Parameter(torch.empty(REPLICAS, *shape)) for name, shape in shapes}
    inner = torch.optim.AdamW(stacked.values(), lr=INNER_LR)

    def loss(parameters: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(base, parameters, (tokens[:, :-1],))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    losses = torch.func.vmap(loss)
    dice = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(REPLICAS)]
    up, _, down = codec.partition("+")
    exchange = Exchange(get_codec(up), get_codec(down or up), REPLICAS, fragment.values.size)
    curve = []
    for outer_round in range(ROUNDS):
        take(fragment, stacked)
        # To a twentieth at the end: what is left then is the codec's doing, not the batches'.
        inner.param_groups[0]["lr"] = INNER_LR * (1 - 0.95 * outer_round / ROUNDS)
        for _ in range(SYNC_EVERY):
            tokens = torch.stack([text.batch(text.train, BATCH, each) for each in dice])
            losses(stacked, tokens).sum().backward()
            inner.step()
            inner.zero_grad()
        rows = [value.detach().reshape(REPLICAS, -1) for value in stacked.values()]
        fragment.step(exchange.mean(fragment.values - torch.cat(rows, 1).numpy()))
        if (outer_round + 1) % 20 == 0:
            take(fragment, dict(base.named_parameters()))
            curve.append(round(validate(base, text, 2048), 4))
            print(f"  {codec} seed {seed} round {outer_round + 1}: {curve[-1]}", flush=True)
    return {"loss": curve[-1], "curve": curve, "bits": statistics.median(exchange.bits)}


@torch.no_grad()
def take(fragment: Fragment, parameters: dict[str, torch.nn.Parameter]) -> None:
    for slot, row in zip(fragment.slots, fragment.rows(fragment.values), strict=True):
        parameters[slot.name].copy_(torch.from_numpy(row))


def quality() -> dict[str, object]:
    text = Text(MODEL["context"])
    runs = {
        codec: [train(codec, seed, text) for seed in SEEDS]
        for codec in os.environ.get("CODECS", "fp32 e3m0").split()
    }
    losses = {codec: [run["loss"] for run in found] for codec, found in runs.items()}
    size = sum(p.numel() for p in GPT(**MODEL).parameters())
    return {
        "model": f"byte GPT, {size} parameters",
        "replicas": REPLICAS,
        "sync_every": SYNC_EVERY,
        "rounds": ROUNDS,
        "outer": OUTER,
        "validation_loss": losses,
        "mean_difference_to_fp32": {
            codec: round(statistics.mean(losses[codec]) - statistics.mean(losses["fp32"]), 4)
            for codec in losses
        },
        "bits_per_parameter_and_round": {
            codec: round(statistics.median(run["bits"] for run in found), 3)
            for codec, found in runs.items()
        },
    }


PARTS = {"quality": quality}


def main() -> None:
    torch.set_num_threads(1)
    path = ROOT / "bench" / "results" / "diloco.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for name in sys.argv[1:] or PARTS:
        began = time.monotonic()
        results[name] = PARTS[name]()
        results[name]["took_s"] = round(time.monotonic() - began, 1)
        print(json.dumps({name: results[name]}, indent=2))
    results["machine"] = {
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
