"""Processes of one trainer publish together: FSDP2 over gloo, one that fails, one that dies."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from atoll.weights import Follower

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from atoll.core.errors import Temporary
from atoll.weights import Publisher

uri, what = sys.argv[1:3]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(5)])
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
publisher = Publisher(uri, full_every=3, keep=0, process_group=dist.group.WORLD)
for step in range(6):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(step)
    if what == "fails" and step == 2 and rank == 1:
        put, store = publisher._driver.store.put, publisher._driver.store
        def fail(*arguments, **options):
            raise Temporary("no answer")
        store.put = fail
    if what == "dies" and step == 2 and rank == 1:
        publisher._driver.store.put = lambda *arguments, **options: os._exit(9)
    try:
        version = publisher.publish(model.named_parameters(), step=step)
        print(rank, "published", version.number, version.step, flush=True)
    except Temporary:
        print(rank, "temporary", step, flush=True)
        if rank == 1:
            store.put = put
publisher.close()
dist.barrier()
# A thread of gloo that wants the GIL while Python ends aborts the process, which is torch's race.
os._exit(0)
"""


def run_group(uri: str, what: str) -> list[subprocess.CompletedProcess[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        env = {
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": str(ROOT / "src"),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, "-c", SCRIPT, uri, what]
        processes.append(
            subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    done = []
    for process in processes:
        out, err = process.communicate(timeout=200)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return done


def expected(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(5)])
    with torch.no_grad():
        for parameter in model.parameters():
            for each in range(step + 1):
                parameter.add_(each)
    return {name: each.detach() for name, each in model.named_parameters()}


def assert_is(follower: Follower, step: int) -> None:
    tensors = follower.tensors()
    assert tensors.keys() == expected(step).keys()
    for name, tensor in expected(step).items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.timeout(250)
@pytest.mark.parametrize("what", ["works", "fails"])
def test_all_bases_move_or_none(tmp_path: Path, what: str) -> None:
    results = run_group(f"file://{tmp_path}/a", what)
    for each in results:
        assert each.returncode == 0, each.stderr[-3000:]
    lines = [each.stdout.replace(f"{rank} ", "") for rank, each in enumerate(results)]
    assert lines[0] == lines[1]
    assert lines[0].count("temporary") == (what == "fails")
    with Follower(tmp_path / "a") as follower:
        version = follower.next()
        assert version is not None
        assert version.step == 5
        assert_is(follower, 5)
        path = Path(follower.write(tmp_path / "out"))
        assert (path / "model.safetensors").exists()


@pytest.mark.timeout(250)
def test_a_process_that_dies_in_the_middle_leaves_no_torn_version(tmp_path: Path) -> None:
    results = run_group(f"file://{tmp_path}/a", "dies")
    assert results[1].returncode == 9
    assert results[0].returncode not in (0, 9)
    with Follower(tmp_path / "a") as follower:
        version = follower.next()
        assert version is not None
        assert version.step == 1
        assert_is(follower, 1)
    for each in run_group(f"file://{tmp_path}/a", "works"):
        assert each.returncode == 0, each.stderr[-3000:]
    with Follower(tmp_path / "a") as follower:
        assert follower.next()
        assert_is(follower, 5)
