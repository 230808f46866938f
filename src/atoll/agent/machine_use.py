"""What a rank uses of its machine: CPU, memory, threads, bytes, GPUs; absent if nobody can tell.

From /proc for the processes of a rank, from the files of its control group (version 1 or 2) where a
rank has a container of its own, from NVML for GPUs. With `agent/process.py` and `agent/wrapper.py`
it travels to images without atoll, so it needs Python 3.7 and its standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from atoll.agent.metric_sinks import Sink

EVERY_S = 5.0  # a measurement reads /proc once: 2 ms with 200 processes
MAX_PENDING = 60  # measurements that wait to be sent: ten minutes of them
CGROUP = "/sys/fs/cgroup"
MACHINE = "machine/"
IDLE_CORE = 0.01  # a process that only waits wakes up now and then
IDLE_S = 0.02  # as much again for the resolution of the kernel's clock

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
# Fields of /proc/pid/stat, counted from the state on.
PARENT, GROUP, SESSION, TIMES, THREADS = 1, 2, 3, slice(11, 15), 17


def stat_fields(pid: int) -> list[str]:
    """From the state on; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def processes_of(pid: int) -> dict[int, list[str]]:
    """The processes that a command has started, and itself, with the fields of their stat."""
    living = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = stat_fields(int(name))
            if fields and fields[0] not in ("Z", "X"):
                living[int(name)] = fields
    own = {
        each
        for each, fields in living.items()
        if each == pid or str(pid) in (fields[GROUP], fields[SESSION])
    }
    is_new = True
    while is_new:
        children = {each for each, fields in living.items() if int(fields[PARENT]) in own} - own
        own |= children
        is_new = bool(children)
    return {each: living[each] for each in own}


def cpu_seconds_of(pids: Mapping[int, list[str]]) -> float:
    """With children that were waited for: their time has become the parent's."""
    return sum(sum(map(int, fields[TIMES])) for fields in pids.values()) * _TICK_S


def metrics_of(pids: Mapping[int, list[str]]) -> dict[str, float]:
    """Sums over the processes. Memory that they share counts once."""
    metrics = {
        "cpu_s": cpu_seconds_of(pids),
        "threads": float(sum(int(fields[THREADS]) for fields in pids.values())),
        "processes": float(len(pids)),
    }
    sizes = [size for size in map(_memory, pids) if size is not None]
    if sizes:
        own = sum(resident - shared for resident, shared in sizes)
        metrics["memory"] = float((own + max(shared for _, shared in sizes)) * _PAGE)
    traffic = [amounts for amounts in map(_traffic, pids) if amounts is not None]
    if len(traffic) == len(pids):
        metrics["read_bytes"] = float(sum(read for read, _ in traffic))
        metrics["written_bytes"] = float(sum(written for _, written in traffic))
    return metrics


def _memory(pid: int) -> tuple[int, int] | None:
    """Pages that are in memory, and how many of them may be shared."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            _, resident, shared = map(int, file.read().split()[:3])
    except (OSError, ValueError):
        return None
    return resident, shared


def _traffic(pid: int) -> tuple[int, int] | None:
    try:
        with open(f"/proc/{pid}/io", encoding="ascii") as file:
            amounts = dict(line.split(": ") for line in file.read().splitlines())
        return int(amounts["read_bytes"]), int(amounts["write_bytes"])
    except (OSError, ValueError, KeyError):
        return None


def container_metrics(root: str = CGROUP) -> dict[str, float]:
    """What the control group that is seen as the root uses: that of the container."""
    if os.path.exists(f"{root}/cgroup.controllers"):
        if not os.path.exists(f"{root}/cgroup.type"):
            return {}  # the root of the machine: this is no container
        used = _entries(f"{root}/cpu.stat").get("usage_usec")
        metrics = {
            "cpu_s": None if used is None else used / 1e6,
            "memory": _number(f"{root}/memory.current"),
            "threads": _number(f"{root}/pids.current"),
            "read_bytes": _io_v2(f"{root}/io.stat", "rbytes"),
            "written_bytes": _io_v2(f"{root}/io.stat", "wbytes"),
        }
    else:
        used = _number(f"{root}/cpuacct/cpuacct.usage")
        served = f"{root}/blkio/blkio.throttle.io_service_bytes"
        metrics = {
            "cpu_s": None if used is None else used / 1e9,
            "memory": _number(f"{root}/memory/memory.usage_in_bytes"),
            "threads": _number(f"{root}/pids/pids.current"),
            "read_bytes": _io_v1(served, "Read"),
            "written_bytes": _io_v1(served, "Write"),
        }
    return {name: value for name, value in metrics.items() if value is not None}


def _text(path: str) -> str | None:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def _number(path: str) -> float | None:
    try:
        return float(_text(path) or "")
    except ValueError:
        return None


def _entries(path: str) -> dict[str, float]:
    lines = [line.split() for line in (_text(path) or "").splitlines()]
    return {parts[0]: float(parts[1]) for parts in lines if len(parts) == 2 and parts[1].isdigit()}


def _io_v2(path: str, name: str) -> float | None:
    text = _text(path)
    if text is None:
        return None
    tokens = [token.partition("=") for token in text.split()]
    return float(sum(int(value) for key, _, value in tokens if key == name and value.isdigit()))


def _io_v1(path: str, name: str) -> float | None:
    text = _text(path)
    if text is None:
        return None
    lines = [line.split() for line in text.splitlines()]
    return float(sum(int(p[2]) for p in lines if len(p) == 3 and p[1] == name and p[2].isdigit()))


class NvmlGpus:
    """The GPUs of this machine, by NVML; it is not there without a driver."""

    def __init__(self, library: Any = None) -> None:
        """`library`: NVML as ctypes has it; unset: that of the driver, if there is one."""
        self._nvml = library
        self._handles: list[Any] = []
        self._names: list[str] = []  # their UUIDs
        try:
            import ctypes

            self._c = ctypes
            if library is None:
                self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
            if self._nvml.nvmlInit_v2() == 0:
                self._find()
        except (ImportError, OSError, AttributeError):
            self._handles = []

    def _find(self) -> None:
        c, count = self._c, self._c.c_uint()
        if self._nvml.nvmlDeviceGetCount_v2(c.byref(count)):
            return
        for index in range(count.value):
            handle, name = c.c_void_p(), c.create_string_buffer(96)
            if self._nvml.nvmlDeviceGetHandleByIndex_v2(index, c.byref(handle)):
                continue
            self._nvml.nvmlDeviceGetUUID(handle, name, 96)
            self._handles.append(handle)
            self._names.append(name.value.decode(errors="replace"))

    def metrics(self, visible: str | None, *, is_alone: bool) -> dict[str, float]:
        """`gpu`, the GPUs' worth of time in use, and `gpu_memory` of the GPUs that `visible` names,
        as CUDA_VISIBLE_DEVICES does. Without it whose use it is is known only of who is alone."""
        handles = self._visible_handles(visible) if visible is not None else list(self._handles)
        if not handles or (visible is None and not is_alone):
            return {}
        metrics = {}
        used = [value for value in map(self._used, handles) if value is not None]
        memory = [value for value in map(self._memory, handles) if value is not None]
        if len(used) == len(handles):
            metrics["gpu"] = sum(used)
        if len(memory) == len(handles):
            metrics["gpu_memory"] = sum(memory)
        return metrics

    def _visible_handles(self, visible: str) -> list[Any]:
        chosen = []
        for token in visible.split(","):
            token = token.strip()
            if token.isdigit() and int(token) < len(self._handles):
                chosen.append(self._handles[int(token)])
            elif token.startswith("GPU-"):
                chosen += [
                    handle
                    for handle, name in zip(self._handles, self._names)  # noqa: B905, Python 3.7
                    if name.startswith(token)
                ]
            else:
                break  # as CUDA does: what follows is not seen
        return chosen

    def _used(self, handle: Any) -> float | None:
        rates = (self._c.c_uint * 2)()  # of the cores, and of the memory bus, in percent
        failed = self._nvml.nvmlDeviceGetUtilizationRates(handle, self._c.byref(rates))
        return None if failed else rates[0] / 100.0

    def _memory(self, handle: Any) -> float | None:
        amounts = (self._c.c_ulonglong * 3)()  # total, free, used
        failed = self._nvml.nvmlDeviceGetMemoryInfo(handle, self._c.byref(amounts))
        return None if failed else float(amounts[2])


def idle_s(seconds: float) -> float:
    """Up to so much CPU time in so many seconds is none to speak of."""
    return IDLE_CORE * seconds + IDLE_S


class UseThread(threading.Thread):
    """Measures a rank again and again, and hands that on as its reports are. Never raises."""

    def __init__(
        self,
        env: Mapping[str, str],
        sink: Sink,
        pid: int,
        *,
        is_contained: bool,
        is_alone: bool,
        printed_at: Callable[[], float] | None = None,
    ) -> None:
        """`is_contained`: the control group here is of this rank alone. `said_at`: when the rank
        last printed, by the monotonic clock; without it nobody knows whether it stands still."""
        super().__init__(name="atoll-machine-use", daemon=True)
        self._env, self._sink, self._pid = env, sink, pid
        self._is_contained, self._is_alone = is_contained, is_alone
        self._gpus = NvmlGpus()
        self._over = threading.Event()
        self._before: tuple[float, float] | None = None
        self._printed_at = printed_at
        self._used_at: float | None = None  # when it last used the CPU
        self._points: list[tuple[float, dict[str, float]]] = []
        self._number = 0
        self._due = 0.0
        self._id = f"machine-{time.time_ns():x}-{os.getpid():x}"

    def run(self) -> None:
        while not self._over.wait(EVERY_S if self._number or self._points else 0.5):
            with contextlib.suppress(Exception):  # metrics must never end a rank
                self.measure()
                self.hand_on()

    def close(self) -> None:
        self._over.set()

    def measure(self) -> None:
        metrics = container_metrics() if self._is_contained else {}
        if "cpu_s" not in metrics:
            metrics = metrics_of(processes_of(self._pid))
        now, used_s = time.monotonic(), metrics.pop("cpu_s")
        if self._before is not None and now > self._before[0]:
            metrics["cpu"] = max(0.0, used_s - self._before[1]) / (now - self._before[0])
        if self._before is None or used_s - self._before[1] > idle_s(now - self._before[0]):
            self._used_at = now
        self._before = (now, used_s)
        visible = self._env.get("CUDA_VISIBLE_DEVICES")
        metrics.update(self._gpus.metrics(visible, is_alone=self._is_alone))
        self._points.append((time.time(), metrics))
        if len(self._points) > MAX_PENDING:
            self._points = self._points[::2]

    def unchanged_s(self) -> float | None:
        """For how long the rank has printed nothing and used no CPU, up to the last measurement."""
        if self._printed_at is None or self._used_at is None or self._before is None:
            return None
        return max(0.0, self._before[0] - max(self._used_at, self._printed_at()))

    def hand_on(self) -> None:
        if time.monotonic() < self._due:
            return
        batch = batch_of(self._env, self._id, self._number + 1, self._points, self.unchanged_s())
        try:
            pause_s = self._sink.hand_on(batch)
        except OSError:
            self._due = time.monotonic() + self._sink.patience_s
            return
        self._due = time.monotonic() + max(0.0, pause_s - EVERY_S / 2)
        self._number, self._points = self._number + 1, []


def batch_of(
    env: Mapping[str, str],
    writer: str,
    number: int,
    points: Iterable[tuple[float, Any]],
    unchanged_s: float | None = None,
) -> bytes:
    """As `agent/metrics.py:batch_of` writes what a rank tells."""
    series: dict[str, list[list[float | None]]] = {}
    for at, metrics in points:
        for name, value in metrics.items():
            series.setdefault(MACHINE + name, []).append([at, None, value])
    document = {
        "rank": int(env.get("ATOLL_RANK", "0")),
        "attempt": int(env.get("ATOLL_ATTEMPT", "1")),
        "process": 0,
        "id": writer,
        "n": number,
        "skipped": 0,
        "metrics": series,
    }
    if unchanged_s is not None:
        document["idle_s"] = round(unchanged_s, 3)
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def watch_use(
    env: Mapping[bytes, bytes],
    pid: int,
    *,
    is_contained: bool,
    is_alone: bool,
    sinks: Any,
    printed_at: Callable[[], float] | None = None,
) -> UseThread | None:
    """Measures the rank with this environment, if it reports anywhere.

    `sinks` is the module `agent/metric_sinks.py`.
    """
    try:
        plain = {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()}
        owner = "{}.{}.machine.{:x}".format(
            plain.get("ATOLL_RANK", "0"), plain.get("ATOLL_ATTEMPT", "1"), time.time_ns()
        )
        sink = sinks.sink_of(plain, owner)
        if sink is None:
            return None
        thread = UseThread(
            plain, sink, pid, is_contained=is_contained, is_alone=is_alone, printed_at=printed_at
        )
        thread.start()
        return thread
    except Exception:  # metrics must never end a rank
        return None
