"""Processes of this machine, through /proc and prctl. A pid and its start time identify one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Has this process killed when `parent`, which forked it, ends; at once if it has ended."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Makes descendants whose parent has ended children of this process."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start_ticks(pid: int) -> int:
    """When the process started, in clock ticks since boot; 0 if it is gone."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else 0


def is_running(pid: int, start_ticks_of: int) -> bool:
    """Whether that very process exists and is not a zombie."""
    fields = stat_fields(pid)
    return bool(fields) and int(fields[19]) == start_ticks_of and fields[0] not in ("Z", "X")


def stat_fields(pid: int) -> list[str]:
    """Fields of /proc/pid/stat from the state on: the name before it may hold any character."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def parent(pid: int) -> int:
    """The parent's pid; 0 if the process is gone."""
    fields = stat_fields(pid)
    return int(fields[1]) if fields else 0


def owner(pid: int) -> int | None:
    """The user it runs as; None if it is gone."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def command_line(pid: int) -> list[bytes]:
    """The words it was started with; none if it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def switches(pid: int) -> list[str]:
    """How often the process was given the CPU, as the kernel counts it."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8") as file:
        return [line.split()[1] for line in file if "ctxt_switches" in line]
    return []


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler of its own for the signal."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", encoding="utf-8") as file:
        for line in file:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`, by any of its threads."""
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                pids += map(int, file.read().split())
    return pids


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def environment_of(pid: int) -> dict[bytes, bytes]:
    """The environment the process was started with; empty if it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = (item.partition(b"=") for item in file.read().split(b"\0") if item)
            return {name: value for name, _, value in pairs}
    except OSError:
        return {}


def kill_group(group: int, number: int) -> bool:
    """Signals the group; returns whether any process was left in it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def kill_leader(pid: int, number: int) -> None:
    """Signals the group that a child leads; the child alone, if it has not made its group yet.

    The child must not have been reaped.
    """
    if not kill_group(pid, number):
        kill(pid, number)


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def oom_kills() -> int:
    """How often the kernel has killed a process for memory since boot; 0 where it does not say."""
    with contextlib.suppress(OSError), open("/proc/vmstat", encoding="ascii") as file:
        for line in file:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
