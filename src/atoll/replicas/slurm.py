"""Replicas under Slurm, launched from a script: `SlurmExecutor`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll.backends.local.state import state_dir
from atoll.backends.slurm.options import SlurmOptions
from atoll.core.config import options_of
from atoll.replicas.recorded import RecordedReplicas
from atoll.replicas.surface import ReplicaRendezvous


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
    _has_shared_folder = True
    _launch_noun = "job array"
    _argument_of = {"directory": "folder"}

    def __init__(
        self,
        *,
        image: str | None = None,
        command: Sequence[str] | None = None,
        max_restarts: int = 0,
        allow_pickle: bool = False,
        code: bool = True,
        rendezvous_backend: ReplicaRendezvous = "none",
        **options: Any,
    ) -> None:
        self._take(
            command=command,
            max_restarts=max_restarts,
            allow_pickle=allow_pickle,
            code=code,
            rendezvous_backend=rendezvous_backend,
        )
        self._options = options_of(SlurmOptions, options)
        self.image = self._image = image
        self.command, self.max_restarts = self._command, max_restarts
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
