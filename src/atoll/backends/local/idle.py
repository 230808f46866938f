"""For how long ranks of this machine have not moved: printed nothing, reported nothing, and used no
CPU to speak of."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from atoll.agent.machine_use import idle_s
from atoll.agent.records import AttemptFacts
from atoll.backends.local.machine_use import cpu_seconds
from atoll.logs.segments import log_end

AttemptKey = tuple[str, int, int]  # uid of the training, rank, attempt


class _Sample(NamedTuple):
    at: float  # monotonic
    cpu_s: float | None
    progress: tuple[object, ...]  # how far its log and its reports are
    moved_at: float  # monotonic


class IdleTracker:
    """Looks at ranks again and again. What it has not looked at before has just moved."""

    def __init__(self) -> None:
        self._samples: dict[AttemptKey, _Sample] = {}

    def idle_s(
        self, uid: str, directory: Path, attempts: Iterable[AttemptFacts], now: float
    ) -> dict[int, float]:
        """Seconds since each of these ranks moved, by rank. `now` is of the monotonic clock."""
        living = [attempt for attempt in attempts if attempt.exit is None]
        used = cpu_seconds(living)
        reports = _reports(directory / "figures")
        samples: dict[AttemptKey, _Sample] = {}
        for attempt in living:
            key = (uid, attempt.rank, attempt.attempt)
            log = log_end(directory / "logs" / str(attempt.rank))
            progress = (log, *sorted(reports.get((attempt.rank, attempt.attempt), ())))
            cpu_s, before = used.get(attempt.pid), self._samples.get(key)
            moved_at = (
                before.moved_at if before and not _has_moved(before, progress, cpu_s, now) else now
            )
            samples[key] = _Sample(now, cpu_s, progress, moved_at)
        self._samples = {key: one for key, one in self._samples.items() if key[0] != uid} | samples
        return {key[1]: now - one.moved_at for key, one in samples.items()}

    def forget(self, uid: str) -> None:
        self._samples = {key: one for key, one in self._samples.items() if key[0] != uid}


def _has_moved(
    before: _Sample, progress: tuple[object, ...], cpu_s: float | None, now: float
) -> bool:
    if progress != before.progress or cpu_s is None or before.cpu_s is None:
        return True
    return cpu_s - before.cpu_s > idle_s(now - before.at)


def _reports(folder: Path) -> dict[tuple[int, int], set[tuple[str, str, int]]]:
    """The newest file of each process that reports, and its size, by rank and attempt."""
    newest: dict[str, tuple[str, int]] = {}
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            owner, _, number = entry.name.rpartition(".")
            if number > newest.get(owner, ("", 0))[0]:
                with contextlib.suppress(FileNotFoundError):
                    newest[owner] = (number, entry.stat().st_size)
    match: dict[tuple[int, int], set[tuple[str, str, int]]] = {}
    for owner, (number, size) in newest.items():
        rank, attempt, *_ = owner.split(".")
        if rank.isdigit() and attempt.isdigit():
            match.setdefault((int(rank), int(attempt)), set()).add((owner, number, size))
    return match
