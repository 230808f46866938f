"""The inner optimisers of a replica: which they are, whether they train this model, their steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atoll.core.errors import ValidationError

if TYPE_CHECKING:
    import torch

log = logging.getLogger("atoll.diloco")

_WRAPPED = ("optimizer", "_optimizer")  # where Accelerate, Lightning and others keep the real one


def unwrap_optimizers(overrides: Any) -> list[torch.optim.Optimizer]:
    """The optimisers of torch in `given`: one, or several, each without what is around it.

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
        messages.append(f"no inner optimiser trains {_few(idle)}: the run keeps their first values")
    if foreign:
        messages.append(
            f"{foreign} parameters of the inner optimiser are not in the model, or not trained: "
            "they are not synchronised"
        )
    return messages


def check_scheduler(scheduler: Any, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises ValidationError for a schedule of an optimiser that is not one of these."""
    while (inside := getattr(scheduler, "scheduler", None)) is not None:
        scheduler = inside
    owner = getattr(scheduler, "optimizer", None)
    while owner is not None and (inner := _inside(owner)) is not None:
        owner = inner
    if not any(owner is each for each in optimizers):
        kind = type(owner).__name__ if owner is not None else "no optimiser"
        raise ValidationError(
            "scheduler",
            f"{type(scheduler).__name__} of another {kind}",
            "expected a schedule of the inner optimiser that DiLoCo was given",
        )


def forget_bad(optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """For how many parameters an optimiser begins again, as its state of them was not finite."""
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


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


class StepCount:
    """Calls `before` when the first one begins, `after` when every optimiser has stepped."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        before: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        self._stepped: set[int] = set()
        self._count, self._before, self._after = len(optimizers), before, after
        self._is_begun = False
        self._hooks = []
        for at, optimizer in enumerate(optimizers):
            self._hooks += [
                optimizer.register_step_pre_hook(lambda *_: self._begin()),
                optimizer.register_step_post_hook(lambda *_, at=at: self._note(at)),
            ]

    def _begin(self) -> None:
        if not self._is_begun:
            self._is_begun = True
            self._before()

    def _note(self, at: int) -> None:
        self._stepped.add(at)
        if len(self._stepped) == self._count:
            self._stepped.clear()
            self._is_begun = False
            self._after()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
