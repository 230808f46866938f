"""Replicas of several processes: saved as one model, and their inner optimisers restored."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tests.integration.group_world import net
from tests.support.forked import run_forked

from atoll.core.errors import NotFound
from atoll.diloco import DiLoCo, StoreReader, StoreWriter
from atoll.objectstore import ObjectStore

SCRIPT = Path(__file__).with_name("saved_world.py")
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    done = run_forked([str(SCRIPT), str(folder)], os.environ, 280)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def read(path: Path) -> Any:
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp"])
def test_the_saved_model_is_whole_and_the_inner_state_is_restored(worlds: Path, kind: str) -> None:
    folder = worlds / kind
    first, again = read(folder / "state.pt"), read(folder / "again.pt")
    saved, model = load_file(folder / "model.safetensors"), net(seed=5)
    model.load_state_dict(saved)
    for name, value in model.state_dict().items():
        assert torch.equal(value, first["state"][name])

    assert again["warnings"] == []
    assert (again["step"], again["extras"]) == (6, {"process": 0})
    assert torch.equal(again["dice"], first["dice"])
    for one, other in zip(first["moments"], again["moments"], strict=True):
        assert set(one) == set(other) >= {"exp_avg", "exp_avg_sq"}
        for name, value in one.items():
            assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp"])
def test_a_checkpoint_of_torch_in_the_store_is_read_by_one_process(worlds: Path, kind: str) -> None:
    state = {"model": net(seed=5).state_dict()}
    dcp.load(state, storage_reader=StoreReader(worlds / kind / "dcp"), no_dist=True)
    first = read(worlds / kind / "state.pt")["state"]
    for name, value in state["model"].items():
        assert torch.equal(value, first[name]), name


def test_a_copy_of_other_processes_is_told_of(worlds: Path) -> None:
    model = net()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    uri = str(worlds / "fsdp" / "store")
    with DiLoCo(model, inner, sync_every=3, uri=uri, rank=0, world_size=1) as diloco:
        (messages,) = diloco.warnings
        assert "its copy is of 2 processes, not 1" in messages
        assert diloco.restored_step is None


def test_any_store_takes_checkpoints_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.diloco.dcp.OBJECT_BYTES", 100)  # several objects
    model = net()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(1, 6)).sum().backward()
    inner.step()
    uri = "memory://checkpoint-of-torch"
    state = {"model": model.state_dict(), "inner": inner.state_dict(), "step": 7, "words": "x"}
    for _ in range(2):  # the second one replaces the first
        dcp.save(state, storage_writer=StoreWriter(uri), no_dist=True)
    objects = [blob.key for blob in ObjectStore.open(uri).list("")]
    assert len({key.partition("/")[0] for key in objects}) == 2  # the metadata, and one process
    assert len(objects) > 4

    other = net(seed=5)
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    other(torch.ones(1, 6)).sum().backward()
    fresh.step()
    into = {"model": other.state_dict(), "inner": fresh.state_dict(), "step": 0, "words": ""}
    dcp.load(into, storage_reader=StoreReader(uri), no_dist=True)
    assert (into["step"], into["words"]) == (7, "x")
    for name, value in state["model"].items():
        assert torch.equal(value, into["model"][name])
    for at, values in state["inner"]["state"].items():
        assert torch.equal(values["exp_avg"], into["inner"]["state"][at]["exp_avg"])


def test_a_checkpoint_that_is_not_there_is_named() -> None:
    with pytest.raises((NotFound, dcp.CheckpointException), match="memory://nothing-here"):
        dcp.load({"x": 1}, storage_reader=StoreReader("memory://nothing-here"), no_dist=True)
