"""The processes of one replica, as its training thread uses them.

They talk through a gloo group of their own: collectives of two threads on one group give wrong sums
without an error, and rounds may run beside the training (`round.replica_group`).
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from atoll.core.errors import DistributedError, ValidationError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

MAX_RETAINED = 1 << 22  # values of a slice whose memory is used again
# How long a process that ends waits for a collective: it takes milliseconds, unless another process
# does not come to it. Torchrun kills what has not ended 30 s after it was told to.
_END_S = 5.0


class OwnGroup:
    """A gloo group whose threads end before Python does.

    They let go of a collective's tensors only after it has returned, and take the GIL for that. A
    thread that asks for the GIL of a Python that is ending is unwound, which C++ answers with
    SIGABRT: a process that has trained to its end would count as failed.
    """

    def __init__(self, ranks: Sequence[int], timeout: float) -> None:
        import torch.distributed as dist

        # Only the members make it: the default group may be larger than the replica.
        self._group: Any = dist.new_group(
            list(ranks),
            timeout=timedelta(seconds=timeout),
            backend="gloo",
            use_local_synchronization=len(ranks) < dist.get_world_size(),
        )
        self._lock = Lock()
        atexit.register(self.close)

    def call(self, collective: Callable[..., object], *args: object) -> None:
        """By one thread at a time. Raises DistributedError once the process is ending."""
        with self._lock:
            if self._group is None:
                raise DistributedError("the process is ending, and its group has ended")
            try:
                collective(*args, group=self._group)
            except BaseException as error:
                # The frames of torch have the group, which could not end while the error is kept.
                raise error.with_traceback(None)  # noqa: B904

    def close(self) -> None:
        """Wait for the threads of the group, unless a collective on it does not return.

        The other processes fail in their next collective.
        """
        import torch.distributed as dist

        if not self._lock.acquire(timeout=_END_S):
            return
        group, self._group = self._group, None
        self._lock.release()
        if group is None:
            return
        with suppress(ValueError):  # the program has destroyed all groups itself
            dist.destroy_process_group(group)
        # The last reference goes with this frame: the destructor waits for the threads.


class SingleProcess:
    """A replica of one process."""

    process = 0
    processes = 1

    def gather(self, value: T) -> list[T]:
        return [value]

    def close(self) -> None:
        pass


class TrainingGroup:
    """One process of a replica of several. Used by one thread at a time."""

    def __init__(self, ranks: Sequence[int], timeout: float) -> None:
        """`ranks` of the default group."""
        import torch.distributed as dist

        self.ranks = list(ranks)
        self.process = self.ranks.index(dist.get_rank())
        self.processes = len(self.ranks)
        self._group = OwnGroup(self.ranks, timeout)
        self._rooms: dict[str, torch.Tensor] = {}

    def close(self) -> None:
        self._group.close()

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in all of them."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.processes
        self._group.call(dist.all_gather_object, values, value)
        return values

    def all_to_all(
        self,
        counts: Sequence[int],
        fill: Callable[[int, torch.Tensor], None],
        sizes: Sequence[int],
    ) -> list[torch.Tensor]:
        """What each process has for this one: `sizes` values. `fill` writes `counts` for each.

        All is in memory that the next call uses again.
        """
        import torch
        import torch.distributed as dist

        out, into = self._room("out", sum(counts)), self._room("into", sum(sizes))
        for process, room in enumerate(torch.split(out, list(counts))):
            fill(process, room)
        self._group.call(dist.all_to_all_single, into, out, list(sizes), list(counts))
        return list(torch.split(into, list(sizes)))

    def all_gather(self, part: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """The part of each process, of `sizes` values; in memory that the next call uses again."""
        import torch
        import torch.distributed as dist

        most = max(1, *sizes)
        into = list(torch.split(self._room("into", most * len(sizes)), most))
        padded = self._room("out", most)
        padded[: part.numel()] = part
        self._group.call(dist.all_gather, into, padded)
        return [each[:size] for each, size in zip(into, sizes, strict=True)]

    def _room(self, name: str, size: int) -> torch.Tensor:
        """Memory that is kept if it is small: slices that come and go would leave holes in it."""
        import torch

        if size > MAX_RETAINED:
            return torch.empty(size, dtype=torch.float32)
        room = self._rooms.get(name)
        if room is None or room.numel() < size:
            room = self._rooms[name] = torch.empty(size, dtype=torch.float32)
        return room[:size]


Processes = SingleProcess | TrainingGroup


class _Failure(NamedTuple):
    error: BaseException


def gather(group: Processes, work: Callable[[], T]) -> list[T]:
    """What the work of each process gave. If one failed, all raise."""
    from atoll.diloco.round.replica_group import portable

    if group.processes == 1:
        return [work()]
    own: BaseException | None = None
    try:
        value: Any = work()
    except Exception as error:
        own, value = error, _Failure(portable(error))
    values: list[T] = group.gather(value)
    if own is not None:
        raise own
    for process, each in enumerate(values):
        if isinstance(each, _Failure):
            each.error.add_note(f"in process {process} of the replica's {group.processes}")
            raise each.error
    return values


def from_leader(group: Processes, decide: Callable[[], T]) -> T:
    """What process 0 decides. Its error is raised by all."""
    answer: Any = gather(group, decide if group.process == 0 else lambda: None)[0]
    return answer  # type: ignore[no-any-return]


# Under torchrun inside a rank these are of the replica, and RANK is of the process.
OF_REPLICA = ("ATOLL_RANK", "REPLICA_RANK")


def find_group(
    process_group: Any, device_mesh: Any, timeout: float, rank: int | None = None
) -> Processes:
    """The processes of the replica: of the mesh, else of the group, else of the default group.

    Collective over them. Raises ValidationError if there must be several and no group is known,
    unless the caller says by `rank` which replica this process is.
    """
    import torch.distributed as dist

    is_up = dist.is_available() and dist.is_initialized()
    if process_group is not None and device_mesh is not None:
        raise ValidationError("device_mesh", "with process_group", "expected one of the two")
    if not is_up:
        if process_group is not None or device_mesh is not None:
            name = "process_group" if process_group is not None else "device_mesh"
            raise ValidationError(name, "given", "expected torch.distributed to be initialised")
        count = os.environ.get("WORLD_SIZE", "1").strip()
        is_many = "TORCHELASTIC_RUN_ID" in os.environ and count.isdigit() and int(count) > 1
        if is_many and rank is None and any(name in os.environ for name in OF_REPLICA):
            raise ValidationError(
                "process_group",
                None,
                f"torchrun started {count} processes: call torch.distributed.init_process_group() "
                "before DiLoCo, so that they are one replica",
            )
        return SingleProcess()
    if device_mesh is not None:
        ranks = sorted(device_mesh.mesh.flatten().tolist())
    else:
        ranks = sorted(dist.get_process_group_ranks(process_group or dist.group.WORLD))
    if dist.get_rank() not in ranks:
        name = "device_mesh" if device_mesh is not None else "process_group"
        raise ValidationError(name, ranks, f"expected this process, rank {dist.get_rank()}, in it")
    return SingleProcess() if len(ranks) == 1 else TrainingGroup(ranks, timeout)
