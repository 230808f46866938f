"""What this machine can hold, and whose turn it is: processes, CPUs, memory, GPUs, slots.

A rank is counted as the least that one can be: a process, the files that its supervisor keeps open
for it, and the memory of a small program. What real ranks need beyond that is not known.

CPUs and memory that a rank asks for are counted when it is admitted, and not fenced: it may use
more. A rank that asks for none counts as none.

A rank that asks for GPUs has its own, for as long as it lives. Which rank has which is written into
the desired state, so a control plane that starts anew knows it, and a rank that is started again
finds the same ones.

Trainings that want more ranks than they have wait in a queue, the oldest first. What the first in
it wants is reserved until it has it all: so no training waits for ever while smaller ones pass.
Others may start beside that, in their order, with what is left.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import os
import re
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from atoll.core.errors import ValidationError
from atoll.core.ports import Key
from atoll.core.spec import Resources
from atoll.core.text import format_bytes, parse_quantity

FILES_A_RANK = 3  # its pidfd, its output and its log, in the supervisor
SPARE_FILES = 64  # of the supervisor: its journal, clients, rendezvous and Python's own
SPARE_PROCESSES = 8  # the supervisor's own, and a few for everybody else
BYTES_A_RANK = 2**20  # what `sleep` takes; any Python takes ten times as much
UNLIMITED = 2**62  # and above: what kernels write for no limit
VARIABLE = "CUDA_VISIBLE_DEVICES"
MAX_DEVICES = 1024  # a typing error is not a list of a million

SLOTS, CPU, MEMORY = "slots", "cpu", "memory"
MILLI = 1000  # CPUs are counted in thousandths, as Kubernetes has them: 500m

Assignment = dict[int, list[str]]  # devices by rank
Amounts = Mapping[str, int]  # of slots, thousandths of CPUs and bytes of memory


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

    def totals(self) -> dict[str, int]:
        """CPUs and memory that all ranks together may ask for."""
        sizes = [limit for _, limit, _ in self._memory()]
        memory = {MEMORY: min(sizes)} if sizes else {}
        return {CPU: len(os.sched_getaffinity(0)) * MILLI, **memory}

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
            yield Bound(
                limit // BYTES_A_RANK, f"{name} is {format_bytes(limit)}, 1 MiB a rank at least"
            )

    def _now(self) -> Iterator[Bound]:
        running = self._tasks()
        for name, limit in self._process_limits():
            used = running if name.startswith("kernel.") else self._used(name, running)
            left = max(limit - used - SPARE_PROCESSES, 0)
            yield Bound(left, f"{used} of {limit} processes ({name}) are in use")
        for name, limit, used in self._memory():
            left = max(limit - used, 0)
            yield Bound(
                left // BYTES_A_RANK,
                f"{format_bytes(left)} of {format_bytes(limit)} ({name}) are free",
            )

    def _process_limits(self) -> Iterator[tuple[str, int]]:
        for name in ("pid_max", "threads-max"):
            yield from _limit(f"kernel.{name}", self._number(f"proc/sys/kernel/{name}"))
        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        if os.geteuid() != 0 and limit != resource.RLIM_INFINITY:  # root is not held to it
            yield "RLIMIT_NPROC", limit
        for folder in self._cgroups("pids"):
            yield from _limit(f"{folder}/pids.max", self._number(f"{folder}/pids.max"))

    def _used(self, name: str, running: int) -> int:
        """Processes that count against that limit."""
        if name == "RLIMIT_NPROC":
            return self._own_tasks()
        return self._number(f"{Path(name).parent}/pids.current") or running

    def _file_limits(self) -> Iterator[tuple[str, int]]:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if hard != resource.RLIM_INFINITY:
            yield "RLIMIT_NOFILE (hard)", hard
        yield from _limit("fs.file-max", self._number("proc/sys/fs/file-max"))

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


def _limit(name: str, limit: int | None) -> Iterator[tuple[str, int]]:
    if limit is not None:
        yield name, limit


def _upwards(top: str, path: str) -> Iterator[str]:
    parts = [part for part in path.split("/") if part]
    for depth in range(len(parts), -1, -1):
        yield "/".join([top, *parts[:depth]])


class DeviceShare(NamedTuple):
    """What a training asks for: so many for each rank, of these devices."""

    each: int
    of: list[str]


class Devices:
    """Devices and who has them. One that is listed twice may be used by two ranks."""

    def __init__(self, ids: Sequence[str] = (), *, is_configured: bool = False) -> None:
        self.ids = list(ids)
        self.is_configured = is_configured  # by `[executors.local] gpus`, and not found
        self._assigned: dict[str, Assignment] = {}  # by uid of the training

    def share(self, count: int, env: Mapping[str, str]) -> DeviceShare | None:
        """None: it asks for none, or no device is known here.

        The training's own CUDA_VISIBLE_DEVICES is the list that it may choose from.
        """
        own = None if VARIABLE not in env else parse_ids(env[VARIABLE])
        if not count or not (self.ids or own):
            return None
        if own is None or not self.ids:
            return DeviceShare(count, self.ids or own or [])
        return DeviceShare(count, [device for device in self.ids if device in own])

    def assign(self, uid: str, size: int, share: DeviceShare) -> Assignment | None:
        """Devices for ranks `0..size-1`, and for the higher ones that still have theirs; None if
        there are too few."""
        assigned = dict(self._assigned.get(uid, {}))
        free = self.free(share)
        for rank in range(size):
            if rank not in assigned:
                if len(free) < share.each:
                    return None
                assigned[rank], free = free[: share.each], free[share.each :]
        self._assigned[uid] = assigned
        return assigned

    def keep(self, uid: str, ranks: int) -> bool:
        """Higher ranks give theirs back. Returns whether some did."""
        assigned = self._assigned.get(uid, {})
        removed = [rank for rank in assigned if rank >= ranks]
        for rank in removed:
            del assigned[rank]
        if not assigned:
            self._assigned.pop(uid, None)
        return bool(removed)

    def take_over(self, uid: str, assigned: Mapping[str, Sequence[str]]) -> None:
        """What the desired state says of an earlier control plane's choice."""
        if assigned:
            self._assigned[uid] = {int(rank): list(devices) for rank, devices in assigned.items()}

    def describe(self, share: DeviceShare, host: str, least: int) -> str:
        """Why ranks wait."""
        used = len(share.of) - len(self.free(share))
        message = f"{used} of {len(share.of)} GPUs of {host} are in use, and each rank takes"
        if len(share.of) < least * share.each:
            return f"{message} {share.each}: {least} ranks need {least * share.each}"
        return f"{message} {share.each}"

    def free(self, share: DeviceShare) -> list[str]:
        """Those that no rank has."""
        used = Counter(
            device
            for assigned in self._assigned.values()
            for devices in assigned.values()
            for device in devices
        )
        free = []
        for device in share.of:
            if used[device]:
                used[device] -= 1
            else:
                free.append(device)
        return free


def parse_ids(text: str) -> list[str]:
    """As CUDA reads the variable: what comes after a negative number does not count."""
    ids = []
    for part in text.split(","):
        if not part.strip() or part.strip().startswith("-"):
            break
        ids.append(part.strip())
    return ids


def ids_of(field: str, value: object) -> list[str]:
    """A number of devices, or a list of their ids, as `[executors.local]` may say it."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_DEVICES:
        return [str(device) for device in range(value)]
    if isinstance(value, list) and len(value) <= MAX_DEVICES:
        ids = [str(device) if type(device) is int else device for device in value]
        if all(isinstance(device, str) and re.fullmatch(r"[\w:./-]+", device) for device in ids):
            return ids
    raise ValidationError(field, value, "expected a number of GPUs, or a list such as [0, 1]")


def count_visible(env: Mapping[str, str], machine: int) -> int:
    """How many devices a process sees, on a machine with so many."""
    return len(parse_ids(env[VARIABLE])) if VARIABLE in env else machine


def present(env: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """Those that this process may use by its environment, else all of NVIDIA's."""
    if VARIABLE in env:
        return parse_ids(env[VARIABLE])
    cards: Iterable[Path] = (root / "proc/driver/nvidia/gpus").glob("*")
    count = len(list(cards)) or len(
        [path for path in (root / "dev").glob("nvidia*") if path.name[6:].isdigit()]
    )
    return [str(device) for device in range(count)]


class Waiting(NamedTuple):
    """A position in the queue. They compare by age."""

    created_at: float
    uid: str
    key: Key
    wanted: int  # ranks beyond those that it has
    needed: int  # of them, without which it does not go on
    each: Amounts  # that one rank takes of what is limited
    share: DeviceShare | None = None

    @property
    def position(self) -> tuple[float, str]:
        return self.created_at, self.uid


class Turn(NamedTuple):
    """How many more ranks a training may have now."""

    waiting: Waiting
    ranks: int


class Capacity(NamedTuple):
    """What nobody has. `devices` are those of a share; what is not in `amounts` has no limit."""

    amounts: Amounts
    devices: Callable[[DeviceShare], list[str]]


class StartQueue:
    def __init__(self) -> None:
        self._in_order: list[tuple[float, str]] = []
        self._waiting: dict[str, Waiting] = {}

    def __contains__(self, uid: str) -> bool:
        return uid in self._waiting

    def is_first(self, uid: str) -> bool:
        return bool(self._in_order) and self._in_order[0][1] == uid

    def put(self, waiting: Waiting) -> bool:
        """Its position is by age. Returns whether it wants less than before."""
        before = self._waiting.get(waiting.uid)
        if before is None:
            bisect.insort(self._in_order, waiting.position)
        self._waiting[waiting.uid] = waiting
        return before is not None and waiting.wanted < before.wanted

    def remove(self, uid: str) -> bool:
        """Returns whether it was there."""
        waiting = self._waiting.pop(uid, None)
        if waiting is None:
            return False
        del self._in_order[bisect.bisect_left(self._in_order, waiting.position)]
        return True

    def turns(self, free: Capacity) -> Iterator[Turn]:
        """Everybody who may have something, in order.

        It ends where nothing is left, however many wait behind.
        """
        left, reserved = dict(free.amounts), Counter[str]()
        for number, (_, uid) in enumerate(self._in_order):
            waiting = self._waiting[uid]
            share, ranks = waiting.share, min(waiting.wanted, fitting(waiting.each, left))
            usable: list[str] = []
            if share is not None:
                usable = _without(free.devices(share), reserved)
                ranks = min(ranks, len(usable) // share.each)
            if ranks:
                yield Turn(waiting, ranks)
            if number == 0:
                ranks = waiting.wanted
            elif ranks < waiting.needed:
                continue
            if share is not None:
                reserved.update(usable[: ranks * share.each])
            for name, amount in waiting.each.items():
                if name in left:
                    left[name] -= ranks * amount
            if left.get(SLOTS, 1) <= 0:
                return

    def ranks_for(self, uid: str, free: Capacity) -> int:
        """How many more ranks that training may have now."""
        return next((turn.ranks for turn in self.turns(free) if turn.waiting.uid == uid), 0)


def fitting(each: Amounts, left: Amounts) -> int:
    """How many ranks fit into what is left."""
    fits = (left[name] // amount for name, amount in each.items() if amount and name in left)
    return max(0, min(fits, default=sys.maxsize))


def requested(resources: Resources) -> dict[str, int]:
    """What one rank asks for, with the slot that it takes."""
    amounts = {SLOTS: 1}
    if resources.cpu is not None:
        amounts[CPU] = math.ceil(parse_quantity(resources.cpu) * MILLI)
    if resources.memory is not None:
        amounts[MEMORY] = math.ceil(parse_quantity(resources.memory))
    return amounts


def amount_text(name: str, amount: float) -> str:
    """`2 slots`, `1.5 CPUs`, `4 GiB of memory`."""
    if name == MEMORY:
        return f"{format_bytes(amount)} of memory"
    return f"{amount / MILLI:g} CPUs" if name == CPU else f"{amount:g} slots"


def describe_use(name: str, used: int, limit: int, each: int, host: str, least: int) -> str:
    """Why ranks wait: `2 of 4 CPUs of HOST are in use, and each rank takes 3`.

    Where `least` ranks never fit, it says so.
    """
    taken = format_bytes(used) if name == MEMORY else f"{used / (1 if name == SLOTS else MILLI):g}"
    one = format_bytes(each) if name == MEMORY else f"{each / MILLI:g}"
    text = f"{taken} of {amount_text(name, limit)} of {host} are in use"
    text += "" if name == SLOTS else f", and each rank takes {one}"
    if least * each <= limit:
        return text
    needed = amount_text(name, least * each)
    return f"{text}: {least} ranks need {needed}, and 'atoll limits' sets the limit"


def describe_lack(name: str, limit: int, each: int, host: str) -> str:
    """Why ranks behind others wait, without what changes while they do."""
    return f"{host} has too little left of {amount_text(name, limit)}: a rank takes " + (
        format_bytes(each) if name == MEMORY else f"{each / MILLI:g}"
    )


def _without(devices: list[str], reserved: Counter[str]) -> list[str]:
    """A device that is listed twice may be reserved once."""
    left, reserved = [], reserved.copy()
    for device in devices:
        if reserved[device]:
            reserved[device] -= 1
        else:
            left.append(device)
    return left
