"""DiLoCo for Lightning.

from atoll.integrations.lightning import DiLoCoCallback
trainer = Trainer(..., callbacks=[DiLoCoCallback(sync_every=100)])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.integrations.session import TrainerCallbacks, callback_class, own_folder, report_logs

__all__ = ["DiLoCoCallback"]

if TYPE_CHECKING:
    DiLoCoCallback: type[LightningHooks]


class LightningHooks(TrainerCallbacks):
    """What `DiLoCoCallback` does at the events of a Lightning Trainer.

    `max_steps` of the Trainer is the length of the run, and learning rates that are scheduled by
    step follow the run's step, also in a replica that was restarted. `rounds`, `tokens` and
    `epochs` end it earlier.

    Replicas share the data set, but with `own_data=False`: `data_seed` shuffles it. All other
    arguments are those of `atoll.diloco.DiLoCo`.

    What the module logs with `self.log` is reported as metrics, every `log_every_n_steps`. Replicas
    other than the first keep logs and checkpoints in `replica-N` of the folder that they are for.
    """

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before the callbacks for checkpoints, which Lightning calls last, look for a folder."""
        trainer._default_root_dir = own_folder(str(trainer.default_root_dir), self.options)
        for each in (*trainer.loggers, *trainer.checkpoint_callbacks):
            # Of Lightning's own loggers, and of ModelCheckpoint.
            for name in ("_root_dir", "_save_dir", "dirpath"):
                if folder := getattr(each, name, None):
                    own = own_folder(str(folder), self.options)
                    setattr(each, name, own)
                    if name == "_root_dir" and own != str(folder):
                        each._experiment = None  # its files are begun again, in this folder

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        schedules = [each for each in trainer.lr_scheduler_configs if each.interval == "step"]
        session = self.begin(
            pl_module,
            trainer.optimizers,
            [each.scheduler for each in schedules],
            trainer.train_dataloader,
            done=trainer.global_step,
            max_steps=trainer.max_steps,
        )
        self._steps = session.diloco.steps
        fetcher = getattr(trainer.fit_loop, "_data_fetcher", None)
        if fetcher is not None:
            iter(fetcher)  # it was begun before, with the samples that the loader had then
        trainer.should_stop |= session.is_over

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        assert self.session is not None
        self.session.will_train()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        assert self.session is not None
        if self.session.diloco.steps != self._steps:  # else the batch was accumulated
            self._steps = self.session.diloco.steps
            step = self.session.follow()
            if trainer.is_global_zero and step % max(1, trainer.log_every_n_steps) == 0:
                report_logs(step, trainer.callback_metrics)
            trainer.should_stop |= self.session.is_over

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if self.session is not None and trainer.is_global_zero:
            report_logs(self.session.step, trainer.callback_metrics)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.close(exception)


def _base() -> type:
    from lightning.pytorch import Callback

    return Callback  # type: ignore[no-any-return]


def __getattr__(name: str) -> Any:
    return callback_class(globals(), name, LightningHooks, "lightning", _base)
