from __future__ import annotations

from typing import Any

import pytest
import torch

from atoll.core.errors import ValidationError
from atoll.diloco import DiLoCo
from atoll.diloco.inner import check_scheduler, unwrap_optimizers


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


def test_a_schedule_of_another_optimiser_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    one, other = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))
    schedule = torch.optim.lr_scheduler.LambdaLR(other, lambda step: 1.0)
    check_scheduler(schedule, [other])
    with pytest.raises(ValidationError, match="scheduler: 'LambdaLR of another SGD'"):
        check_scheduler(schedule, [one])
