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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from diloco_gpt import GPT, Text, validate  # noqa: E402

from atoll.worker.allreduce.codecs import Codec, get_codec  # noqa: E402
from atoll.worker.outer import Fragment, split  # noqa: E402

SEEDS = tuple(map(int, os.environ.get("SEEDS", "0 1 2").split()))
REPLICAS, SYNC_EVERY, ROUNDS, BATCH = 16, 8, int(os.environ.get("ROUNDS", 120)), 4
OUTER = {"lr": 0.7, "beta": 0.9}
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
    torch.manual_seed(seed)
    base = GPT(context=64)
    models = [GPT(context=64) for _ in range(REPLICAS)]
    inner = [torch.optim.AdamW(model.parameters(), lr=INNER_LR) for model in models]
    dice = [torch.Generator().manual_seed(1000 * seed + rank) for rank in range(REPLICAS)]
    (fragment,) = split([(name, tuple(p.shape)) for name, p in base.named_parameters()], 1, **OUTER)
    parameters = [dict(model.named_parameters()) for model in models]
    fragment.values[:] = read(fragment, dict(base.named_parameters()))
    up, _, down = codec.partition("+")
    exchange = Exchange(get_codec(up), get_codec(down or up), REPLICAS, fragment.values.size)
    curve = []
    for outer_round in range(ROUNDS):
        rows = np.empty((REPLICAS, fragment.values.size), np.float32)
        for rank, model in enumerate(models):
            write(fragment, parameters[rank])
            for _ in range(SYNC_EVERY):
                model.loss(text.batch(text.train, BATCH, dice[rank])).backward()
                inner[rank].step()
                inner[rank].zero_grad()
            rows[rank] = fragment.values - read(fragment, parameters[rank])
        fragment.step(exchange.mean(rows))
        if (outer_round + 1) % 20 == 0:
            write(fragment, parameters[0])
            curve.append(round(validate(models[0], text, 1024), 4))
            print(f"  {codec} seed {seed} round {outer_round + 1}: {curve[-1]}", flush=True)
    return {"loss": curve[-1], "curve": curve, "bits": statistics.median(exchange.bits)}


def read(fragment: Fragment, parameters: dict[str, torch.nn.Parameter]) -> np.ndarray:
    return np.concatenate(
        [parameters[slot.name].detach().numpy().reshape(-1) for slot in fragment.slots]
    )


@torch.no_grad()
def write(fragment: Fragment, parameters: dict[str, torch.nn.Parameter]) -> None:
    for slot, row in zip(fragment.slots, fragment.rows(fragment.values), strict=True):
        parameters[slot.name].copy_(torch.from_numpy(row))


def quality() -> dict[str, object]:
    text = Text(64)
    runs = {
        codec: [train(codec, seed, text) for seed in SEEDS]
        for codec in os.environ.get("CODECS", "fp32 e3m0").split()
    }
    losses = {codec: [run["loss"] for run in found] for codec, found in runs.items()}
    size = sum(p.numel() for p in GPT(context=64).parameters())
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
