"""One replica that shares data: notes every batch it trains on, in a file of its own.

data_replica.py URI RANK WORLD FOLDER LENGTH [WORKERS]
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from atoll.diloco import DiLoCo

torch.set_num_threads(1)


class Numbers(Dataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: int) -> torch.Tensor:
        return torch.tensor(float(at))


def main(uri: str, rank: int, world: int, folder: Path, length: int, workers: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    inner = torch.optim.SGD(model.parameters(), lr=1e-4)
    notes = (folder / f"trained.{rank}.{os.getpid()}").open("a", buffering=1)
    with DiLoCo(
        model, inner, sync_every=4, uri=uri, rank=rank, world_size=world, min_replicas=1, grace_s=2
    ) as diloco:
        dataset = Numbers(length)
        data = diloco.data(dataset, seed=5, batch=4)
        (folder / f"ready.{rank}.{os.getpid()}").touch()
        loader = data.loader(DataLoader(dataset, batch_sampler=data.sampler, num_workers=workers))
        for batch in loader:
            model((batch[:, None] + rank) / length).mean().backward()
            notes.write(json.dumps([diloco.round, batch.int().tolist()]) + "\n")
            time.sleep(0.02)  # so that a kill finds it at work
            inner.step()
            inner.zero_grad()
        if rank == 0:
            report = diloco.data_report()
            (folder / "report").write_text(
                json.dumps(
                    {
                        "used": report.used,
                        "total": report.total,
                        "rounds": [[use.round, use.rank, use.ranges] for use in report.rounds],
                    }
                )
            )
    (folder / f"done.{rank}").touch()


if __name__ == "__main__":
    main(
        sys.argv[1],
        int(sys.argv[2]),
        int(sys.argv[3]),
        Path(sys.argv[4]),
        int(sys.argv[5]),
        int(sys.argv[6]) if len(sys.argv) > 6 else 0,
    )
