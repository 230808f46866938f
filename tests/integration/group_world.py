"""Worlds of replicas of several gloo processes, forked from one Python so that torch loads once.

    python group_world.py FOLDER WORLDS

WORLDS is JSON: a list of worlds, each with `name`, `rounds`, `options` of DiLoCo and `replicas`: a
list of the lives of each one. A life is KIND:PROCESSES, with KIND plain, ddp, fsdp, tp (fsdp x
tensor parallel) or hsdp. When a process of a replica fails, the others of it are killed and its
next life begins, as under torchrun; the last life is repeated. `kills` in a world: so many times in
all, a process of a replica but the first is killed at a random moment; `deaths`: [rank, process,
step] at which a process of the first life ends itself. With `spans` each process says that it is
another replica, as under one rendezvous for all. With `data` they share so many positions first.

All replicas begin together. Every process writes a digest of the global parameters after every
round, and at its end the parameters and those of its model, to FOLDER/NAME/RANK.PROCESS.npz.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
import traceback
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from atoll.diloco import DiLoCo

BATCH = 12  # a mean of means is that of all only if each has as many


def net(seed: int = 0) -> nn.Module:
    """Odd shapes: uneven pieces, and empty ones with four processes."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 62), nn.Tanh(), nn.Linear(62, 35), nn.Tanh(), nn.Linear(35, 2)
    )


def cut(kind: str, model: nn.Module, processes: int) -> nn.Module:
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (processes,)))
    if kind == "hsdp":
        names = ("replicas", "pieces")
        mesh = init_device_mesh("cpu", (2, processes // 2), mesh_dim_names=names)
        fully_shard(model, mesh=mesh)
    if kind == "tp":
        mesh = init_device_mesh("cpu", (processes // 2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
    return model


def batches(kind: str, processes: int) -> int:
    """How many processes have a batch of their own."""
    return {"plain": 1, "tp": processes // 2}.get(kind, processes)


def digest(diloco: DiLoCo) -> str:
    rows = b"".join(row.tobytes() for row in diloco.global_parameters().values())
    return hashlib.sha256(rows).hexdigest()


def complete(value: torch.Tensor) -> Any:
    value = value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).numpy()


def train(folder: Path, world: dict[str, Any], kind: str, rank: int, life: int) -> None:
    size, process = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    model = cut(kind, net(), size)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    parts = batches(kind, size)
    part = process * parts // size
    with DiLoCo(model, inner, **{"sync_every": 3, **world["options"]}) as diloco:
        (folder / f"begun.{rank}.{life}").touch()
        others = world.get("only", range(len(world["replicas"])))
        while not life and not all((folder / f"begun.{r}.0").exists() for r in others):
            time.sleep(0.02)
        if "data" in world:
            trained = []
            for indices in diloco.data(world["data"], batch=2, part=(part, parts)):
                x = torch.tensor([[float(at)] * 6 for at in indices]) / 100
                nn.functional.mse_loss(model(x), x[:, :2] * 0.5).backward()
                inner.step()
                inner.zero_grad()
                trained += indices
            report = diloco.data_report()
            uses = [[use.rank, use.ranges] for use in report.rounds]
            note = folder / f"data.{rank}.{part}.{process}"
            note.write_text(json.dumps([trained, report.used, uses]))
        digests = {diloco.round: digest(diloco)}
        goal = max(world["rounds"], diloco.round + 3 if life else 0)
        while is_needed(folder, world, rank, life) or diloco.round < goal:
            if not life and [rank, process, diloco.steps] in world.get("deaths", []):
                os._exit(9)
            dice = torch.Generator().manual_seed(1000 * rank + diloco.round * 97 + diloco.steps)
            x = torch.randn(BATCH, 6, generator=dice).chunk(parts)[part]
            nn.functional.mse_loss(model(x), x[:, :2] * 0.5).backward()
            inner.step()
            inner.zero_grad()
            if diloco.round not in digests:
                digests[diloco.round] = digest(diloco)
                # A process may be killed while it writes.
                note = folder / f"writing.{rank}.{process}.{life}"
                note.write_text(json.dumps(digests))
                note.replace(folder / f"digests.{rank}.{process}.{life}")
        agreed = diloco.global_parameters()
        manifests = [[report.round, *report.members] for report in diloco.reports]
        up = [report.bytes_up for report in diloco.reports]
    own = {f"own.{n.removeprefix('module.')}": complete(v) for n, v in model.named_parameters()}
    facts = {"manifests": json.dumps(manifests), "up": np.array(up), "lives": np.array(life + 1)}
    file = folder / f"{rank}.{process}"
    np.savez(file, **agreed, **own, **facts)


def kills_of(world: dict[str, Any], rank: int) -> int:
    """How often a process of the replica is killed: in each of its first lives."""
    return world.get("kills", 0) // max(1, len(world["replicas"]) - 1) if rank else 0


def is_needed(folder: Path, world: dict[str, Any], rank: int, life: int) -> bool:
    """Whether a replica goes on after its rounds: until it is killed, or the killed ones are done.

    All processes of a replica must see the same, so only replica 0, of one process, goes by files.
    """
    if not life and any(death[0] == rank for death in world.get("deaths", [])):
        return True  # rounds may have gone on without it: its step is still to come
    if rank:
        return life < kills_of(world, rank)
    others = range(1, len(world["replicas"])) if world.get("kills") else ()
    return not all((folder / f"killed.{other}").exists() for other in others)


def process_of(folder: Path, world: dict[str, Any], rank: int, life: int, process: int) -> None:
    lives = world["replicas"][rank]
    kind, text = lives[min(life, len(lives) - 1)].split(":")
    size = int(text)
    os.environ |= {
        "RANK": str(process),
        "WORLD_SIZE": text,
        "ATOLL_RANK": str(process if world.get("spans") else rank),
        "ATOLL_WORLD_MAX": str(len(world["replicas"])),
        "ATOLL_RENDEZVOUS_URI": f"file://{folder}/run",
    }
    if size > 1:
        store = f"file://{folder}/meet.{rank}.{life}"
        dist.init_process_group("gloo", init_method=store, rank=process, world_size=size)
    train(folder, world, kind, rank, life)
    if size > 1:
        dist.barrier()


def forked(work: Any) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def replica(folder: Path, world: dict[str, Any], rank: int) -> None:
    """Lives until all of its processes end well."""
    chance = random.Random(f"{world['name']}.{rank}")
    kills = kills_of(world, rank)
    lives, died = world["replicas"][rank], 0
    for life in count():
        assert life < kills + 5, f"replica {rank} fails again and again"
        size = int(lives[min(life, len(lives) - 1)].split(":")[1])
        run = partial(process_of, folder, world, rank, life)
        children = [forked(partial(run, process)) for process in range(size)]
        victim = chance.choice(children) if died < kills else None
        # Mostly while it trains; sometimes before, while it joins.
        begun = folder / f"begun.{rank}.{life}"
        moment = None if chance.random() < 0.8 else time.monotonic() + chance.uniform(0.1, 2.0)
        codes: dict[int, int] = {}
        while len(codes) < size and not any(codes.values()):
            child, status = os.waitpid(-1, os.WNOHANG)
            if child:
                codes[child] = os.waitstatus_to_exitcode(status)
            elif moment is None and begun.exists():
                moment = time.monotonic() + chance.uniform(0.0, 2.0)
            elif victim and moment and victim not in codes and time.monotonic() > moment:
                os.kill(victim, signal.SIGKILL)
                died, victim = died + 1, None
            else:
                time.sleep(0.01)
        if not any(codes.values()):
            break
        # The others of the replica fail on their own, but may take a while to see it.
        for child in set(children) - set(codes):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    (folder / f"killed.{rank}").write_text(str(died))


def main() -> None:
    torch.set_num_threads(1)
    for world in json.loads(sys.argv[2]):
        folder = Path(sys.argv[1]) / world["name"]
        folder.mkdir(exist_ok=True)
        ranks = world.get("only", range(len(world["replicas"])))
        children = [forked(partial(replica, folder, world, rank)) for rank in ranks]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert not any(codes), codes


if __name__ == "__main__":
    main()
