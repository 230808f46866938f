from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from atoll.core.errors import ValidationError
from atoll.integrations.session import Session, TrainerCallbacks, set_schedule


def rate(scheduler: Any) -> float:
    return float(scheduler.optimizer.param_groups[0]["lr"])


def inner() -> torch.optim.Optimizer:
    return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=1.0)


SCHEDULES = [
    lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    lambda optimizer: CosineAnnealingLR(optimizer, 20),
]


@pytest.mark.parametrize("make", SCHEDULES)
def test_a_schedule_is_set_to_the_step_of_the_run(make: Any) -> None:
    walked = make(inner())
    for _ in range(7):
        walked.optimizer.step()
        walked.step()
    jumped = make(inner())
    set_schedule(jumped, 7)
    assert rate(jumped) == rate(walked)


def test_a_schedule_of_lambdas_is_set_back_too() -> None:
    scheduler = SCHEDULES[0](inner())
    set_schedule(scheduler, 9)
    set_schedule(scheduler, 3)
    assert rate(scheduler) == 1 / 4


def test_a_schedule_by_metrics_is_left_alone() -> None:
    scheduler = ReduceLROnPlateau(inner())
    set_schedule(scheduler, 5)
    assert rate(scheduler) == 1.0


def session(done: int = 0, max_steps: int = -1, **ends: int) -> tuple[Session, Any, Any]:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = DataLoader(range(8))  # type: ignore[arg-type]
    callback = TrainerCallbacks(**ends, sync_every=2)
    made = Session(callback, model, [optimizer], [schedule], loader, done=done, max_steps=max_steps)
    return made, optimizer, schedule


def test_the_step_is_counted_from_the_checkpoint_of_a_new_run() -> None:
    training, optimizer, schedule = session(done=10)
    assert training.step == 10
    assert rate(schedule) == 1 / 11
    for _ in range(3):
        optimizer.step()
        schedule.step()
        training.follow()
    assert training.step == 13
    assert rate(schedule) == 1 / 14
    training.diloco.sync()
    training.close()


@pytest.mark.parametrize(
    ("ends", "max_steps", "steps"), [({"rounds": 2}, -1, 4), ({}, 3, 3), ({"rounds": 5}, 3, 3)]
)
def test_it_is_over_by_rounds_or_by_steps(ends: dict[str, int], max_steps: int, steps: int) -> None:
    training, optimizer, _ = session(max_steps=max_steps, **ends)
    count = 0
    while not training.is_over:
        optimizer.step()
        count += 1
    assert count == steps
    training.close()  # and says nothing of steps that were not synchronised
    assert training.diloco.warnings == []


@pytest.mark.parametrize(
    ("ends", "own_data", "seed", "field"),
    [
        ({"rounds": 0}, True, 0, "rounds"),
        ({"epochs": 1.5}, True, 0, "epochs"),
        ({"epochs": 2}, False, 0, "own_data=True"),
        ({"tokens": -1}, True, 0, "tokens"),
        ({}, True, -1, "data_seed"),
    ],
)
def test_bad_input_is_named_before_a_training_begins(
    ends: dict[str, Any], own_data: bool, seed: int, field: str
) -> None:
    with pytest.raises(ValidationError, match=field):
        TrainerCallbacks(**ends, own_data=own_data, data_seed=seed, sync_every=2)
