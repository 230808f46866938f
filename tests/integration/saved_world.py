"""A replica of two gloo processes that trains, is saved, and comes again; forked from one Python.

    python saved_world.py FOLDER

For each KIND of DDP, FSDP2 and tensor parallel in FOLDER/KIND: `model.safetensors` and `dcp` of the
first life, `state.pt` as process 0 sees it, and `again.pt`: what the second life begins with.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.integration.group_world import cut, net
from torch import nn

from atoll.diloco import DiLoCo, StoreReader, StoreWriter

KINDS = ("ddp", "fsdp", "tp")


def complete(value: Any) -> Any:
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def moments(inner: torch.optim.Optimizer) -> list[dict[str, Any]]:
    values = [inner.state[p] for group in inner.param_groups for p in group["params"]]
    return [{name: complete(value) for name, value in each.items()} for each in values]


def life(folder: Path, kind: str, number: int) -> None:
    process = dist.get_rank()
    model = cut(kind, net(), 2)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(100 + process)
    config: dict[str, Any] = {"uri": str(folder / "store"), "rank": 0, "world_size": 1}
    with DiLoCo(model, inner, sync_every=3, **config) as diloco:
        if number:
            facts = {"moments": moments(inner), "extras": diloco.extras, "dice": torch.rand(2)}
            facts |= {"step": diloco.restored_step, "warnings": list(diloco.warnings)}
            if process == 0:
                torch.save(facts, folder / "again.pt")
        diloco.checkpoint(inner=True, extras={"process": process})
        for _ in range(6):
            x = torch.ones(4, 6) if kind == "tp" else torch.randn(4, 6)
            nn.functional.mse_loss(model(x), x[:, :2] * 0.5).backward()
            inner.step()
            inner.zero_grad()
        if not number:
            diloco.save(folder / "model.safetensors")
            state = diloco.global_state_dict()
            keys = getattr(model, "module", model).state_dict()
            dcp.save({"model": keys}, storage_writer=StoreWriter((folder / "dcp").as_uri()))
            target = {name: torch.zeros_like(value) for name, value in keys.items()}
            dcp.load({"model": target}, storage_reader=StoreReader((folder / "dcp").as_uri()))
            same = [torch.equal(complete(target[name]), complete(keys[name])) for name in keys]
            assert all(same), same
    facts = {"moments": moments(inner), "dice": torch.rand(2)}
    if process == 0 and not number:
        torch.save({"state": state, **facts}, folder / "state.pt")


def process_of(folder: Path, kind: str, number: int, process: int) -> None:
    store = f"file://{folder}/meet.{number}"
    dist.init_process_group("gloo", init_method=store, rank=process, world_size=2)
    life(folder, kind, number)
    dist.barrier()


def forked(*arguments: Any) -> int:
    child = os.fork()
    if child == 0:
        try:
            process_of(*arguments)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def main() -> None:
    torch.set_num_threads(1)
    for kind in KINDS:
        folder = Path(sys.argv[1]) / kind
        folder.mkdir()
        for number in (0, 1):
            children = [forked(folder, kind, number, process) for process in (0, 1)]
            codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
            assert not any(codes), (kind, number, codes)


if __name__ == "__main__":
    main()
