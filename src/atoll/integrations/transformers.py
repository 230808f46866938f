"""DiLoCo for `transformers.Trainer`, and TRL's trainers, which are Trainers.

from atoll.integrations.transformers import DiLoCoCallback
trainer = Trainer(..., callbacks=[DiLoCoCallback(sync_every=100)])
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from atoll.core.errors import ValidationError
from atoll.integrations.data import empty
from atoll.integrations.session import (
    Session,
    callback_class,
    own_folder,
    read_options,
    report_logs,
)

__all__ = ["DiLoCoCallback"]

if TYPE_CHECKING:
    DiLoCoCallback: type[TrainerHooks]


class TrainerHooks:
    """What `DiLoCoCallback` does at the events of a Trainer.

    `max_steps` of the Trainer is the length of the run: `state.global_step` and the learning rate
    follow the run's step, also in a replica that was restarted. `rounds`, `tokens` and `epochs`
    end it earlier, as in `DiLoCo.until`.

    Replicas share the data set: each sample is trained on once an epoch of the run, by one of them
    (`DiLoCo.data`, shuffled by `data_seed`). `own_data=False` leaves the loader as it is. All
    other arguments are those of `atoll.diloco.DiLoCo`.

    What the Trainer logs is reported as metrics. Replicas other than the first write into
    `replica-N` inside `output_dir`.

    A training that raises leaves the run when its process ends; to leave it at once, use the
    callback as a context manager around `train()`, or call `close()`.
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
        ends = {"rounds": rounds, "tokens": tokens, "epochs": epochs}
        self._asked = read_options(ends, own_data, data_seed, options)
        _refuse_shared_world()
        self._session: Session | None = None

    @property
    def diloco(self) -> Any:
        """The `DiLoCo` of the training that runs, or ran last; None before the first."""
        return None if self._session is None else self._session.diloco

    def __enter__(self) -> TrainerHooks:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the run, if a training was begun and has not ended."""
        if self._is_open:
            self._is_open = False
            assert self._session is not None
            self._session.close(error)

    _is_open = False

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        args.output_dir = own_folder(args.output_dir, self._asked.options)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero:  # of the replica
            report_logs(state.global_step, logs or {})

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        train_dataloader: Any = None,
        **_: Any,
    ) -> None:
        self.close(RuntimeError("another training began"))
        self.on_init_end(args, state, control)  # a callback that was added later
        self._session = session = Session(
            self._asked,
            model,
            optimizer,
            [lr_scheduler],
            train_dataloader,
            done=state.global_step,
            max_steps=state.max_steps,
        )
        self._is_open = True
        args.ignore_data_skip = True  # the run knows what was used
        state.global_step = session.step
        if session.is_over:
            empty(train_dataloader)  # else a Trainer would make one step more

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._is_open:
            assert self._session is not None
            self._session.will_train()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._is_open:
            assert self._session is not None
            self._session.will_train()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._is_open:
            assert self._session is not None
            state.global_step = self._session.follow()
            control.should_training_stop |= self._session.is_over

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.close()


def _refuse_shared_world() -> None:
    """Raises ValidationError where a Trainer would make one world of all replicas."""
    env = os.environ
    rank = env.get("ATOLL_RANK")
    if "TORCHELASTIC_RUN_ID" in env or rank is None or env.get("RANK") != rank:
        return
    if env.get("WORLD_SIZE", "1") not in ("", "1"):
        raise ValidationError(
            "WORLD_SIZE",
            env["WORLD_SIZE"],
            "a Trainer would join all replicas by DDP: start them with --rendezvous none "
            "(rendezvous_backend='none')",
        )


def _base() -> type:
    from transformers import TrainerCallback

    return TrainerCallback  # type: ignore[no-any-return]


def __getattr__(name: str) -> Any:
    return callback_class(globals(), name, TrainerHooks, "transformers", _base)
