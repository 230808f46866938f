"""One replica that shares data and says what its parameters are after every round.

kill_replica.py URI RANK WORLD FOLDER LENGTH CODEC
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch

from atoll.diloco import DiLoCo, RoundReport

torch.set_num_threads(1)


def main(uri: str, rank: int, world: int, folder: Path, length: int, codec: str) -> None:
    # A pipe that nobody reads would fill, and hold the replica.
    os.dup2(os.open(folder / f"errors.{rank}.{os.getpid()}", os.O_CREAT | os.O_WRONLY), 2)
    torch.manual_seed(0)
    model = torch.nn.Linear(60, 40)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    lines = (folder / f"rounds.{rank}.{os.getpid()}").open("a", buffering=1)

    def note(report: RoundReport) -> None:
        digest = hashlib.sha256(diloco.fragments[0].values.tobytes()).hexdigest()
        lines.write(f"{report.round} {digest} {time.time()}\n")

    diloco = DiLoCo(
        *(model, inner),
        sync_every=4,
        uri=uri,
        rank=rank,
        world_size=world,
        min_replicas=1,
        grace_s=1.0,
        codec=codec,
        on_round=note,
    )
    with diloco:
        for batch in diloco.data(length, seed=5, batch=2):
            x = torch.tensor(batch, dtype=torch.float32)[:, None].expand(-1, 60) / length
            model(x + rank).square().mean().backward()
            inner.step()
            inner.zero_grad()
            time.sleep(0.002)  # so that a kill finds it at work
        report = diloco.data_report()
        uses = [[use.round, use.rank, use.ranges] for use in report.rounds]
        (folder / f"report.{rank}").write_text(json.dumps([report.used, uses]))


if __name__ == "__main__":
    _, where, number, size, notes, count, name = sys.argv
    main(where, int(number), int(size), Path(notes), int(count), name)
