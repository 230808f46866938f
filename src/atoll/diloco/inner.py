"""The inner optimisers of a replica: which they are, whether they train this model, their steps and
their learning rates."""

from __future__ import annotations

import copy
import logging
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atoll.core.errors import ValidationError

if TYPE_CHECKING:
    import torch

log = logging.getLogger("atoll.diloco")

_WRAPPED = ("optimizer", "_optimizer")  # where Accelerate, Lightning and others keep the real one


def unwrap_optimizers(overrides: Any) -> list[torch.optim.Optimizer]:
    """The optimisers of torch in `overrides`: one, or several, each without what is around it.

    Raises ValidationError for anything that is not one.
    """
    import torch

    many = overrides if isinstance(overrides, list | tuple) else [overrides]
    if not many:
        raise ValidationError("inner_optimizer", overrides, "expected at least one optimiser")
    optimizers: list[torch.optim.Optimizer] = []
    for each in many:
        inner = each
        while (inside := _inside(inner)) is not None:
            inner = inside
        if not isinstance(inner, torch.optim.Optimizer):
            raise ValidationError(
                "inner_optimizer", type(each).__name__, "expected an optimiser of torch.optim"
            )
        if any(inner is other for other in optimizers):
            raise ValidationError("inner_optimizer", type(each).__name__, "it is there twice")
        optimizers.append(inner)
    return optimizers


def _inside(optimizer: Any) -> Any:
    import torch

    values = (getattr(optimizer, name, None) for name in _WRAPPED)
    return next((value for value in values if isinstance(value, torch.optim.Optimizer)), None)


def check_optimizers(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, torch.Tensor]
) -> list[str]:
    """What is odd about the optimisers of a model with these trained parameters, in sentences.

    Raises ValidationError for one that trains nothing of the model: its steps would drive rounds in
    which nothing moves.
    """
    names = {id(value): name for name, value in parameters.items()}
    trained: set[int] = set()
    foreign = 0
    for optimizer in optimizers:
        ids = [id(value) for group in optimizer.param_groups for value in group["params"]]
        own = [each for each in ids if each in names]
        if not own:
            raise ValidationError(
                "inner_optimizer",
                f"{type(optimizer).__name__} with {len(ids)} parameters",
                "expected an optimiser of this model: none of them is one of its trained "
                "parameters (make it from model.parameters(), after the model was wrapped)",
            )
        trained.update(own)
        foreign += len(ids) - len(own)
    messages = []
    idle = [name for each, name in names.items() if each not in trained]
    if idle:
        messages.append(f"no inner optimiser trains {few(idle)}: the run keeps their first values")
    if foreign:
        messages.append(
            f"{foreign} parameters of the inner optimiser are not in the model, or not trained: "
            "they are not synchronised"
        )
    return messages


def forget_bad(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """For how many parameters an optimiser starts anew, as its state of them was not finite."""
    count = 0
    for optimizer in optimizers:
        for parameter, state in list(optimizer.state.items()):
            if not all(_is_finite(value) for value in state.values()):
                del optimizer.state[parameter]
                count += 1
    return count


def _is_finite(value: Any) -> bool:
    import torch

    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return True
    local = value.to_local() if hasattr(value, "to_local") else value
    return bool(torch.isfinite(local).all())


def few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


class OptimizerWatch:
    """Calls `after` when every optimiser has stepped, and knows when they are not those it began
    with.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Mapping[str, torch.Tensor],
        after: Callable[[], None],
    ) -> None:
        self._optimizers, self._parameters, self._after = optimizers, parameters, after
        self._stepped: set[int] = set()
        self._groups = self._read_groups()
        self._strangers: dict[int, bool] = {}  # whether an optimiser, by its id, trains this model
        self._hooks = [
            optimizer.register_step_post_hook(lambda *_, at=at: self._note(at))
            for at, optimizer in enumerate(optimizers)
        ]
        _watches.add(self)

    def find_changes(self) -> list[str]:
        """What is odd about the optimisers if they train other parameters than before.

        Raises ValidationError if one of them trains nothing of the model any more.
        """
        groups = self._read_groups()
        if groups == self._groups:
            return []
        self._groups = groups
        return check_optimizers(self._optimizers, self._parameters)

    def _read_groups(self) -> list[tuple[int, ...]]:
        return [
            tuple(map(id, group["params"]))
            for optimizer in self._optimizers
            for group in optimizer.param_groups
        ]

    def _note(self, at: int) -> None:
        self._stepped.add(at)
        if len(self._stepped) == len(self._optimizers):
            self._stepped.clear()
            self._after()

    def note_any(self, optimizer: Any) -> None:
        """Raises ValidationError if an optimiser that nobody told of trains the model."""
        if any(optimizer is each for each in self._optimizers):
            return
        if id(optimizer) not in self._strangers:
            known = set(map(id, self._parameters.values()))
            trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
            inner = optimizer
            while (inside := _inside(inner)) is not None:
                inner = inside
            is_wrapper = any(inner is each for each in self._optimizers)
            self._strangers[id(optimizer)] = bool(known & trained) and not is_wrapper
        if self._strangers[id(optimizer)]:
            raise ValidationError(
                "inner_optimizer",
                f"another {type(optimizer).__name__}",
                "expected the steps of the optimiser that DiLoCo was made with: this one trains "
                "its model, and its steps would be in no round. Make DiLoCo after it",
            )

    def close(self) -> None:
        _watches.discard(self)
        for hook in self._hooks:
            hook.remove()


class _Watches:
    """All watches of this process behind one hook on every optimiser's steps.

    The hook stays: another thread may step an optimiser while one is added or removed, and torch
    walks through its hooks without a lock.
    """

    def __init__(self) -> None:
        self._all: tuple[OptimizerWatch, ...] = ()
        self._lock = threading.Lock()
        self._is_hooked = False

    def add(self, watch: OptimizerWatch) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        with self._lock:
            self._all = (*self._all, watch)
            if not self._is_hooked:
                register_optimizer_step_post_hook(self._note)
                self._is_hooked = True

    def discard(self, watch: OptimizerWatch) -> None:
        with self._lock:
            self._all = tuple(each for each in self._all if each is not watch)

    def _note(self, optimizer: Any, *_: Any) -> None:
        for watch in self._all:
            watch.note_any(optimizer)


_watches = _Watches()


class RunSchedule:
    """Drives a scheduler of torch by the step of the run, not that of the process: a replica that
    starts again, or joins late, has the learning rate of its peers from its first step.

    Calls of its `step()` by the script do nothing.
    """

    def __init__(self, scheduler: Any, optimizers: Sequence[Any]) -> None:
        """Raises ValidationError for a scheduler of another optimiser, or one that needs more."""
        scheduler = _scheduler_of(scheduler)
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


def _scheduler_of(scheduler: Any) -> Any:
    """The scheduler of torch in what Accelerate, or another, puts around it."""
    while hasattr(scheduler, "scheduler") and not hasattr(scheduler, "last_epoch"):
        scheduler = scheduler.scheduler
    return scheduler


def _nothing(*_: Any, **__: Any) -> None:
    return None
