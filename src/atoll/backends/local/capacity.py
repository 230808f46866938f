"""How many ranks this machine can ever hold, and how many more it can hold now.

A rank is counted as the least that one can be: a process, the files that its supervisor keeps open
for it, and the memory of a small program. What real ranks need beyond that is not known.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FILES_A_RANK = 3  # its pidfd, its output and its log, in the supervisor
SPARE_FILES = 64
SPARE_PROCESSES = 8  # the supervisor's own, and a few for everybody else
BYTES_A_RANK = 2**20
UNLIMITED = 2**62  # and above: what kernels write for no limit


class Bound(NamedTuple):
    ranks: int
    why: str


class Machine:
    """The limits of this machine. `root` is where its file systems are."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def most(self) -> Bound:
        """The ranks that a training can have here at the most, and what bounds them."""
        return min(self._ever())

    def free(self) -> Bound:
        """The ranks that can be added now, and what bounds them."""
        return min(self._now())

    def _ever(self) -> Iterator[Bound]:
        for name, limit in self._process_limits():
            yield Bound(max(limit - SPARE_PROCESSES, 0), f"{name} is {limit}")
        for name, limit in self._file_limits():
            each = f"{FILES_A_RANK} files a rank"
            yield Bound(max(limit - SPARE_FILES, 0) // FILES_A_RANK, f"{name} is {limit}, {each}")
        for name, limit, _ in self._memory():
            yield Bound(limit // BYTES_A_RANK, f"{name} is {_size(limit)}, 1 MiB a rank at least")

    def _now(self) -> Iterator[Bound]:
        running = self._tasks()
        for name, limit in self._process_limits():
            used = running if name.startswith("kernel.") else self._used(name, running)
            left = max(limit - used - SPARE_PROCESSES, 0)
            yield Bound(left, f"{used} of {limit} processes ({name}) are in use")
        for name, limit, used in self._memory():
            left = max(limit - used, 0)
            yield Bound(left // BYTES_A_RANK, f"{_size(left)} of {_size(limit)} ({name}) are free")

    def _process_limits(self) -> Iterator[tuple[str, int]]:
        for name in ("pid_max", "threads-max"):
            yield from _named(f"kernel.{name}", self._number(f"proc/sys/kernel/{name}"))
        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        if os.geteuid() != 0 and limit != resource.RLIM_INFINITY:  # root is not held to it
            yield "RLIMIT_NPROC", limit
        for folder in self._cgroups("pids"):
            yield from _named(f"{folder}/pids.max", self._number(f"{folder}/pids.max"))

    def _used(self, name: str, running: int) -> int:
        """Processes that count against that limit."""
        if name == "RLIMIT_NPROC":
            return self._own_tasks()
        return self._number(f"{Path(name).parent}/pids.current") or running

    def _file_limits(self) -> Iterator[tuple[str, int]]:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if hard != resource.RLIM_INFINITY:
            yield "RLIMIT_NOFILE (hard)", hard
        yield from _named("fs.file-max", self._number("proc/sys/fs/file-max"))

    def _memory(self) -> Iterator[tuple[str, int, int]]:
        """Limits with what is used of each, in bytes."""
        sizes = {}
        with contextlib.suppress(OSError, ValueError):
            for line in (self._root / "proc/meminfo").read_text().splitlines():
                name, _, size = line.partition(":")
                sizes[name] = int(size.split()[0]) * 1024
        total = sizes.get("MemTotal", 0) + sizes.get("SwapTotal", 0)
        if total:
            available = sizes.get("MemAvailable", total) + sizes.get("SwapFree", 0)
            yield "memory", total, total - available
        for folder in self._cgroups("memory"):
            v2, v1 = (
                ("memory.max", "memory.current"),
                (
                    "memory.limit_in_bytes",
                    "memory.usage_in_bytes",
                ),
            )
            for limit_name, used_name in (v2, v1):
                limit = self._number(f"{folder}/{limit_name}")
                if limit is not None and limit < (total or UNLIMITED):
                    # Files that are only cached count as used, and give way.
                    cached = self._cached(folder)
                    used = max((self._number(f"{folder}/{used_name}") or 0) - cached, 0)
                    yield f"{folder}/{limit_name}", limit, used

    def _cached(self, folder: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            for line in (self._root / folder / "memory.stat").read_text().splitlines():
                name, _, size = line.partition(" ")
                if name in ("file", "total_cache"):
                    return int(size)
        return 0

    def _cgroups(self, controller: str) -> Iterator[str]:
        """Folders of the control groups that this process is in, up to the root of each tree."""
        with contextlib.suppress(OSError):
            for line in (self._root / "proc/self/cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                if controllers and controller not in controllers.split(","):
                    continue
                for top in ("sys/fs/cgroup", f"sys/fs/cgroup/{controllers or 'unified'}"):
                    yield from _upwards(top, path)

    def _tasks(self) -> int:
        """Processes and threads that exist."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int((self._root / "proc/loadavg").read_text().split()[3].split("/")[1])
        return 0

    def _own_tasks(self) -> int:
        """Processes and threads of this user."""
        count, user = 0, str(os.getuid())
        for path in (self._root / "proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError, KeyError, IndexError):
                lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
                if lines["Uid"].split()[0] == user:
                    count += int(lines["Threads"])
        return count

    def _number(self, path: str) -> int | None:
        """The number in that file; None if there is none, or it says that there is no limit."""
        try:
            number = int((self._root / path).read_text())
        except (OSError, ValueError):
            return None
        return number if number < UNLIMITED else None


def _named(name: str, limit: int | None) -> Iterator[tuple[str, int]]:
    if limit is not None:
        yield name, limit


def _upwards(top: str, path: str) -> Iterator[str]:
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts), -1, -1):
        yield "/".join([top, *parts[:depth]])


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count // 2**20} MiB"
