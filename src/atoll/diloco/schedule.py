"""A learning rate schedule that follows the step of the run, not that of the process.

A replica that starts again, or joins late, has the learning rate of its peers from its first step.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

from atoll.core.errors import ValidationError


class RunSchedule:
    """Drives a scheduler of torch. Calls of its `step()` by the script do nothing."""

    def __init__(self, scheduler: Any, optimizers: Sequence[Any]) -> None:
        """Raises ValidationError for a scheduler of another optimiser, or one that needs more."""
        scheduler = _inside(scheduler)
        if not hasattr(scheduler, "last_epoch") or not hasattr(scheduler, "optimizer"):
            raise ValidationError(
                "scheduler", type(scheduler).__name__, "expected one of torch.optim.lr_scheduler"
            )
        if type(scheduler).__name__ == "ReduceLROnPlateau":
            raise ValidationError(
                "scheduler",
                type(scheduler).__name__,
                "expected one that follows steps: the loss of a replica is not that of the run",
            )
        if not any(scheduler.optimizer is each for each in optimizers):
            raise ValidationError(
                "scheduler",
                type(scheduler).__name__,
                "expected a schedule of the inner optimiser: it belongs to another optimiser",
            )
        self._scheduler = scheduler
        self._kind = kind = type(scheduler)
        self._first = (copy.deepcopy(scheduler.state_dict()), self._rates())
        # Not an attribute of it: that would be in its `state_dict()`.
        scheduler.__class__ = type(kind.__name__, (kind,), {"step": _nothing})

    def follow(self, step: int) -> None:
        """The learning rates are those of `step` of the run."""
        if self._scheduler.last_epoch > step:
            state, rates = self._first
            self._scheduler.load_state_dict(copy.deepcopy(state))
            for group, rate in zip(self._scheduler.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it steps before the optimiser does
            while self._scheduler.last_epoch < step:
                self._kind.step(self._scheduler)

    def close(self) -> None:
        self._scheduler.__class__ = self._kind

    def _rates(self) -> list[Any]:
        return [copy.copy(group["lr"]) for group in self._scheduler.optimizer.param_groups]


def _inside(scheduler: Any) -> Any:
    """The scheduler of torch in what Accelerate, or another, puts around it."""
    while hasattr(scheduler, "scheduler") and not hasattr(scheduler, "last_epoch"):
        scheduler = scheduler.scheduler
    return scheduler


def _nothing(*_: Any, **__: Any) -> None:
    return None
