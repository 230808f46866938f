"""The table's faults on ranks that a stand-in for a service runs, each in a job of its own."""

from __future__ import annotations

import contextlib
import os
import signal
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen
from typing import Any, Protocol
from unittest.mock import patch

from tests.conformance.local_backend import LocalBackend
from tests.conformance.table import Row
from tests.support.control_plane import ControlPlane, PlaneDied, wait_for

from atoll.core.spec import RendezvousSpec
from atoll.objectstore.bucket import Bucket

# Jobs take a while until they are seen to run.
SLOWER = {"deadline": {"deadline_s": 5.0}}


class ServedJob(Protocol):
    """What a stand-in runs for one attempt of a rank."""

    process: Popen[bytes] | None

    @property
    def rank(self) -> int: ...

    @property
    def is_running(self) -> bool: ...

    def pids(self) -> list[int]: ...


class ServedBackend(LocalBackend):
    """Whatever the local table does to processes is done to those of the stand-in's jobs."""

    image = ""
    why_not: dict[str, str] = {}

    def __init__(self, plane: ControlPlane, scratch: Path, store: str) -> None:
        super().__init__(plane, scratch)
        self._store = store
        self._faults.update(
            {
                "image error": lambda row, name: None,
                "control daemon killed before it told": self._exit_untold,
                "control daemon killed after it took a start": self._lose_answer,
                "listing that fails halfway": lambda row, name: self._spoil_listings(),
                "attempt started twice": self._start_again,
                "records lost": self._lose_records,
            }
        )

    @abstractmethod
    def _jobs(self, uid: str) -> Sequence[ServedJob]:
        """Those that run."""

    @abstractmethod
    def _go_away(self, is_away: bool) -> None:
        """The service answers nobody, or does again. Ranks run on."""

    @abstractmethod
    def _spoil_listings(self) -> None:
        """Some listings fail on the way."""

    @abstractmethod
    def _start_again(self, row: Row, name: str) -> None:
        """An attempt that runs is started a second time, and that one has ended."""

    def cannot(self, row: Row) -> str:
        return self.why_not.get(row.fault, "")

    def options_for(self, row: Row) -> dict[str, Any]:
        uri = f"{self._store}/{len(list(self._scratch.iterdir()))}"
        image = "nonesuch:1" if row.fault == "image error" else self.image
        return {"image": image, "rendezvous": RendezvousSpec(uri=uri), **SLOWER.get(row.fault, {})}

    def left(self, name: str) -> list[str]:
        try:
            training = self._plane.until_released(name)
        except PlaneDied:  # armed for a step that comes only now
            self._revive()
            training = self._plane.until_released(name)
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not self._jobs(training.uid), timeout=10)
        return [f"rank {job.rank}: {job.pids()}" for job in self._jobs(training.uid)]

    def _jobs_of(self, name: str) -> Sequence[ServedJob]:
        return self._jobs(self._plane.get(name).uid)

    def _job(self, name: str, rank: int | None) -> Any:
        return next(job for job in self._jobs_of(name) if job.rank == rank)

    def _pid(self, name: str, rank: int | None) -> int:
        """The process that the wrapper has started."""
        pid = self._job(name, rank).process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def _hit_supervisor(self, name: str, number: int) -> None:
        for job in self._jobs_of(name):
            assert job.process is not None
            os.kill(job.process.pid, signal.Signals(number))

    def _exit(self, row: Row, name: str) -> None:
        job = self._job(name, row.at)
        self._tell(name, f"{row.at}.0", str(row.detail))
        wait_for(lambda: not job.is_running)

    def _exit_unseen(self, row: Row, name: str) -> None:
        job = self._job(name, row.at)
        self._plane.kill()
        self._tell(name, f"{row.at}.0", str(row.detail))
        wait_for(lambda: not job.is_running)
        self._plane.start()

    def _exit_untold(self, row: Row, name: str) -> None:
        """The service is away from before the exit until after it."""
        job = self._job(name, row.at)
        self._go_away(True)
        self._tell(name, f"{row.at}.0", str(row.detail))
        wait_for(lambda: not job.is_running)
        self._go_away(False)

    def _lose_records(self, row: Row, name: str) -> None:
        training = self._plane.get(name)
        with patch.dict(os.environ, self._plane.env):
            record_store = Bucket.open(f"{training.spec.rendezvous.uri}/atoll-ranks/{training.uid}")
            record_store.delete(list(record_store.entries()))

    def _lose_answer(self, row: Row, name: str) -> None:
        """It goes away once it has taken a start, whether or not it has answered."""
        wait_for(lambda: self._jobs_of(name))
        self._go_away(True)
        self._go_away(False)
