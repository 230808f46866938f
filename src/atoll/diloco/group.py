"""The processes of one replica.

They talk through gloo groups of their own, one for the training thread and one for the rounds that
may run beside it: collectives of two threads on one group give wrong sums without an error.
"""

from __future__ import annotations

import atexit
import os
import pickle
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


class GroupLost(DistributedError):
    """A process of this replica is gone, or hangs: the replica has to be started again."""

    def __init__(self, problem: BaseException) -> None:
        super().__init__(f"a process of this replica does not answer: {problem}")


class SingleProcess:
    """A replica of one process."""

    process = 0
    processes = 1

    def broadcast_from_leader(self, word: Any) -> Any:
        return word

    def gather(self, value: T) -> list[T]:
        return [value]

    def close(self) -> None:
        pass


class ReplicaGroup:
    """One process of a replica of several, over a gloo group. Used by one thread at a time.

    A failed collective is final, as gloo closes the group: it and all later ones raise GroupLost,
    and the launcher restarts the whole replica.

    The threads of the group end before Python does. They let go of a collective's tensors only
    after it has returned, and take the GIL for that. A thread that asks for the GIL of a Python
    that is ending is unwound, which C++ answers with SIGABRT: a process that has trained to its end
    would count as failed.
    """

    def __init__(self, ranks: Sequence[int], timeout: float) -> None:
        """Made by all processes together. `ranks` are of the default group, the leader's first."""
        import torch.distributed as dist

        self.ranks = list(ranks)
        self.process = self.ranks.index(dist.get_rank())
        self.processes = len(self.ranks)
        # Only the members make it: the default group may be larger than the replica.
        self._group: Any = dist.new_group(
            self.ranks,
            timeout=timedelta(seconds=timeout),
            backend="gloo",
            use_local_synchronization=self.processes < dist.get_world_size(),
        )
        self._problem: Exception | None = None
        self._lock = Lock()
        self._rooms: dict[str, torch.Tensor] = {}
        atexit.register(self.close)

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

    def _call(self, collective: Callable[..., object], *args: object) -> None:
        with self._lock:
            if self._group is None:
                raise GroupLost(DistributedError("the process is ending, and its group has ended"))
            if self._problem is not None:
                raise GroupLost(self._problem)
            try:
                collective(*args, group=self._group)
            except BaseException as error:
                # The frames of torch have the group, which could not end while the error is kept.
                error.with_traceback(None)
                if not isinstance(error, Exception):
                    raise error
                self._problem = error
                raise GroupLost(error) from error

    def broadcast_from_leader(self, word: Any) -> Any:
        """The leader's word, in all processes; the others give None."""
        import torch.distributed as dist

        words = [word]
        self._call(dist.broadcast_object_list, words, self.ranks[0])
        return words[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, in all of them."""
        import torch.distributed as dist

        values: list[Any] = [None] * self.processes
        self._call(dist.all_gather_object, values, value)
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
        self._call(dist.all_to_all_single, into, out, list(sizes), list(counts))
        return list(torch.split(into, list(sizes)))

    def all_gather(self, part: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """The part of each process, of `sizes` values; in memory that the next call uses again."""
        import torch
        import torch.distributed as dist

        most = max(1, *sizes)
        into = list(torch.split(self._room("into", most * len(sizes)), most))
        padded = self._room("out", most)
        padded[: part.numel()] = part
        self._call(dist.all_gather, into, padded)
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


Processes = SingleProcess | ReplicaGroup


class _Failure(NamedTuple):
    error: BaseException


def portable(error: BaseException) -> BaseException:
    """The error, if it can be sent to another process; else its text."""
    if isinstance(error, ValidationError) and not isinstance(error.value, str | int | float | None):
        error = ValidationError(error.field, repr(error.value), error.expected)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return DistributedError(f"{type(error).__name__}: {error}")
    return error


def gather(group: Processes, work: Callable[[], T]) -> list[T]:
    """What the work of each process gave. If one failed, all raise."""
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
    return SingleProcess() if len(ranks) == 1 else ReplicaGroup(ranks, timeout)
