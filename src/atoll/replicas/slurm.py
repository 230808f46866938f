"""Replicas under Slurm, launched from a script: `SlurmExecutor`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from atoll.backends.local.state import state_dir
from atoll.backends.slurm.options import SlurmOptions
from atoll.replicas.recorded import RecordedReplicas


class SlurmExecutor(RecordedReplicas):
    """Replicas as the tasks of one job array a launch.

    Options are those of `SlurmOptions`: `partition`, `account`, `time`, `folder` and so on.
    `command` runs exactly as it is; without it the code of the entrypoint is sent along, with the
    working directory. With `code` False replicas run in it, and all hosts have to see it.
    `max_restarts`: how often each replica is restarted. With `rendezvous_backend="c10d"` the
    replicas of a launch meet in one world. Without `folder`, what hosts have to see is
    in `ATOLL_STATE_DIR/slurm`, else in `~/.local/state/atoll/slurm`. Bad options raise
    ValidationError here.
    """

    backend_name = "slurm"
    _options_type = SlurmOptions
    _has_shared_folder = True
    _launch_noun = "job array"
    _argument_of = {"directory": "folder"}

    def __init__(self, *, image: str | None = None, **more: Any) -> None:
        super().__init__(image, **more)
        self._image = image
        self.folder = Path(
            os.path.expanduser(self._options.folder or state_dir() / "slurm")
        ).absolute()
        self._address = {"directory": str(self.folder)}

    @property
    def _runs_in_place(self) -> bool:
        return super()._runs_in_place and self._options.container is None

    @property
    def _python(self) -> str:
        if self._options.container is not None:
            return "python3"
        return str(self._options.python or sys.executable)
