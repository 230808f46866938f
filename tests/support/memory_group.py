"""A control group with little memory: the kernel kills what outgrows it, as on a full machine."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

LIMIT_BYTES = 32 * 2**20


class MemoryGroup:
    """Made on first use under this process's own group, so whatever limits that still counts."""

    def __init__(self) -> None:
        self._made: Path | None = None
        self._why_not = ""

    def cannot(self) -> str:
        """Why there is none; empty if there is."""
        if self._made is None and not self._why_not:
            try:
                self._made = _make()
            except OSError as error:
                self._why_not = f"no control group with a memory limit can be made here: {error}"
        return self._why_not

    def limit(self, pid: int) -> None:
        assert not self.cannot()
        assert self._made is not None
        (self._made / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        if self._made is None:
            return
        for _ in range(500):
            with contextlib.suppress(OSError):
                self._made.rmdir()
                return
            time.sleep(0.01)


def _make() -> Path:
    own = _own_group("memory") or _own_group("")
    if own is None:
        raise OSError("/proc/self/cgroup names no group")
    group = own / f"atoll-test-{os.getpid()}"
    group.mkdir()
    try:
        is_old = (group / "memory.limit_in_bytes").exists()
        name = "memory.limit_in_bytes" if is_old else "memory.max"
        (group / name).write_text(str(LIMIT_BYTES))
    except OSError:
        group.rmdir()
        raise
    return group


def _own_group(controller: str) -> Path | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            root = Path("/sys/fs/cgroup", controller)
            return root / path.lstrip("/")
    return None
