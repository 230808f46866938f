"""Replicas of different speed: by steps the fast ones wait, by the clock they train.

    nice python bench/speeds.py [SECONDS]      of a period by the clock; 10 without

Three real processes through a folder, whose steps take 1, 2 and 4 times as long (they sleep for
the rest of a step, so a busy machine does not change the speeds). Both ways train on the same
number of tokens, and each replica weighs what it trained. Results in bench/results/speeds.json.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "examples"))

STEP_S = (0.1, 0.2, 0.4)
BATCH, CONTEXT = 8, 64
TOKENS = 850_000  # 50 tokens a parameter: about nine periods of 10 s
SEEDS = (0, 1)
RESULTS = ROOT / "bench" / "results" / "speeds.json"


def replica(rank: int, uri: str, every: str, seed: int) -> dict[str, Any]:
    import torch
    from diloco_gpt import GPT, Text, validate

    from atoll.diloco import DiLoCo, RoundReport

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    text, model = Text(CONTEXT), GPT(24, 1, 2, CONTEXT)
    inner = torch.optim.AdamW(model.parameters(), lr=5e-3)
    dice = torch.Generator().manual_seed(100 * seed + rank)
    reports: list[tuple[float, float, int]] = []

    def note(report: RoundReport) -> None:
        reports.append((time.monotonic(), report.blocked_s, report.steps))

    sync_every = every if every.endswith("s") else int(every)
    with DiLoCo(
        model,
        inner,
        sync_every=sync_every,
        warmup="none",
        uri=uri,
        rank=rank,
        world_size=len(STEP_S),
        min_replicas=len(STEP_S),
        on_round=note,
    ) as diloco:
        for _ in diloco.until(tokens=TOKENS):
            ends = time.monotonic() + STEP_S[rank]
            model.loss(text.batch(text.train, BATCH, dice)).backward()
            time.sleep(max(0.0, ends - time.monotonic()))
            diloco.count(BATCH * CONTEXT)
            inner.step()
            inner.zero_grad()
    # The first round waits for the start of all.
    (first, _, _), *later = reports
    seconds = later[-1][0] - first
    return {
        "busy": 1 - sum(blocked for _, blocked, _ in later) / seconds,
        "tokens_s": sum(steps for *_, steps in later) * BATCH * CONTEXT / seconds,
        "rounds": len(later),
        "loss": validate(model, text, 1024),
    }


def run(every: str, seed: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", __file__, "replica"]
        replicas = [
            subprocess.Popen(
                [*command, str(rank), f"file://{folder}", every, str(seed)],
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(len(STEP_S))
        ]
        found = [json.loads(each.communicate()[0].splitlines()[-1]) for each in replicas]
    alone = sum(BATCH * CONTEXT / step_s for step_s in STEP_S)
    return {
        "sync_every": every,
        "seed": seed,
        "busy": [round(each["busy"], 3) for each in found],
        "tokens_s": round(sum(each["tokens_s"] for each in found)),
        "of_all_alone": round(sum(each["tokens_s"] for each in found) / alone, 3),
        "rounds": found[0]["rounds"],
        "loss": round(statistics.mean(each["loss"] for each in found), 4),
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    if sys.argv[1:2] == ["replica"]:
        rank, uri, every, seed = sys.argv[2:]
        sys.stdout.write(json.dumps(replica(int(rank), uri, every, int(seed))) + "\n")
        return
    seconds = float(sys.argv[1]) if sys.argv[1:] else 10.0
    # As many steps of all together as a period by the clock has.
    steps = round(statistics.mean(seconds / step_s for step_s in STEP_S))
    results: list[dict[str, Any]] = []
    for seed in SEEDS:
        for every in (f"{seconds:g}s", str(steps)):
            results.append(run(every, seed))
            sys.stdout.write(f"{results[-1]}\n")
            sys.stdout.flush()
            text = ",\n".join("  " + json.dumps(each) for each in results)
            RESULTS.write_text(f'{{"step_s": {list(STEP_S)}, "rows": [\n{text}\n]}}\n')


if __name__ == "__main__":
    main()
