"""What DiLoCo costs in quality: validation loss at equal tokens, each row at its own best rate.

    setsid nice -n 19 python bench/quality.py [--for SECONDS]    goes on where it was
    python -m tools.figures                                      puts the table into the docs

A byte GPT on the sources of Python's library, 20 tokens a parameter, 2,048 tokens a step over all
replicas. The replicas of a run are trained at once, their parameters stacked, with the outer step
of the product (`OuterRows`) and exact means. `STAGES` are in the order of their worth; a row tries
rates until one is between two that are worse, then more seeds at that rate.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from diloco_gpt import GPT, Text  # noqa: E402

from atoll.diloco.outer import OuterConfig, OuterRows  # noqa: E402
from atoll.diloco.periods import RAMP_TURNS, Periods  # noqa: E402
from atoll.diloco.presets import read_settings  # noqa: E402

CONTEXT, BATCH, TOKENS_A_PARAMETER = 64, 32, 20
HEADS = 4
SIZES = {"50k": (40, 2), "150k": (72, 2), "500k": (112, 3)}  # width, depth
RATES = (0.005, 0.01, 0.02)  # the first three of a row; further ones are twice or half of these
WARMUP = 0.05  # of the steps; then a cosine to a tenth
VALIDATION = 1024  # windows, the same for every row
RESULTS = ROOT / "bench" / "results" / "quality.json"


class Row(NamedTuple):
    """`kind`: "synchronous", "alone" (one replica with 1/M of the tokens), "synchronous, Muon",
    "torchft", or a name in `OUTER`."""

    size: str
    kind: str
    replicas: int = 1
    sync_every: int = 0
    ramp: int = 0


# Name to arguments; "average" is the ramp's rule for the whole run.
OUTER: dict[str, dict[str, Any]] = {
    "default": {},
    "0.7/0.9": {"outer_momentum": 0.9},
    "average": {"outer_lr": 1.0, "outer_momentum": 0.0},
    "0.9/0.3": {"outer_lr": 0.9, "outer_momentum": 0.3},
    "ramp by the outer rule": {},
    "muloco": {"outer_lr": 0.7, "outer_momentum": 0.6},
}
PLAIN = ("synchronous", "synchronous, Muon", "alone")


class Stage(NamedTuple):
    rows: tuple[Row, ...]
    seeds: int
    rates: tuple[float, ...] = RATES
    of: str = ""  # take the best rate of the same row at this size; do not search


def rows_of(
    size: str, replicas: Sequence[int], every: int, ramps: Sequence[int]
) -> tuple[Row, ...]:
    return tuple(Row(size, "default", m, every, ramp) for m in replicas for ramp in ramps)


def alone_of(size: str, replicas: Sequence[int]) -> tuple[Row, ...]:
    return tuple(Row(size, "alone", m) for m in replicas)


MAIN = (Row("50k", "synchronous"), *rows_of("50k", (2, 4, 1, 8), 30, (0, 2)))
VARIANTS = (
    *(Row("50k", "default", 4, 30, ramp) for ramp in (1, 4)),
    *(Row("50k", kind, 4, 30, 2) for kind in ("average", "0.9/0.3", "ramp by the outer rule")),
    Row("50k", "0.7/0.9", 4, 30),
    Row("50k", "torchft", 4, 30),
)
STAGES = (
    Stage(MAIN, 1),
    Stage(VARIANTS, 1, (0.01,)),
    Stage((Row("50k", "synchronous, Muon"), Row("50k", "muloco", 2, 30)), 1),
    Stage(MAIN, 2),
    Stage((Row("150k", "synchronous"), *rows_of("150k", (2, 4), 30, (0, 2))), 1, of="50k"),
    Stage(alone_of("50k", (2, 4, 8)), 1, (0.01,)),
    Stage(rows_of("150k", (1,), 30, (2, 0)), 1, of="50k"),
    Stage(rows_of("50k", (2, 4), 100, (0, 2)), 1, (0.01,)),
    Stage(MAIN, 3),
    Stage((*rows_of("50k", (1, 8), 100, (0, 2)), *rows_of("50k", (2, 4), 100, (0, 2))), 1),
    Stage(rows_of("150k", (8,), 30, (0, 2)), 1, of="50k"),
    Stage((*rows_of("50k", (2, 4, 1, 8), 100, (0, 2)), *alone_of("50k", (2, 4, 8))), 3),
    Stage((Row("150k", "synchronous"), *rows_of("150k", (2, 4, 1, 8), 30, (0, 2))), 3, of="50k"),
    Stage(MAIN, 5),
    Stage((Row("500k", "synchronous"), *rows_of("500k", (2,), 30, (0, 2))), 1, of="50k"),
)


# -- The model: the replicas of a run at once ---------------------------------------------------


def make(size: str, seed: int) -> GPT:
    torch.manual_seed(seed)
    width, depth = SIZES[size]
    return GPT(width, depth, HEADS, CONTEXT)


class Stack:
    """The parameters of M models in one tensor of M rows, and the loss of each on its own batch."""

    def __init__(self, model: GPT, replicas: int) -> None:
        named = list(model.named_parameters())
        self.shapes = {name: tuple(value.shape) for name, value in named}
        self.sizes = [value.numel() for _, value in named]
        self.depth, self.heads = len(model.blocks), model.blocks[0].heads
        start = torch.cat([value.detach().reshape(-1) for _, value in named])
        self.rows = start.repeat(replicas, 1).requires_grad_()

    def losses(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of each replica; `tokens` are (replica, window, context + 1)."""
        count, batch, _ = tokens.shape
        parts = self.rows.split(self.sizes, 1)
        p = {
            name: part.reshape(count, *shape)
            for (name, shape), part in zip(self.shapes.items(), parts, strict=True)
        }
        before, after = tokens[:, :, :-1], tokens[:, :, 1:]
        length, width = before.shape[2], self.shapes["byte.weight"][1]
        # Rows of one table of all replicas: an index for each would be slower.
        offset = 256 * torch.arange(count)[:, None, None]
        x = F.embedding(before + offset, p["byte.weight"].reshape(-1, width))
        x = x + p["config.weight"][:, None, :length]
        x = x.reshape(count, batch * length, width)

        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            return torch.baddbmm(p[f"{name}.bias"][:, None], x, p[f"{name}.weight"].mT)

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            scaled = F.layer_norm(x, (width,)) * p[f"{name}.weight"][:, None]
            return scaled + p[f"{name}.bias"][:, None]

        for at in range(self.depth):
            name = f"blocks.{at}."
            heads = linear(norm(x, name + "norm1"), name + "qkv")
            split = heads.view(count * batch, length, 3, self.heads, width // self.heads).permute(
                2, 0, 3, 1, 4
            )
            mixed = F.scaled_dot_product_attention(*split, is_causal=True)
            mixed = mixed.transpose(1, 2).reshape(count, batch * length, width)
            x = x + linear(mixed, name + "out")
            x = x + linear(F.gelu(linear(norm(x, name + "norm2"), name + "up")), name + "down")
        logits = torch.bmm(norm(x, "norm"), p["byte.weight"].mT)
        losses = F.cross_entropy(logits.flatten(0, 1), after.flatten(), reduction="none")
        return losses.view(count, -1).mean(1)


# -- Training -----------------------------------------------------------------------------------


def share(step: int, steps: int) -> float:
    """Of the learning rate."""
    warm = WARMUP * steps
    if step < warm:
        return (step + 1) / warm
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm) / (steps - warm))


class Muon:
    """`torch.optim.Muon(adjust_lr_fn="match_rms_adamw")` for the matrices of the blocks."""

    def __init__(self, stack: Stack) -> None:
        self._rows, self._at, start = stack.rows, dict[int, tuple[int, int]](), 0
        for (name, shape), size in zip(stack.shapes.items(), stack.sizes, strict=True):
            if name.startswith("blocks") and len(shape) == 2:
                self._at[start] = (shape[0], shape[1])
            start += size
        self._momentum = torch.zeros_like(stack.rows)

    @torch.no_grad()
    def step(self, lr: float, adamw: torch.optim.Optimizer) -> None:
        """AdamW steps what is left."""
        gradient, before = self._rows.grad, self._rows.detach().clone()
        assert gradient is not None
        self._momentum.lerp_(gradient, 0.05)
        update = gradient.lerp(self._momentum, 0.95)
        adamw.step()
        for start, (rows, columns) in self._at.items():
            part = slice(start, start + rows * columns)
            change = orthogonalize(update[:, part].view(-1, rows, columns)).flatten(1)
            size = lr * 0.2 * math.sqrt(max(rows, columns))
            self._rows[:, part] = before[:, part] * (1 - 0.1 * lr) - size * change


def orthogonalize(x: torch.Tensor) -> torch.Tensor:
    """Five steps of Newton-Schulz, for each matrix of a stack."""
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x


def train(
    stack: Stack,
    batches: Iterator[torch.Tensor],
    steps: int,
    lr: float,
    *,
    has_muon: bool = False,
) -> Iterator[int]:
    """A step for all replicas, and the number of steps that are done."""
    inner = torch.optim.AdamW([stack.rows], lr=lr, fused=True)
    muon = Muon(stack) if has_muon else None
    for step in range(steps):
        stack.losses(next(batches)).sum().backward()
        gradient = stack.rows.grad
        assert gradient is not None
        gradient /= gradient.norm(dim=1, keepdim=True).clamp(min=1.0)  # each replica clips its own
        inner.param_groups[0]["lr"] = now = lr * share(step, steps)
        if muon is None:
            inner.step()
        else:
            muon.step(now, inner)
        inner.zero_grad(set_to_none=True)
        yield step + 1


def windows(
    text: Text, seed: int, rows: int, replicas: int, batch: int = BATCH
) -> Iterator[torch.Tensor]:
    """The same text in the same steps for every row of a seed, dealt to its replicas."""
    dice = torch.Generator().manual_seed(1000 + seed)
    while True:
        tokens = text.batch(text.train, batch, dice)
        yield tokens.view(replicas, -1, text.window)[:rows]


def run_rounds(
    stack: Stack,
    training: Iterator[int],
    steps: int,
    outer: OuterConfig,
    period: Callable[[int], int],
) -> int:
    """The rounds it took; the rows end as the global parameters. `period` of each round."""
    rows = OuterRows(stack.rows.shape[1], outer)
    rows.values[:] = stack.rows[0].detach().numpy()
    number, end = 0, period(0)
    for step in training:
        if step == min(end, steps):
            ends = stack.rows.detach().numpy()
            rows.step(number, 0, (rows.values - ends).mean(axis=0))
            stack.rows.data.copy_(torch.from_numpy(rows.values))
            number += 1
            end += period(number)
    return number


def settings_of(row: Row) -> tuple[OuterConfig, Callable[[int], int]]:
    """The outer settings of a row, and the period before each round.

    The ramp of the product has `RAMP_TURNS` of each length; rows try others, too.
    """
    given = {"sync_every": row.sync_every, "warmup": "none", **OUTER[row.kind]}
    outer = read_settings(None, 1, **given).outer
    ramp = row.ramp * Periods(((0, row.sync_every),)).full_ramp // RAMP_TURNS
    if row.kind != "ramp by the outer rule":
        outer = outer._replace(ramp=ramp)

    def period(round: int) -> int:
        return int(2 ** (round // row.ramp)) if round < ramp else row.sync_every

    return outer, period


class Meeting:
    """What torchft's DiLoCo asks of a manager, for replicas that are threads of one process."""

    _use_async_quorum = False

    def __init__(self, rank: int, barrier: threading.Barrier, table: dict[int, Any]) -> None:
        self._rank, self._barrier, self._table, self._step = rank, barrier, table, 0

    def register_state_dict_fn(self, *_: object) -> None: ...
    def start_quorum(self) -> None: ...
    def allow_state_dict_read(self) -> None: ...
    def disallow_state_dict_read(self) -> None: ...

    def current_step(self) -> int:
        return self._step

    def should_commit(self) -> bool:
        self._step += 1
        return True

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> Any:
        self._table[self._rank] = tensor.clone()
        self._barrier.wait()
        mean = sum(self._table.values()) / len(self._table)
        self._barrier.wait()
        tensor.copy_(mean)
        return type("Done", (), {"wait": lambda self: True})()


def run_torchft(job: Job, text: Text) -> Stack:
    """torchft's DiLoCo with the outer optimiser of the paper, on the same text and seed."""
    from torchft.local_sgd import DiLoCo

    row, steps = job.row, job.steps // job.row.sync_every * job.row.sync_every
    barrier, table = threading.Barrier(row.replicas), dict[int, Any]()
    models = [make(row.size, job.seed) for _ in range(row.replicas)]

    def replica(rank: int) -> None:
        torch.set_num_threads(1)
        model, batches = models[rank], windows(text, job.seed, row.replicas, row.replicas)
        inner = torch.optim.AdamW(model.parameters(), lr=job.lr, fused=True)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        manager: Any = Meeting(rank, barrier, table)
        with DiLoCo(manager, [model], inner, outer, sync_every=row.sync_every):
            for step in range(steps):
                model.loss(next(batches)[rank]).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                inner.param_groups[0]["lr"] = job.lr * share(step, job.steps)
                inner.step()
                inner.zero_grad()

    with ThreadPoolExecutor(row.replicas) as pool:
        list(pool.map(replica, range(row.replicas)))
    return Stack(models[0], 1)


@torch.no_grad()
def validate(stack: Stack, text: Text) -> float:
    dice = torch.Generator().manual_seed(1234)
    one = Stack.__new__(Stack)
    one.__dict__ |= {**stack.__dict__, "rows": stack.rows[:1]}
    batches = (text.batch(text.valid, 128, dice)[None] for _ in range(VALIDATION // 128))
    return float(np.mean([one.losses(batch).item() for batch in batches]))


# -- Which run is next --------------------------------------------------------------------------


class Job(NamedTuple):
    row: Row
    lr: float
    seed: int
    steps: int


Losses = dict[tuple[Row, float, int], float]


def next_job(losses: Losses) -> Job | None:
    for stage in STAGES:
        for row in stage.rows:
            if (job := _next_of(row, stage, losses)) is not None:
                return Job(row, *job, steps_of(row.size))
    return None


def _next_of(row: Row, stage: Stage, losses: Losses) -> tuple[float, int] | None:
    if stage.of:
        rate = best_rate(row._replace(size=stage.of), losses)
        if rate is None:
            return None
    else:
        tried = {lr: loss for (each, lr, seed), loss in losses.items() if each == row and not seed}
        for lr in stage.rates:
            if lr not in tried:
                return lr, 0
        rate = min(tried, key=tried.__getitem__)
        for further in (rate / 2, rate * 2) if len(stage.rates) > 1 else ():
            if further not in tried and not min(tried) < further < max(tried):
                return further, 0
    for seed in range(stage.seeds):
        if (row, rate, seed) not in losses:
            return rate, seed
    return None


def best_rate(row: Row, losses: Losses) -> float | None:
    tried = {lr: loss for (each, lr, seed), loss in losses.items() if each == row and not seed}
    return min(tried, key=tried.__getitem__) if tried else None


def steps_of(size: str) -> int:
    return round(TOKENS_A_PARAMETER * parameters_of(size) / (BATCH * CONTEXT))


def parameters_of(size: str) -> int:
    return sum(value.numel() for value in make(size, 0).parameters())


# -- Running ------------------------------------------------------------------------------------


def run(job: Job, text: Text) -> dict[str, Any]:
    row = job.row
    began, cpu = time.monotonic(), time.process_time()
    stacked = 1 if row.kind in PLAIN else row.replicas
    stack = Stack(make(row.size, job.seed), stacked)
    batches = windows(text, job.seed, stacked, row.replicas)
    rounds = 0
    if row.kind == "torchft":
        stack, rounds = run_torchft(job, text), job.steps // row.sync_every
    else:
        has_muon = row.kind in ("synchronous, Muon", "muloco")
        training = train(stack, batches, job.steps, job.lr, has_muon=has_muon)
        if row.kind in PLAIN:
            deque(training, maxlen=0)
        else:
            rounds = run_rounds(stack, training, job.steps, *settings_of(row))
    return {
        **row._asdict(),
        "lr": job.lr,
        "seed": job.seed,
        "steps": job.steps,
        "rounds": rounds,
        "loss": round(validate(stack, text), 4),
        "cpu_s": round(time.process_time() - cpu, 1),
        "took_s": round(time.monotonic() - began, 1),
    }


def settings() -> dict[str, Any]:
    return {
        "sizes": {
            size: {"parameters": parameters_of(size), "steps": steps_of(size)} for size in SIZES
        },
        "context": CONTEXT,
        "tokens_a_step": BATCH * CONTEXT,
        "tokens_a_parameter": TOKENS_A_PARAMETER,
        "inner": f"AdamW, warm-up of {WARMUP:.0%}, cosine to a tenth, gradients clipped at 1",
        "validation_windows": VALIDATION,
        "torch": torch.__version__,
    }


def read_runs(file: Path) -> list[dict[str, Any]]:
    results = json.loads(file.read_text()) if file.exists() else {}
    return results["runs"] if results.get("settings") == settings() else []


def losses_of(runs: Sequence[dict[str, Any]]) -> Losses:
    return {
        (Row(*(each[name] for name in Row._fields)), each["lr"], each["seed"]): each["loss"]
        for each in runs
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--for", dest="seconds", type=float, default=math.inf)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    until, results = time.monotonic() + arguments.seconds, arguments.results
    torch.set_num_threads(1)
    text, runs = Text(CONTEXT), read_runs(results)
    while time.monotonic() < until and (job := next_job(losses_of(runs))) is not None:
        runs.append(run(job, text))
        print(json.dumps(runs[-1]), flush=True)
        fresh = results.with_suffix(".tmp")
        lines = ",\n".join("  " + json.dumps(each) for each in runs)
        fresh.write_text(
            f'{{"settings": {json.dumps(settings(), indent=1)},\n "runs": [\n{lines}\n]}}\n'
        )
        os.replace(fresh, results)


if __name__ == "__main__":
    main()
