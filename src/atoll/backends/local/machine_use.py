"""What ranks use of this machine, from /proc, and for how long they have been idle.

A rank is the leader of a session, and what it starts belongs to it as long as it stays in there.
What cannot be read is absent. A rank is idle while it prints nothing, reports nothing, and uses no
CPU to speak of.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from atoll.agent.machine_use import SESSION, NvmlGpus, cpu_seconds_of, idle_s, metrics_of
from atoll.agent.metric_sinks import METRICS
from atoll.agent.records import AttemptFacts
from atoll.backends.local import processes
from atoll.logs.segments import log_end


class UseMeter:
    """Measures ranks again and again: CPU is what was used since the last measurement."""

    def __init__(self, gpus: NvmlGpus | None = None) -> None:
        self._gpus = NvmlGpus() if gpus is None else gpus
        self._before: dict[tuple[int, int], tuple[float, float]] = {}  # by process: when, CPU s

    def measure(self, attempts: Iterable[AttemptFacts]) -> dict[int, dict[str, float]]:
        """The usage of each rank that lives, by the pid of its process."""
        sessions, attempts = _sessions(), list(attempts)
        is_alone = len(attempts) == 1
        now = time.monotonic()
        known: dict[tuple[int, int], tuple[float, float]] = {}
        usage = {}
        for attempt in attempts:
            pids = sessions.get(attempt.pid)
            if (
                attempt.exit is not None
                or not pids
                or processes.start_ticks(attempt.pid) != attempt.start_ticks
            ):
                continue
            own = metrics_of(pids)
            who = (attempt.pid, attempt.start_ticks)
            used_s = own.pop("cpu_s")
            known[who] = (now, used_s)
            if who in self._before:
                then, before_s = self._before[who]
                if now > then:
                    own["cpu"] = max(0.0, used_s - before_s) / (now - then)
            own |= self._gpus.metrics(_visible(attempt.pid), is_alone=is_alone)
            usage[attempt.pid] = own
        # Made anew: a measuring that was cancelled may still go on in its thread.
        recent = {who: sample for who, sample in self._before.items() if now - sample[0] < 60.0}
        self._before = recent | known
        return usage


def _visible(pid: int) -> str | None:
    """The GPUs that the rank was given."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return None
    values = [e[21:] for e in entries if e.startswith(b"CUDA_VISIBLE_DEVICES=")]
    return values[0].decode(errors="replace") if values else None


def cpu_seconds(attempts: Iterable[AttemptFacts]) -> dict[int, float]:
    """What each rank that lives has used of CPUs so far, by the pid of its process."""
    sessions = _sessions()
    return {
        attempt.pid: cpu_seconds_of(sessions[attempt.pid])
        for attempt in attempts
        if attempt.pid in sessions and processes.start_ticks(attempt.pid) == attempt.start_ticks
    }


def _sessions() -> Mapping[int, dict[int, list[str]]]:
    """The processes of each session, with the fields of their stat."""
    sessions: defaultdict[int, dict[int, list[str]]] = defaultdict(dict)
    for pid in processes.all_pids():
        fields = processes.stat_fields(pid)
        if fields and fields[0] not in ("Z", "X"):
            sessions[int(fields[SESSION])][pid] = fields
    return sessions


AttemptKey = tuple[str, int, int]  # uid of the training, rank, attempt


class _Sample(NamedTuple):
    at: float  # monotonic
    cpu_s: float | None
    progress: tuple[object, ...]  # how far its log and its reports are
    moved_at: float  # monotonic


class IdleTracker:
    """Samples ranks again and again. One that it has not sampled before has just moved."""

    def __init__(self) -> None:
        self._samples: dict[AttemptKey, _Sample] = {}

    def idle_s(
        self, uid: str, directory: Path, attempts: Iterable[AttemptFacts], now: float
    ) -> dict[int, float]:
        """Seconds since each of these ranks moved, by rank. `now` is of the monotonic clock."""
        living = [attempt for attempt in attempts if attempt.exit is None]
        used = cpu_seconds(living)
        reports = _reports(directory / METRICS)
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
    by_attempt: dict[tuple[int, int], set[tuple[str, str, int]]] = {}
    for owner, (number, size) in newest.items():
        rank, attempt, *_ = owner.split(".")
        if rank.isdigit() and attempt.isdigit():
            by_attempt.setdefault((int(rank), int(attempt)), set()).add((owner, number, size))
    return by_attempt
