"""Ranks that were forked and wait for each other: none runs before all of them can."""

from __future__ import annotations

import os
import signal

from atoll.backends.local import processes
from atoll.backends.local.rank_process import GO, Process


class StartBarrier:
    """Held-back ranks by (rank, attempt). A child runs once it reads a byte from the pipe."""

    def __init__(self) -> None:
        self.go_out, self._go_in = os.pipe2(os.O_CLOEXEC)
        self.waiting: dict[tuple[int, int], Process] = {}

    @property
    def files(self) -> tuple[int, int]:
        return self.go_out, self._go_in

    def hold(self, process: Process) -> None:
        self.waiting[process.attempt.rank, process.attempt.attempt] = process

    def of(self, pid: int) -> Process | None:
        return next((p for p in self.waiting.values() if p.attempt.pid == pid), None)

    def release(self) -> None:
        """Lets them run."""
        os.write(self._go_in, GO * len(self.waiting))
        self._close()

    def disband(self) -> None:
        """Ends them: none has run. They are left to be reaped."""
        for process in self.waiting.values():
            processes.kill(process.attempt.pid, signal.SIGKILL)
            os.close(process.pidfd)
            os.close(process.output)
            process.log.close()
        self.waiting.clear()
        self._close()

    def _close(self) -> None:
        os.close(self._go_in)
        os.close(self.go_out)
