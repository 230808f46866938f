"""Replicas of two gloo processes that cannot be one, each in turn; prints what each is told.

    python refused_groups.py FOLDER

A line is CASE PROCESS ERROR, with `-` where nothing was refused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

from atoll.diloco import DiLoCo
from atoll.objectstore import ObjectStore


def mesh() -> Any:
    return init_device_mesh("cpu", (2,))


def partial() -> nn.Module:
    model = nn.Linear(4, 3)
    part = DTensor.from_local(torch.ones(3, 4), mesh(), [Partial()])
    model.weight = nn.Parameter(part)
    return model


def drifted() -> nn.Module:
    """Wrapped, and then changed in one process."""
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 3)))
    with torch.no_grad():
        next(model.parameters())[1, 2] += float(dist.get_rank())
    return model


def frozen() -> nn.Module:
    return nn.Linear(4, 3).requires_grad_(False)


def stages() -> nn.Module:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    return nn.ModuleDict({f"stage{dist.get_rank()}": layers[dist.get_rank()]})


def unlike() -> nn.Module:
    return nn.Linear(4, 3 + dist.get_rank())


def sharded() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 6))
    fully_shard(model, mesh=mesh())
    return model


CASES: dict[str, Callable[[], nn.Module]] = {
    "partial": partial,
    "drifted": drifted,
    "frozen": frozen,
    "stages": stages,
    "unlike": unlike,
    "outside": sharded,
    "codec": sharded,
    "fragments": sharded,
    "sync_every": sharded,
    "run_id": sharded,
    "fine": sharded,
}
# Arguments that the processes of a replica have from different places, by process.
UNLIKE: dict[str, tuple[Any, Any]] = {
    "codec": ("int8", "fp32"),
    "fragments": (1, 2),
    "sync_every": (2, 4),
    "run_id": ("a", "b"),
}


def main(folder: str, process: int) -> None:
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=process, world_size=2)
    own = [dist.new_group([each]) for each in range(2)][process]
    for name, build in CASES.items():
        uri, told = f"file://{folder}/{name}", "-"
        # The model is cut over both processes, and the replica is said to be this one alone.
        options: dict[str, Any] = {"process_group": own} if name == "outside" else {}
        if name in UNLIKE:
            options = {name: UNLIKE[name][process]}
        try:
            model = build()
            inner = torch.optim.SGD(model.parameters(), lr=0.1)
            options = {"sync_every": 2, "uri": uri, "rank": 0, "world_size": 1, **options}
            DiLoCo(model, inner, **options).close()
        except Exception as error:
            told = f"{type(error).__name__} {error}"
        if told != "-" and ObjectStore.open(uri).list(""):
            told = "after the store was written to"
        sys.stdout.write(f"{name} {process} {told.splitlines()[0]}\n")
        sys.stdout.flush()
        dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    child = os.fork()
    main(sys.argv[1], 0 if child else 1)
    if child:
        sys.exit(os.waitpid(child, 0)[1])
