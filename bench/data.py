"""Data that is used once: what it costs, and what replicas that are killed do to the loss.

    python bench/data.py

Three replicas as threads train a small model of the bytes of this repository's documentation, all
data once. In the churned run replicas end without a word at random steps and start again; nothing
else differs.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from atoll.diloco import DiLoCo  # noqa: E402
from atoll.diloco.data import ledger as ledgers  # noqa: E402
from atoll.diloco.data import ranges  # noqa: E402
from atoll.diloco.data.permutation import indexes  # noqa: E402
from atoll.objectstore import ObjectStore  # noqa: E402

CONTEXT, BATCH, REPLICAS = 16, 32, 3
SAMPLES = 38_400


def data() -> tuple[torch.Tensor, torch.Tensor]:
    text = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").rglob("*.md")))
    values = torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64) % 128)
    starts = torch.from_numpy(np.random.default_rng(0).permutation(len(values) - CONTEXT - 1))
    at = starts[: SAMPLES + 4000, None] + torch.arange(CONTEXT + 1)
    rows = values[at]
    return rows[:SAMPLES], rows[SAMPLES:]


def net(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Embedding(128, 16),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * CONTEXT, 96),
        torch.nn.GELU(),
        torch.nn.Linear(96, 128),
    )


def loss_of(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(rows[:, :-1]), rows[:, -1])


class Killed(Exception):
    pass


def run(seed: int, kills: int) -> dict[str, Any]:
    train, held_out = data()
    blobs = ObjectStore.open(f"memory://{uuid.uuid4().hex}")
    steps = SAMPLES // BATCH // REPLICAS
    dice = random.Random(seed)
    moments: dict[int, list[int]] = {rank: [] for rank in range(REPLICAS)}
    for _ in range(kills):
        moments[dice.randrange(REPLICAS)].append(dice.randrange(10, steps // 2))
    out: dict[int, dict[str, Any]] = {}
    lives = [0] * REPLICAS

    def life(rank: int) -> None:
        deadline = moments[rank].pop() if moments[rank] else None
        lives[rank] += 1
        model = net(seed)
        inner = torch.optim.AdamW(model.parameters(), lr=2e-3)
        diloco = DiLoCo(
            model,
            inner,
            sync_every=20,
            warmup="none",
            outer_momentum=0.5,
            uri=blobs,
            rank=rank,
            world_size=REPLICAS,
            min_replicas=1,
            grace_s=5.0,
        )
        for count, batch in enumerate(diloco.data(SAMPLES, seed=seed, batch=BATCH)):
            if count == deadline:
                raise Killed  # nothing is closed, as after SIGKILL
            loss_of(model, train[batch]).backward()
            diloco.count(len(batch))
            inner.step()
            inner.zero_grad()
        report = diloco.data_report()
        used = [at for use in report.rounds for at in ranges.positions(use.ranges)]
        with torch.no_grad():
            loss = float(loss_of(model, held_out))
        out[rank] = {
            "loss": loss,
            "tokens": diloco.tokens,
            "rounds": diloco.round,
            "is_once": sorted(used) == list(range(SAMPLES)),
        }
        diloco.close()

    def go(rank: int) -> None:
        while True:
            try:
                return life(rank)
            except Killed:
                continue

    threads = [threading.Thread(target=go, args=(rank,)) for rank in range(REPLICAS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    losses = {each["loss"] for each in out.values()}
    assert len(losses) == 1, "all replicas end with the same parameters"
    return {"seed": seed, "lives": sum(lives), **out[0]}


def fold_cost(world: int, rounds: int = 300) -> dict[str, Any]:
    """The time of a fold and the size of a ledger with 2 % churn a rank and round."""
    dice = random.Random(0)
    ledger = ledgers.begin(ledgers.make_terms(10**9, period=100, world=world, fragments=1))
    spent = 0.0
    for _ in range(rounds):
        claims = [
            ledgers.Claim(
                rank, ranges.take(ledger.hold_of(rank), dice.choice([3200, 3200, 2000]))[0], 3200
            )
            for rank in range(world)
            if dice.random() > 0.02
        ]
        began = time.perf_counter()
        ledger = ledgers.commit(ledger, claims, world)
        spent += time.perf_counter() - began
    return {
        "world": world,
        "fold_ms": round(1e3 * spent / rounds, 3),
        "bytes": len(ledgers.pack(ledger)),
    }


def main() -> None:
    torch.set_num_threads(1)
    spent = []
    for _ in range(3):
        began = time.perf_counter()
        indexes(range(1 << 16), 10**9, 1, is_shuffled=True)
        spent.append(time.perf_counter() - began)
    index_ns = 1e9 * min(spent) / (1 << 16)
    results: dict[str, Any] = {
        "index_ns": round(index_ns, 1),
        "folds": [fold_cost(world) for world in (8, 64, 256)],
        "quiet": [run(seed, 0) for seed in range(3)],
        "churned": [run(seed, 6) for seed in range(3)],
    }
    text = json.dumps(results, indent=1)
    (ROOT / "bench/results/data.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
