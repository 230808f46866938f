"""CPU, memory, threads and bytes of the ranks of this machine, from /proc.

A rank is the leader of a session, and what it starts belongs to it as long as it stays in there.
What cannot be seen is absent.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping

from atoll.agent.machine_use import SESSION, NvmlGpus, cpu_seconds_of, metrics_of
from atoll.agent.records import AttemptFacts
from atoll.backends.local import processes


class UseMeter:
    """Measures ranks again and again: CPU is what was used since it looked before."""

    def __init__(self, gpus: NvmlGpus | None = None) -> None:
        self._gpus = NvmlGpus() if gpus is None else gpus
        self._before: dict[tuple[int, int], tuple[float, float]] = {}  # by process: when, CPU s

    def measure(self, attempts: Iterable[AttemptFacts]) -> dict[int, dict[str, float]]:
        """The figures of each rank that lives, by the pid of its process."""
        sessions, attempts = _sessions(), list(attempts)
        is_alone = len(attempts) == 1
        now = time.monotonic()
        known: dict[tuple[int, int], tuple[float, float]] = {}
        figures = {}
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
            figures[attempt.pid] = own
        # Made anew: a measuring that was cancelled may still go on in its thread.
        retained = {who: sample for who, sample in self._before.items() if now - sample[0] < 60.0}
        self._before = retained | known
        return figures


def _visible(pid: int) -> str | None:
    """The GPUs that the rank was given."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return None
    found = [e for e in entries if e.startswith(b"CUDA_VISIBLE_DEVICES=")]
    return found[0].partition(b"=")[2].decode(errors="replace") if found else None


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
