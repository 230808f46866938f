"""DiLoCo: what 4 bits cost in quality, what a round moves, and what overlap hides.

    nice python bench/diloco.py [quality|bits|overlap]      all of them without a name

quality   a byte GPT, 16 replicas, 3 seeds: validation loss with 4 bits against fp32
bits      bits per parameter and round at 16 replicas, counted in the objects
overlap   compute utilisation on a store behind a slow link, blocking against overlapped
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Result = TypeVar("Result")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from diloco_gpt import GPT, Text, validate  # noqa: E402

from atoll.diloco import DiLoCo, RoundReport  # noqa: E402
from atoll.diloco.allreduce import AllReduceReport, ObjectStoreAllReduce  # noqa: E402
from atoll.diloco.codecs import Codec, get_codec  # noqa: E402
from atoll.diloco.estimate import estimate  # noqa: E402
from atoll.diloco.model import ModelFragment, split  # noqa: E402
from atoll.diloco.outer import Floats, OuterConfig, OuterRows  # noqa: E402
from atoll.objectstore import ObjectStore  # noqa: E402

SEEDS = tuple(map(int, os.environ.get("SEEDS", "0 1 2").split()))
REPLICAS, SYNC_EVERY, ROUNDS, BATCH = 16, 5, int(os.environ.get("ROUNDS", 100)), 4
MODEL = {"width": 32, "depth": 1, "heads": 2, "context": 32}
OUTER = {"lr": 0.7, "beta": float(os.environ.get("BETA", 0.5))}
INNER_LR = 2e-3
WORKERS = 3


class Exchange:
    """The arithmetic of the all-reduce for replicas of one process, with its error feedback."""

    def __init__(self, codec: Codec, down: Codec, replicas: int, size: int) -> None:
        self.codec, self.down = codec, down
        self.residuals = np.zeros((replicas, size), np.float32)
        self.owed_by_owners = np.zeros(size, np.float32)
        self.edges = np.linspace(0, size, replicas + 1).astype(int)
        self.bits: list[float] = []

    def mean(self, rows: np.ndarray) -> np.ndarray:
        sent, moved = np.empty_like(rows), 0
        for rank, row in enumerate(rows):
            for start, stop in zip(self.edges, self.edges[1:], strict=False):
                wanted = row[start:stop] + self.residuals[rank, start:stop]
                data = self.codec.encode(wanted)
                sent[rank, start:stop] = self.codec.decode(data, stop - start)
                self.residuals[rank, start:stop] = wanted - sent[rank, start:stop]
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


def train(codec: str, seed: int) -> dict[str, Any]:
    """All replicas at once: their parameters are stacked, and one call trains each on its own."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    text = Text(MODEL["context"])
    base = GPT(**MODEL)
    shapes = [(name, tuple(value.shape)) for name, value in base.named_parameters()]
    (fragment,) = split(shapes, 1)
    outer = OuterRows(fragment.size, OuterConfig(OUTER["lr"], OUTER["beta"]))
    outer.values[:] = np.concatenate(
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
    exchange = Exchange(get_codec(up), get_codec(down or up), REPLICAS, fragment.size)
    curve = []
    for outer_round in range(ROUNDS):
        take(fragment, outer.values, stacked)
        # To a twentieth at the end: what is left then is the codec's doing, not the batches'.
        inner.param_groups[0]["lr"] = INNER_LR * (1 - 0.95 * outer_round / ROUNDS)
        for _ in range(SYNC_EVERY):
            tokens = torch.stack([text.batch(text.train, BATCH, each) for each in dice])
            with sdpa_kernel(SDPBackend.MATH):  # the only one that knows of stacked parameters
                losses(stacked, tokens).sum().backward()
            inner.step()
            inner.zero_grad()
        rows = [value.detach().reshape(REPLICAS, -1) for value in stacked.values()]
        mean = exchange.mean(outer.values - torch.cat(rows, 1).numpy())
        outer.step(outer_round, 0, mean)
        if (outer_round + 1) % 20 == 0:
            take(fragment, outer.values, dict(base.named_parameters()))
            curve.append(round(validate(base, text, 2048), 4))
            print(f"  {codec} seed {seed} round {outer_round + 1}: {curve[-1]}", flush=True)
    return {"loss": curve[-1], "curve": curve, "bits": statistics.median(exchange.bits)}


@torch.no_grad()
def take(
    fragment: ModelFragment, values: Floats, parameters: dict[str, torch.nn.Parameter]
) -> None:
    for span in fragment.spans:
        row = values[span.start : span.stop].reshape(span.shape)
        parameters[span.name].copy_(torch.from_numpy(row))


def quality() -> dict[str, object]:
    codecs = os.environ.get("CODECS", "fp32 int4 e3m0+int4 e3m0").split()
    jobs = [(codec, seed) for seed in SEEDS for codec in codecs]
    with ProcessPoolExecutor(WORKERS) as pool:
        done = dict(zip(jobs, pool.map(train, *zip(*jobs, strict=True)), strict=True))
    runs = {codec: [done[codec, seed] for seed in SEEDS] for codec in codecs}
    losses = {codec: [run["loss"] for run in matches] for codec, matches in runs.items()}
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
            codec: round(statistics.median(run["bits"] for run in matches), 3)
            for codec, matches in runs.items()
        },
    }


def together(count: int, work: Callable[[int], Result]) -> list[Result]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def bits() -> dict[str, object]:
    """The real all-reduce, 16 replicas in threads, a million values that look like gradients."""
    size, matches = 1 << 19, {}
    for codec in ("fp32", "int8", "e3m0", "int4"):
        uri = f"memory:///{uuid.uuid4()}"

        def replica(rank: int, codec: str = codec, uri: str = uri) -> AllReduceReport:
            dice = np.random.default_rng(rank)
            with ObjectStoreAllReduce(
                uri, rank, REPLICAS, min_replicas=REPLICAS, codec=codec
            ) as it:
                for _ in range(2):
                    it.allreduce([dice.standard_normal(size).astype(np.float32) * 1e-3])
                assert it.last_round is not None
                return it.last_round

        reports = together(REPLICAS, replica)
        moved = [(report.bytes_up + report.bytes_down) * 8 / size for report in reports]
        expected = estimate(
            parameters=size, replicas=REPLICAS, sync_every=1, step_s=1, link_gbps=1, codec=codec
        )
        matches[codec] = {
            "bits_per_parameter_and_round": round(statistics.mean(moved), 3),
            "estimated": round(expected.bits_per_parameter, 3),
            "requests_of_all": sum(report.requests for report in reports),
            "requests_estimated": expected.requests,
        }
    return {"replicas": REPLICAS, "parameters": size, "codecs": matches}


class SlowLink(ObjectStore):
    """The store behind a link of one replica's own, used by one request at a time."""

    bytes_s, latency_s = 300e3, 0.02

    def _pass(self, size: int) -> None:
        self._link = getattr(self, "_link", None) or threading.Lock()
        time.sleep(self.latency_s)
        with self._link:
            time.sleep(size / self.bytes_s)

    def put(self, key: str, data: Any) -> None:
        self._pass(memoryview(data).nbytes)
        super().put(key, data)

    def create(self, key: str, data: Any) -> bool:
        self._pass(memoryview(data).nbytes)
        return super().create(key, data)

    def get(self, key: str, start: int = 0, end: int | None = None) -> memoryview:
        data = super().get(key, start, end)
        self._pass(data.nbytes)
        return data


def overlap() -> dict[str, object]:
    """Steps are 100 ms of a device that leaves the processor alone: here, a sleep."""
    replicas, sync_every, step_s, rounds = 4, 40, 0.1, 3
    link_gbps = SlowLink.bytes_s * 8 / 1e9
    rows = []
    for codec, overlap_steps in (("fp32", 0), ("int4", 0), ("int4", 36)):
        uri = f"memory:///{uuid.uuid4()}"

        def replica(
            rank: int, codec: str = codec, overlap_steps: int = overlap_steps, uri: str = uri
        ) -> tuple[float, list[RoundReport]]:
            torch.manual_seed(0)
            model = torch.nn.Linear(500, 500)
            inner = torch.optim.SGD(model.parameters(), lr=1e-3)
            dice = torch.Generator().manual_seed(rank)
            with DiLoCo(
                model,
                inner,
                sync_every=sync_every,
                overlap_steps=overlap_steps,
                codec=codec,
                uri=SlowLink.open(uri),
                rank=rank,
                world_size=replicas,
                min_replicas=replicas,
                checkpoint_every=1000,
            ) as loop:
                began = 0.0
                for value in model.parameters():
                    value.grad = torch.randn(value.shape, generator=dice)
                for step in range(sync_every * (rounds + 2)):
                    # The first rounds find out how fast the others are and save a checkpoint.
                    if step == 2 * sync_every:
                        began = time.monotonic()
                    time.sleep(step_s)
                    inner.step()
                took_s = time.monotonic() - began
            reports = list(loop.reports)[2:]
            return 1 - sum(report.blocked_s for report in reports) / took_s, reports

        matches = together(replicas, replica)
        reports = [report for _, each in matches for report in each]
        expected = estimate(
            parameters=250_500,
            replicas=replicas,
            sync_every=sync_every,
            step_s=step_s,
            link_gbps=link_gbps,
            codec=codec,
            overlap_steps=overlap_steps,
            latency_s=SlowLink.latency_s,
            prices="free",
        )
        rows.append(
            {
                "codec": codec,
                "overlap_steps": overlap_steps,
                "utilisation": round(statistics.median(u for u, _ in matches), 3),
                "estimated_utilisation": round(expected.utilisation, 3),
                "round_s": round(statistics.median(r.hidden_s + r.blocked_s for r in reports), 3),
                "estimated_round_s": round(expected.round_s, 3),
                "megabytes": round(
                    statistics.mean(r.bytes_up + r.bytes_down for r in reports) / 1e6, 3
                ),
                "estimated_megabytes": round((expected.bytes_up + expected.bytes_down) / 1e6, 3),
            }
        )
        print("  ", rows[-1], flush=True)
    return {
        "replicas": replicas,
        "parameters": 250_500,
        "sync_every": sync_every,
        "step_s": step_s,
        "link_mbit_s": link_gbps * 1000,
        "rows": rows,
    }


PARTS = {"bits": bits, "overlap": overlap, "quality": quality}


def main() -> None:
    torch.set_num_threads(1)
    path = ROOT / "bench" / "results" / "diloco.json"
    for name in sys.argv[1:] or PARTS:
        began = time.monotonic()
        matches = PARTS[name]()
        matches["took_s"] = round(time.monotonic() - began, 1)
        matches["machine"] = {
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        print(json.dumps({name: matches}, indent=2))
        # Parts can be run side by side, so the others' results are read only now.
        results = json.loads(path.read_text()) if path.exists() else {}
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(results | {name: matches}, indent=2) + "\n")


if __name__ == "__main__":
    main()
