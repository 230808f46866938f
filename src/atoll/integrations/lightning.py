"""DiLoCo for Lightning.

from atoll.integrations.lightning import DiLoCoCallback
trainer = Trainer(..., callbacks=[DiLoCoCallback(sync_every=100)])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.integrations.session import (
    Session,
    callback_class,
    own_folder,
    read_options,
    report_logs,
)

__all__ = ["DiLoCoCallback"]

if TYPE_CHECKING:
    DiLoCoCallback: type[LightningHooks]


class LightningHooks:
    """What `DiLoCoCallback` does at the events of a Lightning Trainer.

    `max_steps` of the Trainer is the length of the run, and learning rates that are scheduled by
    step follow the run's step, also in a replica that was restarted. `rounds`, `tokens` and
    `epochs` end it earlier, as in `DiLoCo.until`.

    Replicas share the data set: each sample is trained on once an epoch of the run, by one of them
    (`DiLoCo.data`, shuffled by `data_seed`). `own_data=False` leaves the loader as it is. All
    other arguments are those of `atoll.diloco.DiLoCo`.

    What the module logs with `self.log` is reported as metrics, every `log_every_n_steps`. Replicas
    other than the first keep logs and checkpoints in `replica-N` of the folder that they are for.
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
        self._session: Session | None = None

    @property
    def diloco(self) -> Any:
        """The `DiLoCo` of the training that runs, or ran last; None before the first."""
        return None if self._session is None else self._session.diloco

    _is_open = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before the callbacks for checkpoints, which Lightning calls last, look for a folder."""
        options = self._asked.options
        trainer._default_root_dir = own_folder(str(trainer.default_root_dir), options)
        for each in (*trainer.loggers, *trainer.checkpoint_callbacks):
            # Of Lightning's own loggers, and of ModelCheckpoint.
            for name in ("_root_dir", "_save_dir", "dirpath"):
                if folder := getattr(each, name, None):
                    setattr(each, name, own_folder(str(folder), options))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        schedules = [each for each in trainer.lr_scheduler_configs if each.interval == "step"]
        self._session = Session(
            self._asked,
            pl_module,
            trainer.optimizers,
            [each.scheduler for each in schedules],
            trainer.train_dataloader,
            done=trainer.global_step,
            max_steps=trainer.max_steps,
        )
        self._is_open, self._steps = True, self._session.diloco.steps
        fetcher = getattr(trainer.fit_loop, "_data_fetcher", None)
        if fetcher is not None:
            iter(fetcher)  # it was begun before, with the samples that the loader had then
        trainer.should_stop |= self._session.is_over

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        assert self._session is not None
        self._session.will_train()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        assert self._session is not None
        if self._session.diloco.steps != self._steps:  # else the batch was accumulated
            self._steps = self._session.diloco.steps
            step = self._session.follow()
            if trainer.is_global_zero and step % max(1, trainer.log_every_n_steps) == 0:
                report_logs(step, trainer.callback_metrics)
            trainer.should_stop |= self._session.is_over

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if self._is_open and trainer.is_global_zero:
            assert self._session is not None
            report_logs(self._session.step, trainer.callback_metrics)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close(exception)

    def _close(self, error: BaseException | None = None) -> None:
        if self._is_open:
            self._is_open = False
            assert self._session is not None
            self._session.close(error)


def _base() -> type:
    from lightning.pytorch import Callback

    return Callback  # type: ignore[no-any-return]


def __getattr__(name: str) -> Any:
    return callback_class(globals(), name, LightningHooks, "lightning", _base)
