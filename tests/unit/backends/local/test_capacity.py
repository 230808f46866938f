"""What a machine can hold, from the files in which its kernel says so."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from atoll.backends.local.capacity import Machine

GIB_IN_KIB = 2**20


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A large machine, half full, in no control group."""
    limits = {resource.RLIMIT_NOFILE: (1024, 10**9), resource.RLIMIT_NPROC: (10**9, 10**9)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits[which])
    write(tmp_path, "proc/sys/kernel/pid_max", "4000064")
    write(tmp_path, "proc/sys/kernel/threads-max", "4000064")
    write(tmp_path, "proc/sys/fs/file-max", "9223372036854775807")
    write(tmp_path, "proc/loadavg", "1.00 1.00 1.00 3/2000000 4242")
    write(tmp_path, "proc/meminfo", meminfo(total=100 * GIB_IN_KIB, available=50 * GIB_IN_KIB))
    write(tmp_path, "proc/self/cgroup", "0::/")
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text + "\n")


def meminfo(*, total: int, available: int) -> str:
    return f"MemTotal: {total} kB\nMemFree: 1 kB\nMemAvailable: {available} kB"


def test_memory_bounds_a_large_machine(root: Path) -> None:
    machine = Machine(root)
    assert machine.most() == (102_400, "memory is 100 GiB, 1 MiB a rank at least")
    assert machine.free() == (51_200, "50 GiB of 100 GiB (memory) are free")


@pytest.mark.parametrize("name", ["pid_max", "threads-max"])
def test_processes_of_the_kernel(root: Path, name: str) -> None:
    write(root, f"proc/sys/kernel/{name}", "4096")
    write(root, "proc/loadavg", "1.00 1.00 1.00 3/3000 4242")
    assert Machine(root).most() == (4088, f"kernel.{name} is 4096")
    assert Machine(root).free() == (1088, f"3000 of 4096 processes (kernel.{name}) are in use")


@pytest.mark.parametrize(
    ("line", "folder"),
    [
        ("0::/a/b", "sys/fs/cgroup/a"),
        ("0::/a/b", "sys/fs/cgroup/unified/a"),
        ("8:pids:/a/b", "sys/fs/cgroup/pids/a"),
    ],
    ids=["v2", "v2 beside v1", "v1"],
)
def test_processes_of_a_control_group_above(root: Path, line: str, folder: str) -> None:
    write(root, "proc/self/cgroup", line)
    write(root, f"{folder}/b/pids.max", "max")
    write(root, f"{folder}/pids.max", "108")
    write(root, f"{folder}/pids.current", "40")
    assert Machine(root).most() == (100, f"{folder}/pids.max is 108")
    assert Machine(root).free() == (60, f"40 of 108 processes ({folder}/pids.max) are in use")


def test_processes_of_a_user(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (108, 10**9))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr("os.getuid", lambda: 1000)
    for pid, uid in ((10, 1000), (11, 1000), (12, 0)):
        write(root, f"proc/{pid}/status", f"Name:\tx\nUid:\t{uid}\t{uid}\nThreads:\t20")
    assert Machine(root).most() == (100, "RLIMIT_NPROC is 108")
    assert Machine(root).free() == (60, "40 of 108 processes (RLIMIT_NPROC) are in use")
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert Machine(root).most().why != "RLIMIT_NPROC is 108"


def test_files_of_a_supervisor(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 364))
    assert Machine(root).most() == (100, "RLIMIT_NOFILE (hard) is 364, 3 files a rank")


def test_memory_of_a_control_group(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/a\n4:memory:/b")
    write(root, "sys/fs/cgroup/memory/b/memory.limit_in_bytes", str(100 * 2**20))
    write(root, "sys/fs/cgroup/memory/b/memory.usage_in_bytes", str(70 * 2**20))
    write(root, "sys/fs/cgroup/memory/b/memory.stat", f"cache 1\ntotal_cache {30 * 2**20}")
    name = "sys/fs/cgroup/memory/b/memory.limit_in_bytes"
    assert Machine(root).most() == (100, f"{name} is 100 MiB, 1 MiB a rank at least")
    assert Machine(root).free() == (60, f"60 MiB of 100 MiB ({name}) are free")
    write(root, "sys/fs/cgroup/a/memory.max", str(50 * 2**20))
    write(root, "sys/fs/cgroup/a/memory.current", "0")
    assert Machine(root).most().ranks == 50


def test_this_machine_can_hold_something() -> None:
    machine = Machine()
    assert 0 < machine.free().ranks
    assert machine.free().ranks <= machine.most().ranks or machine.most().why.endswith("a rank")
