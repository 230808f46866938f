from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from atoll.core.errors import ValidationError
from atoll.diloco import DiLoCo
from atoll.diloco.inner import RunSchedule, unwrap_optimizers


class AcceleratedOptimizer(torch.optim.Optimizer):
    """As that of Accelerate: an optimiser around another."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


class LightningLike:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer


def step(model: torch.nn.Module, *optimizers: Any) -> None:
    model(torch.ones(1, 2)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def test_optimisers_with_others_around_them_drive_the_rounds() -> None:
    model = torch.nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    around = AcceleratedOptimizer(AcceleratedOptimizer(sgd))
    assert unwrap_optimizers(around) == [sgd] == unwrap_optimizers(LightningLike(sgd))
    with DiLoCo(model, around, sync_every=2) as diloco:
        for _ in range(4):
            step(model, around)
    assert (diloco.steps, diloco.round) == (4, 2)


def test_a_step_of_several_optimisers_counts_when_all_have_stepped() -> None:
    model = torch.nn.Linear(2, 2)
    two = [torch.optim.SGD([each], lr=0.1) for each in model.parameters()]
    with DiLoCo(model, two, sync_every=1) as diloco:
        step(model, two[0])
        assert diloco.steps == 0
        step(model, two[1])
        assert (diloco.steps, diloco.round) == (1, 1)
        step(model, *two)
        assert diloco.steps == 2


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda _: torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1), "of this model"),
        (
            lambda m: [
                torch.optim.SGD(m.parameters(), 0.1),
                torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), 0.1),
            ],
            "of this model",
        ),
        (lambda _: [], "at least one"),
        (lambda _: "adam", "of torch.optim"),
        (lambda m: [torch.optim.SGD(m.parameters(), 0.1)] * 2, "twice"),
    ],
)
def test_an_optimiser_that_does_not_train_the_model_is_refused(
    optimizer: Any, message: str
) -> None:
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValidationError, match=f"inner_optimizer.*{message}"):
        DiLoCo(model, optimizer(model), sync_every=1)


def test_parameters_that_nobody_trains_or_synchronises_are_told_of() -> None:
    model, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD([model.weight, *head.parameters()], 0.1)
    with DiLoCo(model, optimizer, sync_every=1) as diloco:
        assert "no inner optimiser trains bias" in diloco.warnings[0]
        assert "2 parameters of the inner optimiser are not in the model" in diloco.warnings[1]


def made(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, DiLoCo]:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return inner, DiLoCo(model, inner, sync_every=1)


def test_an_optimiser_made_anew_is_refused_with_its_first_step() -> None:
    model = torch.nn.Linear(2, 2)
    inner, diloco = made(model)
    with diloco:
        step(model, inner)
        other = torch.optim.AdamW(model.parameters(), lr=0.1)
        with pytest.raises(ValidationError, match=r"another AdamW.*Make DiLoCo after it"):
            step(model, other)
        stranger = torch.nn.Linear(2, 2)
        step(stranger, torch.optim.AdamW(stranger.parameters(), lr=0.1))  # of another model
    step(model, other)  # and once DiLoCo is closed


def add_layer(model: torch.nn.Module) -> None:
    model.extra = torch.nn.Linear(2, 2)


def replace_parameter(model: torch.nn.Module) -> None:
    model.weight = torch.nn.Parameter(torch.zeros(2, 2))


def unfreeze(model: torch.nn.Module) -> None:
    model.cold.requires_grad_(True)


def test_a_loop_is_made_and_closed_while_an_optimiser_steps() -> None:
    """Threads do so at any time, and torch walks through its hooks meanwhile."""
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    DiLoCo(model, inner, sync_every=1).close()
    made: list[int] = []

    def hook(*_: Any) -> None:
        with DiLoCo(model, inner, sync_every=1) as loop:
            made.append(loop.round)

    handles = [register_optimizer_step_post_hook(hook) for _ in range(2)]
    try:
        torch.optim.SGD(other.parameters(), lr=0.1).step()
    finally:
        for handle in handles:
            handle.remove()
    assert made == [0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (add_layer, "extra.weight is trained, and was not when DiLoCo was made"),
        (replace_parameter, "weight is another parameter than when DiLoCo was made"),
        (unfreeze, "cold is trained, and was not when DiLoCo was made"),
    ],
)
def test_a_model_that_changed_is_refused_at_the_next_round(change: Any, message: str) -> None:
    model = torch.nn.Linear(2, 2)
    model.cold = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    inner, diloco = made(model)
    step(model, inner)
    change(model)
    with pytest.raises(ValidationError, match=f"model: .*{message}"):
        step(model, inner)
    diloco.close()


def test_a_parameter_that_is_frozen_meanwhile_stays_in_the_rounds() -> None:
    model = torch.nn.Linear(2, 2)
    inner, diloco = made(model)
    with diloco:
        step(model, inner)
        model.bias.requires_grad_(False)
        step(model, inner)
    assert diloco.round == 2


def test_parameters_that_an_optimiser_no_longer_trains_are_told_of() -> None:
    model = torch.nn.Linear(2, 2)
    inner, diloco = made(model)
    with diloco:
        step(model, inner)
        inner.param_groups[0]["params"] = [model.weight]
        step(model, inner)
        assert any("no inner optimiser trains bias" in each for each in diloco.warnings)
        inner.param_groups[0]["params"] = []
        with pytest.raises(ValidationError, match="optimiser of this model"):
            inner.step()


def scheduled() -> LambdaLR:
    inner = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=1.0)
    return LambdaLR(inner, lambda step: 1 / (1 + step))


def test_a_schedule_that_follows_the_run_is_saved_and_loaded_as_any() -> None:
    scheduler = scheduled()
    run = RunSchedule(scheduler, [scheduler.optimizer])
    run.follow(3)
    scheduler.step()  # by the script: nothing
    file = io.BytesIO()
    torch.save(scheduler.state_dict(), file)
    file.seek(0)
    saved = torch.load(file)
    assert saved["last_epoch"] == 3

    other = scheduled()
    other.load_state_dict(saved)
    other.optimizer.step()
    other.step()
    assert other.get_last_lr() == [1 / 5]
    run.close()
    assert "step" not in scheduler.state_dict()
    scheduler.step()
    assert scheduler.get_last_lr() == [1 / 5]
