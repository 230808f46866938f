"""A DiLoCo inside the loop of somebody else's trainer: made, followed, ended.

The step that a trainer counts is the run's, in every replica and after every restart. So equal
settings give equal learning rates, and all replicas end with the same step.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atoll.agent.metrics import report
from atoll.core.checks import check_int, check_number
from atoll.core.errors import ValidationError, class_without_package
from atoll.integrations.data import take_own_part

if TYPE_CHECKING:
    import torch

_MANY = 10**12


def callback_class(
    module: dict[str, Any], name: str, hooks: type, package: str, base: Callable[[], type]
) -> type:
    """`DiLoCoCallback` of `module`: `hooks` on the trainer's own class, which `base` loads.

    Without the package it is a class that says what to install.
    """
    if name != "DiLoCoCallback":
        raise AttributeError(f"module {module['__name__']!r} has no attribute {name!r}")
    try:
        bases = (hooks, base())
    except ModuleNotFoundError as error:
        return class_without_package(name, error, package)
    made = type(name, bases, {"__module__": module["__name__"], "__doc__": hooks.__doc__})
    module[name] = made
    return made


class TrainerCallbacks:
    """What `DiLoCoCallback` is, whatever the trainer.

    `rounds`, `tokens` and `epochs` end the run, as in `DiLoCo.until`. Replicas share the data set:
    each sample is trained on once an epoch of the run, by one of them (`DiLoCo.data`, shuffled by
    `data_seed`); `own_data=False` leaves the loader as it is. All other arguments are those of
    `atoll.diloco.DiLoCo`.
    """

    def __init__(
        self,
        *,
        rounds: int | None = None,
        tokens: float | None = None,
        epochs: int | None = None,
        own_data: bool = True,
        data_seed: int = 0,
        **options: Any,
    ) -> None:
        """Raises ValidationError naming what does not fit."""
        self.ends: dict[str, Any] = {"rounds": rounds, "tokens": tokens, "epochs": epochs}
        for name in ("rounds", "epochs"):
            if self.ends[name] is not None:
                check_int(name, self.ends[name], 1, _MANY)
        if tokens is not None:
            check_number("tokens", tokens, 1, 1e30)
        if epochs is not None and not own_data:
            raise ValidationError("epochs", epochs, "expected own_data=True: it counts them")
        check_int("data_seed", data_seed, 0, _MANY)
        self.has_own_data, self.data_seed, self.options = own_data, data_seed, options
        self.check_world()
        self.session: Session | None = None  # of the training that runs
        self._last: Session | None = None

    @property
    def diloco(self) -> Any:
        """The `DiLoCo` of the training that runs, or ran last; None before the first."""
        return None if self._last is None else self._last.diloco

    def check_world(self) -> None:
        """Raises ValidationError where the trainer would make one world of all replicas."""

    def begin(self, *training: Any, done: int, max_steps: int) -> Session:
        """A training begins, with what `Session` takes."""
        self.session = self._last = Session(self, *training, done=done, max_steps=max_steps)
        return self.session

    def close(self, error: BaseException | None = None) -> None:
        """Leave the run, if a training was begun and has not ended."""
        session, self.session = self.session, None
        if session is not None:
            session.close(error)


def report_logs(step: int, logs: Mapping[str, Any]) -> None:
    """Reports what a trainer logs as metrics of the rank: numbers, and tensors of one element."""
    numbers: dict[str, Any] = {}
    for name, value in logs.items():
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # a text, or a large tensor
            if name != "step" and not isinstance(value, str):
                numbers[name] = float(value)
    if numbers:
        report(step, **numbers)


def own_folder(folder: str, options: Mapping[str, Any]) -> str:
    """The folder for the first replica, `replica-N` in it for every other: replicas that share a
    disk would write the same files."""
    from atoll.diloco.replica_config import find_rank

    rank = find_rank(options.get("rank"), is_one_of_many="TORCHELASTIC_RUN_ID" in os.environ)
    name = f"replica-{rank}"
    return folder if rank == 0 or os.path.basename(folder) == name else os.path.join(folder, name)


class Session:
    """From the beginning of a training to its end, or to the error that ends it."""

    def __init__(
        self,
        callback: TrainerCallbacks,
        model: torch.nn.Module,
        optimizer: Any,
        schedulers: Sequence[Any],
        loader: Any,
        *,
        done: int,
        max_steps: int,
    ) -> None:
        """`done`: the steps of a checkpoint that the trainer has loaded.

        `max_steps`: of the trainer; less than 0 for none.
        """
        from atoll.diloco import DiLoCo

        self._schedulers = schedulers
        self.diloco = DiLoCo(model, optimizer, **callback.options)
        atexit.register(self._at_exit)
        # A run that has rounds knows its step; a new one may go on from a checkpoint.
        self._before = done if self.diloco.round == 0 else 0
        self._data = None
        if callback.has_own_data and self.diloco.config.world_size > 1:
            epochs = callback.ends["epochs"]
            self._data = take_own_part(loader, self.diloco, callback.data_seed, epochs)
        steps = None if max_steps < 0 else max(0, max_steps - self._before)
        self._ticks = None
        if steps is not None or any(each is not None for each in callback.ends.values()):
            self._ticks = self.diloco.until(steps=steps, **callback.ends)
        self._next = -1
        self.follow()

    @property
    def step(self) -> int:
        """The run's, as a trainer counts it."""
        return self._before + self.diloco.step

    @property
    def is_over(self) -> bool:
        return self._ticks is not None and next(self._ticks, None) is None

    def will_train(self) -> None:
        """The optimiser's next step trains on one more batch of the loader."""
        if self._data is not None:
            self._data.hand_to_loop()

    def follow(self) -> int:
        """The run's step after one of the trainer's. Schedules go on from it, also if it jumped."""
        step = self.step
        if step != self._next:
            for scheduler in self._schedulers:
                set_schedule(scheduler, step)
        self._next = step + 1
        return step

    def close(self, error: BaseException | None = None) -> None:
        """Also after an error: then the other replicas are told, and go on without this one."""
        atexit.unregister(self._at_exit)
        self.diloco.__exit__(None if error is None else type(error), error)

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        self.close(error or RuntimeError("the process ended before its training"))


def set_schedule(scheduler: Any, step: int) -> None:
    """The learning rates are those after `step` steps, whatever the scheduler was at."""
    is_by_metrics = "metrics" in inspect.signature(scheduler.step).parameters
    if is_by_metrics or scheduler.last_epoch == step:
        return
    if hasattr(scheduler, "lr_lambdas"):
        scheduler.last_epoch = step - 1
    with warnings.catch_warnings():
        # torch says that no optimiser has stepped yet: it has, in the replicas that got here.
        warnings.simplefilter("ignore", UserWarning)
        while scheduler.last_epoch < step:
            scheduler.step()
