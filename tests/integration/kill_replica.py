"""One process of a replica that shares data; each sample moves one parameter by 1.

kill_replica.py URI RANK WORLD FOLDER LENGTH CODEC MEETING PROCESS PROCESSES

So the parameters tell how often every sample was trained on, whatever the ledger says. It writes
what its parameters are after every round, and at its end the parameters and what the ledger says.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from atoll.diloco import DiLoCo, RoundReport
from atoll.diloco.data import ranges

torch.set_num_threads(1)


def main(uri: str, folder: Path, codec: str, meeting: str, *numbers: int) -> None:
    rank, world, length, process, processes = numbers
    # A pipe that nobody reads would fill, and hold the replica.
    os.dup2(os.open(folder / f"errors.{rank}.{os.getpid()}", os.O_CREAT | os.O_WRONLY), 2)
    if processes > 1:
        where = f"file://{meeting}"
        dist.init_process_group("gloo", init_method=where, rank=process, world_size=processes)
    model = torch.nn.ParameterList([torch.zeros(length)])
    trained = model[0]
    inner = torch.optim.SGD([trained], lr=1.0)
    lines = (folder / f"rounds.{rank}.{os.getpid()}").open("a", buffering=1)

    def note(report: RoundReport) -> None:
        digest = hashlib.sha256(trained.detach().numpy().tobytes()).hexdigest()
        lines.write(f"{report.round} {digest} {time.time()}\n")

    diloco = DiLoCo(
        *(model, inner),
        sync_every=4,
        warmup="none",
        outer="sgd",
        outer_lr=1.0,
        outer_momentum=0.0,
        uri=uri,
        rank=rank,
        world_size=world,
        min_replicas=1,
        grace_s=1.0,
        codec=codec,
        on_round=note,
    )
    (folder / f"begun.{rank}").touch()
    while not all((folder / f"begun.{each}").exists() for each in range(world)):
        time.sleep(0.02)
    with diloco:
        for batch in diloco.data(length, seed=5, shuffle=False, batch=2):
            gradient = torch.zeros(length)
            gradient[list(batch)] = -1.0
            if processes > 1:
                dist.all_reduce(gradient)
            # All processes train on the last sample, so that none is idle.
            trained.grad = gradient.clamp_(min=-1.0)
            inner.step()
            time.sleep(0.002)  # so that a kill finds it at work
        report = diloco.data_report()
        uses = [
            (use.round, use.rank, at)
            for use in report.rounds
            for at in ranges.positions(use.ranges)
        ]
        agreed = diloco.global_parameters()
    if process == 0:
        file = folder / f"report.{rank}.npz"
        np.savez(file, used=report.used, uses=np.array(uses), values=next(iter(agreed.values())))


if __name__ == "__main__":
    _, uri, rank, world, folder, length, codec, meeting, process, processes = sys.argv
    numbers = map(int, (rank, world, length, process, processes))
    main(uri, Path(folder), codec, meeting, *numbers)
