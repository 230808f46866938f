"""What DiLoCo costs in quality: validation loss at equal tokens, beside synchronous training.

    nice python bench/quality.py [ROW ...]      all rows without a name; `--list` names them
    python -m tools.figures                     puts the table into docs/evidence.md

A row that is in bench/results/quality.json with the same settings is not run again. Replicas are
threads of one process with the real outer loop, all-reduce and a store in memory.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from diloco_gpt import GPT, Text  # noqa: E402

from atoll.diloco import DiLoCo  # noqa: E402
from atoll.diloco.presets import pier  # noqa: E402

MODEL = {"width": 128, "depth": 5, "heads": 4, "context": 32}
REPLICAS, STEPS, BATCH, WARMUP, LR = 2, 600, 4, 30, 2e-3
WINDOWS = 2048  # of the validation, the same for every row
RESULTS = ROOT / "bench" / "results" / "quality.json"


class Row(NamedTuple):
    """`kind`: synchronous, alone, or a preset of DiLoCo."""

    kind: str
    sync_every: int = 0
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def name(self) -> str:
        return f"{self.kind}@{self.sync_every}" if self.sync_every else self.kind


PRESETS = ("diloco", "streaming-diloco", "sparseloco", "muloco", "pier", "eager")
ROWS = [
    Row("synchronous"),
    Row("one process"),
    *(Row("default", every) for every in (30, 10, 100)),
    *(Row(preset, 30, (0,)) for preset in PRESETS),
]


def share(step: int, steps: int) -> float:
    """Of the learning rate: a warm-up, then a cosine down to a tenth."""
    warm = WARMUP * steps // STEPS
    if step < warm:
        return (step + 1) / warm
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm) / (steps - warm))


_making = threading.Lock()


def make(seed: int) -> tuple[GPT, torch.optim.Optimizer]:
    with _making:  # the seed is of the process
        torch.manual_seed(seed)
        model = GPT(**MODEL)
    return model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def dice_of(seed: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * seed + rank)


def train(
    model: GPT,
    optimizers: Sequence[torch.optim.Optimizer],
    steps: int,
    batches: Iterator[torch.Tensor],
) -> None:
    for step in range(steps):
        model.loss(next(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for inner in optimizers:
            for group in inner.param_groups:
                group["lr"] = LR * share(step, steps)
            inner.step()
            inner.zero_grad()


def muon_of(model: GPT) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for the rest; updates of the size of AdamW's."""
    inside = [value for name, value in model.named_parameters() if "blocks" in name]
    matrices = [value for value in inside if value.dim() == 2]
    remainder = [
        value for value in model.parameters() if all(value is not each for each in matrices)
    ]
    return [
        torch.optim.Muon(matrices, lr=LR, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(remainder, lr=LR, fused=True),
    ]


def windows(text: Text, size: int, *dice: torch.Generator) -> Iterator[torch.Tensor]:
    while True:
        yield torch.cat([text.batch(text.train, size, each) for each in dice])


def synchronous(text: Text, seed: int) -> GPT:
    """The mean gradient of all replicas in every step: one batch of all of theirs."""
    model, inner = make(seed)
    dice = [dice_of(seed, rank) for rank in range(REPLICAS)]
    train(model, [inner], STEPS, windows(text, BATCH, *dice))
    return model


def alone(text: Text, seed: int) -> GPT:
    """One process with the batch of one replica, for as many steps as all of them together."""
    model, inner = make(seed)
    train(model, [inner], STEPS * REPLICAS, windows(text, BATCH, dice_of(seed, 0)))
    return model


def in_words(value: float | Sequence[tuple[int, float]]) -> str:
    """A value, or the first and the largest of one that changes by round."""
    if isinstance(value, float | int):
        return f"{value:g}"
    return f"{value[0][1]:g} to {max(each for _, each in value):g}"


def replicas(text: Text, seed: int, row: Row) -> tuple[GPT, dict[str, Any]]:
    """The global model at the end, and the outer values that were used."""
    uri = f"memory:///{uuid.uuid4()}"
    options: dict[str, Any] = {} if row.kind == "default" else {"preset": row.kind}
    if row.kind == "pier":
        options = {"preset": pier(rounds=STEPS // row.sync_every)}

    def replica(rank: int) -> tuple[GPT, dict[str, Any]]:
        torch.set_num_threads(1)
        model, inner = make(seed)
        optimizers = muon_of(model) if row.kind == "muloco" else [inner]
        with DiLoCo(
            model,
            optimizers,
            sync_every=row.sync_every,
            uri=uri,
            rank=rank,
            world_size=REPLICAS,
            min_replicas=REPLICAS,
            timeout=3600,
            checkpoint_every=1000,
            **options,
        ) as diloco:
            train(model, optimizers, STEPS, windows(text, BATCH, dice_of(seed, rank)))
            agreed = diloco.global_parameters()
        with torch.no_grad():
            for name, value in model.named_parameters():
                value.copy_(torch.from_numpy(agreed[name]))
        terms = diloco.fragments[0].terms
        outer = f"{in_words(terms.lr)}, {in_words(terms.beta)}"
        return model, {"outer": outer, "rounds": diloco.round}

    with ThreadPoolExecutor(REPLICAS) as pool:
        return list(pool.map(replica, range(REPLICAS)))[0]


@torch.no_grad()
def validate(model: GPT, text: Text) -> float:
    dice = torch.Generator().manual_seed(1234)
    losses = [model.loss(text.batch(text.valid, 256, dice)).item() for _ in range(WINDOWS // 256)]
    return statistics.mean(losses)


PLAIN: dict[str, Callable[[Text, int], GPT]] = {"synchronous": synchronous, "one process": alone}


def run(row: Row, seed: int, text: Text) -> dict[str, Any]:
    outer: dict[str, Any] = {}
    began = time.monotonic()
    if row.kind in PLAIN:
        model = PLAIN[row.kind](text, seed)
    else:
        model, outer = replicas(text, seed, row)
    return {
        "row": row.name,
        "seed": seed,
        **outer,
        "loss": round(validate(model, text), 4),
        "took_s": round(time.monotonic() - began, 1),
        "load": round(os.getloadavg()[0], 1),
    }


def settings() -> dict[str, Any]:
    size = sum(p.numel() for p in GPT(**MODEL).parameters())
    return {
        "model": {"parameters": size, **MODEL},
        "replicas": REPLICAS,
        "steps": STEPS,
        "batch": BATCH,
        "tokens": REPLICAS * STEPS * BATCH * MODEL["context"],
        "inner": {"optimiser": "AdamW", "lr": LR, "warmup": WARMUP, "decay": "cosine to a tenth"},
        "validation_windows": WINDOWS,
        "torch": torch.__version__,
    }


def known() -> list[dict[str, Any]]:
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return results["runs"] if results.get("settings") == settings() else []


def main() -> None:
    torch.set_num_threads(1)
    names = sys.argv[1:]
    if names == ["--list"]:
        print("\n".join(row.name for row in ROWS))
        return
    text = Text(MODEL["context"])
    # One seed of every row first: a table that is cut short has all its rows.
    jobs = [(row, seed) for seed in (0, 1, 2) for row in ROWS if seed in row.seeds]
    if names:
        jobs = [(row, seed) for row, seed in jobs if row.name in names]
    done = {(each["row"], each["seed"]) for each in known()}
    jobs = [(row, seed) for row, seed in jobs if (row.name, seed) not in done]
    writing = threading.Lock()

    def work(job: tuple[Row, int]) -> None:
        torch.set_num_threads(1)
        result = run(*job, text)
        print(result, flush=True)
        with writing:
            runs = [*known(), result]
            RESULTS.write_text(json.dumps({"settings": settings(), "runs": runs}, indent=1) + "\n")

    plain = [job for job in jobs if job[0].kind in PLAIN]
    with ThreadPoolExecutor(REPLICAS) as pool:
        list(pool.map(work, plain))
    for job in jobs:
        if job not in plain:
            work(job)


if __name__ == "__main__":
    main()
