"""Processes of this machine, through /proc, prctl and cgroups.

A pid and its start time identify a process. Whatever a rank starts stays in the control group (v2)
of its supervisor, though it clears its environment, leaves its session, and outlives every process
of atoll. Each supervisor has a group of its own, for the reaper of a killed one ends all that is in
its group: the ranks of the next supervisor are not there. Nothing is limited by it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

CGROUP_FILE = "cgroup"  # in a training's directory: where the group of its newest supervisor is
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
    """When the process started, in clock ticks since boot; 0 if it has ended."""
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
    """The parent's pid; 0 if the process has ended."""
    fields = stat_fields(pid)
    return int(fields[1]) if fields else 0


def owner(pid: int) -> int | None:
    """The user it runs as; None if it has ended."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def command_line(pid: int) -> list[bytes]:
    """The arguments it was started with; none if it has ended."""
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


def cgroup_for(directory: Path, supervisor: str, root: Path = Path("/")) -> str:
    """The folder of the group that a supervisor would have; empty if this user may make none."""
    own = _own_cgroup(root)
    if own is None or not os.access(own, os.W_OK | os.X_OK):
        return ""
    return str(own / f"atoll-{directory.name}.{supervisor}")


def enter_cgroup(directory: Path, folder: str) -> None:
    """Puts this process, and with it all that it will start, into the group."""
    if not folder:
        return
    with contextlib.suppress(OSError):  # ranks run without one
        os.makedirs(folder, mode=0o755, exist_ok=True)
        (directory / CGROUP_FILE).write_text(folder)
        Path(folder, "cgroup.procs").write_text("0")


def cgroup_members(directory: Path) -> set[int]:
    """Processes in the group of an earlier supervisor or of this one, without this process."""
    pids: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        pids = set(map(int, (_cgroup_of(directory) / "cgroup.procs").read_text().split()))
    return pids - {os.getpid()}


def remove_cgroup(directory: Path) -> None:
    """Removes the group, if nothing is left in it."""
    with contextlib.suppress(OSError, ValueError):
        _cgroup_of(directory).rmdir()


def _cgroup_of(directory: Path) -> Path:
    """The folder that the file names. Raises OSError if there is no file, and ValueError
    for one that is damaged or names the group of others."""
    folder = Path((directory / CGROUP_FILE).read_text())
    own = f"atoll-{directory.name}"
    if folder.name != own and not folder.name.startswith(f"{own}."):
        raise ValueError(f"{directory / CGROUP_FILE} names {folder}, no group of this training")
    return folder


def _own_cgroup(root: Path) -> Path | None:
    """The folder of the group that this process is in."""
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    tops = [line.split()[4] for line in mounts if " - cgroup2 " in line]
    paths = [line[3:] for line in groups if line.startswith("0::")]
    if not tops or not paths or "/.." in paths[0]:
        return None
    return root / tops[0].lstrip("/") / paths[0].lstrip("/")
