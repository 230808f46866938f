from __future__ import annotations

import io

import torch
from torch.optim.lr_scheduler import LambdaLR

from atoll.diloco.schedule import RunSchedule


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
