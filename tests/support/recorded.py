"""A backend of the shared executor that starts wrappers as processes of this machine, for tests.

It can be told to lie as real ones do: forget a job, start one twice, fail to answer.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from atoll.agent.records import RecordStore
from atoll.agent.wrapper import Folder
from atoll.backends.base import WRAPPER, wrapper_file
from atoll.backends.launch import RankLayout
from atoll.backends.recorded import RecordedBackend
from atoll.backends.records import AttemptKey, JobState, Timing
from atoll.core.errors import Temporary
from atoll.core.status import Training


class ProcessBackend(RecordedBackend):
    name = "processes"
    timing = Timing(
        observe_s=0.05, settle_s=0.5, heartbeat_timeout_s=10.0, cause_wait_s=0.3, stop_wait_s=1.0
    )

    def __init__(self, root: Path, clock: Callable[[], float] | None = None) -> None:
        super().__init__(clock=clock)
        self.root = root
        self.started: list[AttemptKey] = []
        self.stopped: list[AttemptKey] = []
        self.processes: dict[AttemptKey, subprocess.Popen[bytes]] = {}
        self.is_silent = False
        self.questions = 0
        self.words: dict[AttemptKey, JobState] = {}  # instead of the truth
        (root / WRAPPER).write_bytes(wrapper_file())

    def record_store_of(self, training: Training) -> RecordStore:
        folder = self.root / training.uid
        folder.mkdir(exist_ok=True)
        return Folder(str(folder))

    def rank_layout(self, training: Training) -> RankLayout:
        folder = self.root / training.uid
        return RankLayout(
            sys.executable, "/bin/sh", f"{folder}/source", None, True, f"file://{folder}/rdv", None,
            metrics_uri=f"file://{folder}/metrics",
        )  # fmt: skip

    async def start_jobs(self, training: Training, attempt: int, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.start(training, rank, attempt)

    def start(self, training: Training, rank: int, attempt: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-S", "-I", str(self.root / WRAPPER)]
        process = subprocess.Popen(
            [*command, str(self.root / training.uid), str(rank), str(attempt)],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.started.append((rank, attempt))
        self.processes.setdefault((rank, attempt), process)
        return process

    async def list_jobs(self, training: Training) -> Mapping[AttemptKey, JobState]:
        self.questions += 1
        if self.is_silent:
            raise Temporary("it does not answer")
        jobs = {
            key: JobState("ended" if process.poll() is not None else "running")
            for key, process in self.processes.items()
        }
        return {**jobs, **self.words}

    async def stop_jobs(self, training: Training, attempts: Sequence[AttemptKey]) -> None:
        self.stopped += attempts
        for key in attempts:
            if process := self.processes.get(key):
                process.send_signal(signal.SIGCONT)
                process.kill()

    async def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
            process.wait()
