"""Logs of ranks that are files in a folder which the control plane sees."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from atoll.core.ports import Executor
from atoll.core.status import LogLine, Training
from atoll.logs.files import LogGrowth, read_lines, tail_offsets


class FolderLogs(Executor):
    """The part of an Executor that reads them. A backend has `log_folder`."""

    def log_folder(self, training: Training) -> Path:
        raise NotImplementedError

    def log_growth(self, training: Training) -> AbstractContextManager[LogGrowth] | None:
        """Who tells which ranks have printed; None: their files are looked at again and again."""
        return None

    async def log_offsets(
        self, training: Training, tail: int, *, ranks: Sequence[int] | None = None
    ) -> dict[int, int]:
        return tail_offsets(self.log_folder(training), ranks, tail)

    def logs_after(
        self,
        training: Training,
        offsets: Mapping[int, int],
        *,
        ranks: Sequence[int] | None = None,
        follow: Callable[[], bool] | None = None,
    ) -> AsyncIterator[LogLine]:
        growth = None if follow is None or follow() else self.log_growth(training)
        folder = self.log_folder(training)
        return read_lines(folder, offsets, ranks=ranks, follow=follow, growth=growth)
