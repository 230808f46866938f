"""What a rank uses is read from /proc, control groups and NVML; what cannot be seen is absent."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll.agent import machine_use, metric_sinks, process
from atoll.agent.machine_use import (
    NvmlGpus,
    UseThread,
    container_metrics,
    metrics_of,
    processes_of,
)
from atoll.backends.base import wrapper_file
from atoll.metrics.store import decode_batch


def test_a_container_of_version_two(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu io memory pids\n")
    (tmp_path / "cgroup.type").write_text("domain\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    (tmp_path / "memory.current").write_text("4096\n")
    (tmp_path / "pids.current").write_text("7\n")
    (tmp_path / "io.stat").write_text("8:0 rbytes=10 wbytes=20 rios=1\n8:16 rbytes=5 wbytes=0\n")
    assert container_metrics(str(tmp_path)) == {
        "cpu_s": 2.5, "memory": 4096.0, "threads": 7.0, "read_bytes": 15.0, "written_bytes": 20.0,
    }  # fmt: skip


def test_a_container_of_version_one(tmp_path: Path) -> None:
    for folder, name, text in (
        ("cpuacct", "cpuacct.usage", "1500000000\n"),
        ("memory", "memory.usage_in_bytes", "8192\n"),
        ("pids", "pids.current", "3\n"),
        ("blkio", "blkio.throttle.io_service_bytes", "8:0 Read 4\n8:0 Write 6\nTotal 10\n"),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(text)
    assert container_metrics(str(tmp_path)) == {
        "cpu_s": 1.5, "memory": 8192.0, "threads": 3.0, "read_bytes": 4.0, "written_bytes": 6.0,
    }  # fmt: skip


def test_what_a_control_group_does_not_tell_is_absent(tmp_path: Path) -> None:
    assert container_metrics(str(tmp_path)) == {}
    (tmp_path / "cgroup.controllers").write_text("")
    (tmp_path / "cpu.stat").write_text("usage_usec 1")
    assert container_metrics(str(tmp_path)) == {}, "the root of a machine is no rank's"
    (tmp_path / "cpu.stat").unlink()
    (tmp_path / "cgroup.type").write_text("domain\n")
    (tmp_path / "memory.current").write_text("max\n")
    assert container_metrics(str(tmp_path)) == {}


def test_a_command_is_measured_with_what_it_has_started() -> None:
    script = (
        "import subprocess; p = subprocess.Popen(['sleep', '60'])\n"
        "print(p.pid, flush=True); p.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        own = processes_of(process.pid)
        assert set(own) == {process.pid, child}
        figures = metrics_of(own)
        assert figures["processes"] == 2
        assert figures["memory"] > 2**20
        os.kill(child, 9)
    assert processes_of(process.pid) == {}


class StandInNvml:
    """NVML with two GPUs, in place of the driver's library."""

    def __init__(self, *, is_blind: bool = False) -> None:
        self.is_blind = is_blind

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        handle._obj.value = index + 1
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, name: Any, size: int) -> int:
        name.value = b"GPU-%d" % handle.value
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> int:
        rates._obj[0] = 40 * handle.value
        return 3 if self.is_blind else 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, amounts: Any) -> int:
        amounts._obj[2] = 1000 * handle.value
        return 0


def test_gpus_are_those_that_the_rank_may_use() -> None:
    gpus = NvmlGpus(StandInNvml())
    assert gpus.metrics("1", is_alone=False) == {"gpu": 0.8, "gpu_memory": 2000.0}
    assert gpus.metrics("GPU-1", is_alone=False) == {"gpu": 0.4, "gpu_memory": 1000.0}
    assert gpus.metrics("0,1", is_alone=False)["gpu_memory"] == 3000.0
    assert gpus.metrics(None, is_alone=True)["gpu_memory"] == 3000.0
    assert gpus.metrics(None, is_alone=False) == {}, "whose use it is is not known"
    assert gpus.metrics("", is_alone=True) == {}, "it may use none"
    assert NvmlGpus(StandInNvml(is_blind=True)).metrics("0", is_alone=True) == {
        "gpu_memory": 1000.0
    }


def test_without_a_driver_gpus_are_absent() -> None:
    assert NvmlGpus(object()).metrics("0", is_alone=True) == {}
    with pytest.raises(OSError, match="no such"):
        ctypes.CDLL("/no such library.so")


def test_a_measurement_is_a_report_like_others(tmp_path: Path) -> None:
    env = {"ATOLL_RANK": "4", "ATOLL_ATTEMPT": "3"}
    sink = metric_sinks.FolderSink(tmp_path, "x")
    use = UseThread(env, sink, os.getpid(), is_contained=False, is_alone=False)
    use.measure()
    use.measure()
    use.hand_on()
    (line,) = next(tmp_path.iterdir()).read_bytes().splitlines()
    batch = decode_batch(line)
    assert (batch.rank, batch.attempt, batch.number) == (4, 3, 1)
    assert {"machine/cpu", "machine/memory", "machine/threads"} <= set(batch.points)
    assert "machine/gpu" not in batch.points


def test_a_wrapper_without_atoll_measures_its_command(tmp_path: Path) -> None:
    """As the kubelet and Slurm run it: a plain Python, and the files beside it."""
    folder = tmp_path / "files"
    folder.mkdir()
    for part in (process, machine_use, metric_sinks):
        source = Path(str(part.__file__))
        (folder / source.name).write_bytes(source.read_bytes())
    figures = tmp_path / "metrics"
    script = "while ! ls metrics/* >/dev/null 2>&1; do sleep 0.05; done"
    env = {"ATOLL_REPORTS": figures.as_uri(), "ATOLL_RANK": "2", "PATH": os.environ["PATH"]}
    wrapper = [sys.executable, "-S", "-I", str(folder / "process.py"), "--", "sh", "-c", script]
    done = subprocess.run(wrapper, env=env, cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 0
    (file,) = figures.iterdir()
    assert json.loads(file.read_text().splitlines()[0])["rank"] == 2


def test_the_wrapper_of_slurm_measures_its_command(tmp_path: Path) -> None:
    """One archive, run by a plain Python, with its records in a folder."""
    record_store, figures = tmp_path / "place", tmp_path / "metrics"
    record_store.mkdir()
    (tmp_path / "atoll.pyz").write_bytes(wrapper_file())
    script = f"while ! ls {figures}/* >/dev/null 2>&1; do sleep 0.05; done"
    launch = {
        "uid": "u",
        "command": ["sh", "-c", script],
        "env": {"ATOLL_REPORTS": figures.as_uri()},
        "rank_variables": ["ATOLL_RANK"],
        "size_variables": [],
        "node_variables": [],
        "unset": [],
        "meeting": {},
        "folder": "",
        "code": None,
        "stop_grace_s": 5,
        "eviction_s": 30,
        "results": "/nowhere",
        "deadline_s": None,
        "gated": False,
    }
    desired = {"t": "desired", "version": 1, "size": 8, "discarded": {}, "stops": {}, "at": 0.0}
    (record_store / "launch").write_text(json.dumps(launch))
    (record_store / "desired").write_text(json.dumps(desired))
    wrapper = [sys.executable, "-S", "-I", str(tmp_path / "atoll.pyz"), str(record_store), "7", "2"]
    done = subprocess.run(wrapper, timeout=60, check=False)
    assert done.returncode == 0
    (file,) = figures.iterdir()
    batch = decode_batch(file.read_bytes().splitlines()[0])
    assert (batch.rank, batch.attempt) == (7, 2)
    assert "machine/memory" in batch.points


def test_a_command_that_neither_prints_nor_works_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, used_s, printed_at = 100.0, 5.0, 100.0
    monkeypatch.setattr(machine_use.time, "monotonic", lambda: now)
    monkeypatch.setattr(machine_use, "container_metrics", lambda: {"cpu_s": used_s})
    sink: Any = object()
    use = UseThread({}, sink, 1, is_contained=True, is_alone=True, printed_at=lambda: printed_at)
    assert use.unchanged_s() is None, "nobody has looked"
    use.measure()
    assert use.unchanged_s() == 0.0
    now, used_s = 110.0, 5.1  # one hundredth of a core, and a little for the clock
    use.measure()
    assert use.unchanged_s() == 10.0
    now, printed_at = 120.0, 115.0
    use.measure()
    assert use.unchanged_s() == 5.0
    now, used_s = 130.0, 5.3
    use.measure()
    assert use.unchanged_s() == 0.0, "it works"
    blind = UseThread({}, sink, 1, is_contained=True, is_alone=True)
    blind.measure()
    assert blind.unchanged_s() is None, "it may print"
