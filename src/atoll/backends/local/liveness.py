"""Whether the watchdog and the supervisor of a training live, as far as a control plane can tell.

The supervisor sends a heartbeat every second. Silence proves nothing: the listener may have been
stopped, asleep or starved itself, and a supervisor that gets no CPU or waits for a disk is silent
too. So only listening that went on in time counts, and then /proc decides.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from atoll.backends.local import processes
from atoll.backends.local.protocol import HEARTBEAT, RESTORE, WATCHDOG_FILE

MISSES = 3  # heartbeats in a row: fewer are lost on a starved machine as well
LATE_S = 2.0  # a tick this long after the last one does not count: the listener was held up
HUNG = 30  # ticks in which it neither ran nor waited for CPU or disk: it will not answer any more


class ProcessState(NamedTuple):
    """One process of a pair at one moment."""

    pid: int
    start_ticks: int
    is_stopped: bool
    is_waiting: bool  # for nothing that the machine owes it: neither the CPU nor a disk
    progress: tuple[str, ...]  # changes whenever it runs


class Pair(NamedTuple):
    watchdog: ProcessState | None
    supervisor: ProcessState | None

    @property
    def is_stopped(self) -> bool:
        """Whether nobody of it can act. A watchdog that runs deals with a stopped supervisor."""
        processes_alive = [process for process in self if process is not None]
        return bool(processes_alive) and all(process.is_stopped for process in processes_alive)


class HeartbeatMonitor:
    """The heartbeats of one pair at one client. `tick` is called every `HEARTBEAT_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ticked_at = clock()
        self._is_connected = True
        self._has_beaten = False
        self._misses = self._stopped = self._hung = 0
        self._progress: tuple[str, ...] = ()
        self._is_roused = False

    def receive(self, data: bytes) -> None:
        self._is_connected = True
        self._has_beaten = self._has_beaten or HEARTBEAT in data

    def tick(self) -> bool:
        """Return whether a heartbeat is missing, so that it is time to judge the pair."""
        now, before = self._clock(), self._ticked_at
        self._ticked_at = now
        if self._is_connected or now - before >= LATE_S:
            self._misses = self._stopped = self._hung = 0
            self._is_roused = self._is_roused and not self._is_connected
            self._is_connected = False
        else:
            self._misses += 1
        return self._misses > 0

    def judge(self, pair: Pair) -> int | None:
        """The signal that both need: to go on if they are stopped, to end if that was no help."""
        self._stopped = self._stopped + 1 if pair.is_stopped else 0
        process = pair.supervisor
        if process is None or not process.is_waiting or process.progress != self._progress:
            self._hung = 0
        elif self._has_beaten and not process.is_stopped:
            self._hung += 1
        self._progress = () if process is None else process.progress
        self._is_roused = self._is_roused and pair.is_stopped
        if self._hung >= HUNG or (self._stopped >= MISSES and self._is_roused):
            return signal.SIGKILL
        if self._stopped >= MISSES:
            self._is_roused, self._stopped = True, 0
            return signal.SIGCONT
        return None


def pair_of(directory: Path) -> Pair:
    """The processes in charge of a training: by the mark, or by command lines if that is lost."""
    watchdog = _find_watchdog(directory)
    if watchdog is not None:
        arguments = processes.command_line(watchdog.pid)
        same = [
            p for p in processes.children(watchdog.pid) if processes.command_line(p) == arguments
        ]
        return Pair(watchdog, _process_state(same[0]) if same else None)
    pids = supervision_pids(directory)
    catching = [pid for pid in pids if processes.catches(pid, RESTORE)]
    # A child that waits to become a rank is like the supervisor that has forked it.
    supervisors = [pid for pid in catching if processes.parent(pid) not in catching]
    watchdogs = [pid for pid in pids if pid not in catching and processes.parent(pid) not in pids]
    return Pair(
        _process_state(watchdogs[0]) if watchdogs else None,
        _process_state(supervisors[0]) if supervisors else None,
    )


def supervision_pids(directory: Path) -> list[int]:
    """The pids of all watchdogs and supervisors that were started for a training."""
    return [pid for pid in processes.all_pids() if _is_supervision(pid, os.fsencode(directory))]


def ask_to_restore(supervisor: ProcessState) -> None:
    """One that has only just begun would die of the signal, and its files are new."""
    if processes.catches(supervisor.pid, RESTORE):
        send(supervisor, RESTORE)


def send(process: ProcessState, number: int) -> None:
    """Signals that very process, never another one that has its pid by now."""
    try:
        fd = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        if processes.start_ticks(process.pid) == process.start_ticks:
            signal.pidfd_send_signal(fd, number)
    except OSError:
        return
    finally:
        os.close(fd)


def _find_watchdog(directory: Path) -> ProcessState | None:
    """The watchdog that the mark names, if it lives."""
    try:
        pid, start_ticks = map(int, (directory / WATCHDOG_FILE).read_text().split())
    except (OSError, ValueError):
        return None
    process = _process_state(pid)
    return process if process is not None and process.start_ticks == start_ticks else None


def _is_supervision(pid: int, directory: bytes) -> bool:
    arguments = processes.command_line(pid)
    if processes.owner(pid) != os.geteuid():  # anybody can choose such arguments
        return False
    return arguments[1:4] == [b"-S", b"-E", b"-c"] and directory in arguments[5:]


def _process_state(pid: int) -> ProcessState | None:
    fields = processes.stat_fields(pid)
    if not fields or fields[0] in "ZX":
        return None
    return ProcessState(
        pid=pid,
        start_ticks=int(fields[19]),
        is_stopped=fields[0] in "Tt",
        is_waiting=fields[0] not in "RD",
        progress=(fields[11], fields[12], *processes.switches(pid)),
    )
