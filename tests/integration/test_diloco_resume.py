"""A run that goes on: with what is each replica's own, and saved as a model to load elsewhere."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.integration.test_diloco import world

from atoll.core.errors import ValidationError
from atoll.diloco import DiLoCo
from atoll.objectstore import ObjectStore

torch.set_num_threads(1)
KINDS: dict[str, Any] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 2)
    )


def train(model: torch.nn.Module, inner: torch.optim.Optimizer, steps: int) -> None:
    """With random numbers of all three kinds, as data, dropout and augmentation have them."""
    for _ in range(steps):
        x = torch.randn(8, 6) * random.random() * np.random.rand()
        torch.nn.functional.mse_loss(model(x), x[:, :2]).backward()
        inner.step()
        inner.zero_grad()


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def life(uri: str, steps: int, kind: str = "adamw", **more: Any) -> dict[str, Any]:
    """One process of a replica that trains so many steps and ends."""
    model = net()
    inner = KINDS[kind](model.parameters())
    seed(7)
    options = {"sync_every": 5, "uri": uri, "rank": 0, "world_size": 1, "run_id": "exp"}
    with DiLoCo(model, inner, **options | more) as diloco:
        began = diloco.step, diloco.restored_step, diloco.extras
        diloco.checkpoint(inner=True, extras=lambda: {"seen": diloco.step, "mean": torch.ones(2)})
        train(model, inner, steps)
        values = diloco.global_parameters()
    return {"began": began, "values": values, "warnings": diloco.warnings, "inner": inner}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_in_two_parts_has_the_bits_of_one_in_one_part(tmp_path: Path, kind: str) -> None:
    complete = life(f"{tmp_path}/whole", 20, kind)
    life(f"{tmp_path}/parts", 10, kind)
    second = life(f"{tmp_path}/parts", 10, kind)
    step, restored, extras = second["began"]
    assert (step, restored) == (10, 10)
    assert extras["seen"] == 10
    assert torch.equal(extras["mean"], torch.ones(2))
    for name, value in complete["values"].items():
        assert np.array_equal(value, second["values"][name]), name
    assert second["warnings"] == []


def test_without_a_copy_the_inner_optimiser_begins_again(tmp_path: Path) -> None:
    model = net()
    inner = KINDS["adamw"](model.parameters())
    options: dict[str, Any] = {"sync_every": 5, "uri": str(tmp_path), "rank": 0, "world_size": 1}
    with DiLoCo(model, inner, **options):
        train(model, inner, 5)
    model = net()
    inner = KINDS["adamw"](model.parameters())
    with DiLoCo(model, inner, **options) as again:
        assert (again.step, again.restored_step, again.extras) == (5, None, None)
        assert not inner.state
        assert again.warnings == []


def test_a_rank_without_a_copy_of_its_own_is_told(tmp_path: Path) -> None:
    life(str(tmp_path), 10)
    other = life(str(tmp_path), 0, rank=1, world_size=2, min_replicas=1)
    assert other["began"][1] is None
    (messages,) = [each for each in other["warnings"] if "starts over" in each]
    assert "rank 1" in messages
    assert "rank 1 has none" in messages


def test_a_copy_of_another_optimiser_is_left_alone_and_told(tmp_path: Path) -> None:
    life(str(tmp_path), 10)
    other = life(str(tmp_path), 0, "sgd")
    assert other["began"][1] is None
    (messages,) = other["warnings"]
    assert "its copy is of AdamW, not SGD" in messages
    assert not other["inner"].state


def test_a_damaged_copy_is_passed_over_for_the_one_before(tmp_path: Path) -> None:
    life(str(tmp_path), 10)
    store = ObjectStore.open(str(tmp_path))
    keys = [blob.key for blob in store.list("exp/inner")]
    assert len(keys) == 2
    store.put(keys[-1], bytes(store.get(keys[-1])[:-9]))
    assert life(str(tmp_path), 0)["began"][1] < 10


def test_copies_are_few(tmp_path: Path) -> None:
    model = net()
    inner = KINDS["adamw"](model.parameters())
    with DiLoCo(
        model, inner, sync_every=2, uri=str(tmp_path), rank=0, world_size=1, checkpoint_every=1
    ) as diloco:
        diloco.checkpoint(inner=True)
        train(model, inner, 12)
        copies = ObjectStore.open(str(tmp_path)).list("run/inner")
        assert len(copies) == 2
    assert "00000006.000000000012" in copies[-1].key


def test_the_learning_rate_after_a_resume_is_that_of_the_run(tmp_path: Path) -> None:
    def rates(steps: int) -> list[float]:
        model = net()
        inner = KINDS["adamw"](model.parameters())
        # Each rate is made from the one before.
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, 40)
        rates = []
        with DiLoCo(
            model,
            inner,
            sync_every=5,
            uri=str(tmp_path),
            rank=0,
            world_size=1,
            scheduler=schedule,
        ) as diloco:
            diloco.checkpoint(inner=True)
            for _ in range(steps):
                rates.append(inner.param_groups[0]["lr"])
                train(model, inner, 1)
        return rates

    both = rates(10) + rates(10)
    inner = KINDS["adamw"](net().parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, 40)
    for rate in both:
        assert rate == pytest.approx(inner.param_groups[0]["lr"], rel=1e-12)
        inner.step()
        schedule.step()


def test_what_cannot_be_kept_is_named(tmp_path: Path) -> None:
    model = net()
    inner = KINDS["adamw"](model.parameters())
    with DiLoCo(model, inner, sync_every=5) as alone:
        for _ in range(2):
            alone.checkpoint(inner=True)
        (messages,) = alone.warnings
        assert "there is no store" in messages
    with DiLoCo(model, inner, sync_every=5, uri=str(tmp_path), rank=0, world_size=1) as diloco:
        for extras in ({"model": model}, {"f": print}, [1]):
            with pytest.raises(ValidationError, match="extras"):
                diloco.checkpoint(inner=True, extras=extras)  # type: ignore[arg-type]
        with pytest.raises(ValidationError, match="extras.*inner=True"):
            diloco.checkpoint(extras={"a": 1})
    assert ObjectStore.open(str(tmp_path)).list("run/inner") == []


def test_a_state_of_the_optimiser_that_could_not_be_read_again_is_named(tmp_path: Path) -> None:
    model = net()
    inner = KINDS["adamw"](model.parameters())
    with DiLoCo(model, inner, sync_every=5, uri=str(tmp_path), rank=0, world_size=1) as diloco:
        train(model, inner, 1)
        for value in (print, deque([1]), np.ones(2), [{"a": object()}]):
            inner.state[model[0].weight]["odd"] = value
            with pytest.raises(ValidationError, match=r"inner_optimizer.*AdamW\['state'\]\[0\]"):
                diloco.checkpoint(inner=True)
        assert ObjectStore.open(str(tmp_path)).list("run/inner") == []
        del inner.state[model[0].weight]["odd"]


def test_numbers_of_numpy_in_an_optimiser_are_kept(tmp_path: Path) -> None:
    def train_a_round() -> Any:
        model = net()
        inner = KINDS["sgd"](model.parameters())
        inner.param_groups[0]["lr"] = np.float64(0.01) * np.cos(1)  # as a schedule may compute it
        inner.state["global"] = 5
        with DiLoCo(model, inner, sync_every=2, uri=str(tmp_path), rank=0, world_size=1) as diloco:
            diloco.checkpoint(inner=True)
            train(model, inner, 2)
        assert diloco.warnings == []
        return diloco.restored_step, inner.param_groups[0]["lr"], inner.state["global"]

    first, second = train_a_round(), train_a_round()
    assert (first[0], second[0]) == (None, 2)
    assert first[1:] == second[1:]


def test_a_checkpoint_at_any_time_is_one_of_the_last_round(tmp_path: Path) -> None:
    model = net()
    inner = KINDS["adamw"](model.parameters())
    store = ObjectStore.open(str(tmp_path))
    with DiLoCo(model, inner, sync_every=5, uri=str(tmp_path), rank=0, world_size=1) as diloco:
        train(model, inner, 17)
        assert [each.key[15:23] for each in store.list("run/checkpoint")] == ["00000000"]
        diloco.checkpoint()
        found = [each.key[15:23] for each in store.list("run/checkpoint")]
        assert found == ["00000000", "00000003"]
        values = diloco.global_parameters()
    model = net()
    with DiLoCo(
        model,
        KINDS["adamw"](model.parameters()),
        sync_every=5,
        uri=str(tmp_path),
        rank=0,
        world_size=1,
    ) as again:
        assert (again.round, again.step) == (3, 15)
        for name, value in again.global_parameters().items():
            assert np.array_equal(value, values[name])


class Tied(torch.nn.Module):
    """Tied weights, a buffer, a frozen parameter and one in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = torch.nn.Linear(4, 4, bias=False)
        self.outside = torch.nn.Linear(4, 4, bias=False)
        self.outside.weight = self.inside.weight
        self.norm = torch.nn.BatchNorm1d(4)
        self.small = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.frozen = torch.nn.Parameter(torch.full((3,), 5.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.outside(self.inside(x))) * self.small.float() + self.frozen.sum()


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("target", ["model.safetensors", "folder", "many", "uri"])
def test_the_model_is_loaded_by_plain_safetensors(
    tmp_path: Path, target: str, fragments: int
) -> None:
    path = tmp_path / target
    uri = path.as_uri() if target == "uri" else str(path)

    def replica(rank: int) -> Any:
        torch.manual_seed(0)
        model = Tied()
        inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        with DiLoCo(
            model,
            inner,
            sync_every=2,
            fragments=fragments,
            uri=str(tmp_path / "store"),
            rank=rank,
            world_size=2,
            timeout=60,
        ) as diloco:
            for step in range(5):
                x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * rank + step))
                model(x).square().mean().backward()
                inner.step()
                inner.zero_grad()
            diloco.sync()
        state = diloco.global_state_dict()
        if rank == 0:
            diloco.save(uri, file_bytes=40 if target == "many" else 1 << 30)
        return state

    state, other = world(2, replica)
    for name in ("inside.weight", "small"):
        assert torch.equal(state[name], other[name])
    files = [path] if path.suffix else sorted(path.glob("*.safetensors"))
    assert (len(files) > 1) == (target == "many")
    loaded = {name: value for file in files for name, value in load_file(file).items()}
    model = Tied()
    model.load_state_dict(loaded)  # nothing is missing, nothing is there that does not belong
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name]), name
        assert value.dtype == state[name].dtype
    assert float(loaded["frozen"].sum()) == 15
    with safe_open(files[0], "pt") as file:
        messages = file.metadata()
    assert (messages["format"], messages["atoll.round"], messages["atoll.main"]) == (
        "pt",
        "3",
        "run",
    )
    if target == "many":
        assert (path / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("target", ["", "model.pt", "ftp://x/y", 5])
def test_a_target_that_cannot_be_is_named(target: Any) -> None:
    model = net()
    with (
        DiLoCo(model, KINDS["adamw"](model.parameters()), sync_every=5) as diloco,
        pytest.raises(ValidationError, match="target|uri"),
    ):
        diloco.save(target)


def test_a_run_that_goes_on_in_a_smaller_world_does_not_wait_for_ranks_that_cannot_come(
    tmp_path: Path,
) -> None:
    def replica(rank: int, size: int) -> Any:
        model = net()
        inner = KINDS["sgd"](model.parameters())
        # Who waits for a straggler waits longer than this test may take.
        options: dict[str, Any] = {"min_replicas": 1, "timeout": 4000, "grace_s": 2000}
        with DiLoCo(
            model, inner, sync_every=5, uri=str(tmp_path), rank=rank, world_size=size, **options
        ) as diloco:
            train(model, inner, 5)
        return diloco.round, diloco.reports[-1].members

    assert world(3, lambda rank: replica(rank, 3)) == [(1, (0, 1, 2))] * 3
    assert replica(0, 1) == (2, (0,))
