"""DiLoCo for `transformers.Trainer`, and TRL's trainers, which are Trainers.

from atoll.integrations.transformers import DiLoCoCallback
trainer = Trainer(..., callbacks=[DiLoCoCallback(sync_every=100)])
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from atoll.core.errors import ValidationError
from atoll.integrations.data import empty
from atoll.integrations.session import TrainerCallbacks, callback_class, own_folder, report_logs

__all__ = ["DiLoCoCallback"]

if TYPE_CHECKING:
    DiLoCoCallback: type[TrainerHooks]


class TrainerHooks(TrainerCallbacks):
    """What `DiLoCoCallback` does at the events of a Trainer.

    `max_steps` of the Trainer is the length of the run: `state.global_step` and the learning rate
    follow the run's step, also in a replica that was restarted. `rounds`, `tokens` and `epochs`
    end it earlier.

    Replicas share the data set, but with `own_data=False`: `data_seed` shuffles it. All other
    arguments are those of `atoll.diloco.DiLoCo`.

    What the Trainer logs is reported as metrics. Replicas other than the first write into
    `replica-N` inside `output_dir`.

    A training that raises leaves the run when its process ends; to leave it at once, use the
    callback as a context manager around `train()`, or call `close()`.
    """

    def check_world(self) -> None:
        env = os.environ
        rank = env.get("ATOLL_RANK")
        if "TORCHELASTIC_RUN_ID" in env or rank is None or env.get("RANK") != rank:
            return
        if env.get("WORLD_SIZE", "1") not in ("", "1"):
            raise ValidationError(
                "WORLD_SIZE",
                env["WORLD_SIZE"],
                "a Trainer would join all replicas by DDP: start them with --replicas instead of "
                "-n, or rendezvous_backend='none'",
            )

    def __enter__(self) -> TrainerHooks:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        args.output_dir = own_folder(args.output_dir, self.options)

    _logged_at, _steps = 0, 0  # the run's step at the last log, and own steps since then

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and isinstance(logs.get("loss"), float):
            self._correct_loss(state, logs)
        if state.is_world_process_zero:  # of the replica
            report_logs(state.global_step, logs or {})

    def _correct_loss(self, state: Any, logs: dict[str, Any]) -> None:
        """The mean over own steps: a Trainer divides by all steps of the run since its last log,
        which are more where a replica has come to the step of the others."""
        run_steps = state.global_step - self._logged_at
        if 0 < self._steps < run_steps:
            for each in (logs, *state.log_history[-1:]):
                each["loss"] *= run_steps / self._steps
        self._logged_at, self._steps = state.global_step, 0

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
        session = self.begin(
            model,
            optimizer,
            [lr_scheduler],
            train_dataloader,
            done=state.global_step,
            max_steps=state.max_steps,
        )
        args.ignore_data_skip = True  # the run knows what was used
        self._logged_at, self._steps = state.global_step, 0
        state.global_step = session.step
        if session.is_over:
            empty(train_dataloader)  # else a Trainer would make one step more

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.session is not None:
            self.session.will_train()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.session is not None:
            self.session.will_train()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.session is not None:
            self._steps += 1
            state.global_step = self.session.follow()
            control.should_training_stop |= self.session.is_over

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.close()


def _base() -> type:
    from transformers import TrainerCallback

    return TrainerCallback  # type: ignore[no-any-return]


def __getattr__(name: str) -> Any:
    return callback_class(globals(), name, TrainerHooks, "transformers", _base)
