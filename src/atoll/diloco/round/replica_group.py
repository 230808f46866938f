"""The processes of one replica: the leader runs the machine, the others follow its words.

A *word* is what the leader sends for each effect on values: the calls on local memory since the
last word, and the effect. All make the calls and perform their share; the leader gathers results,
errors and wishes to leave. The last word of a call is its result or error, so all return or raise
alike. Nobody but the leader looks at a clock or at the store's listings.

A failed collective is final: gloo closes the group. Later calls raise, and the launcher restarts
the whole replica.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from atoll.core.errors import DistributedError, ValidationError
from atoll.diloco.group import OwnGroup
from atoll.diloco.round.effects import RunState


class Word(NamedTuple):
    """`effect` None: the call is over, with `result` or `error`. `is_empty`: nothing to perform.

    `state`: of the run, after a call.
    """

    calls: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    effect: Any = None
    is_empty: bool = False
    result: Any = None
    error: BaseException | None = None
    state: RunState | None = None


class Reply(NamedTuple):
    """What one process answers to a word."""

    result: Any = None
    error: BaseException | None = None
    is_leaving: bool = False


class ReplicaGroup(Protocol):
    """The processes of one replica, in one order; used by one thread of each."""

    @property
    def process(self) -> int: ...

    @property
    def processes(self) -> int: ...

    def broadcast_from_leader(self, word: Any) -> Any:
        """The leader's word, in all processes; the others give None."""

    def gather(self, reply: Any) -> list[Any]:
        """The replies of all processes, in the leader; the others get []."""

    def gather_all(self, value: Any) -> list[Any]:
        """The values of all processes, in all of them."""

    def close(self) -> None:
        """This process ends: collectives of the others fail from now on."""


class SingleProcess:
    """A replica of one process."""

    process = 0
    processes = 1

    def broadcast_from_leader(self, word: Any) -> Any:
        return word

    def gather(self, reply: Any) -> list[Any]:
        return [reply]

    def gather_all(self, value: Any) -> list[Any]:
        return [value]

    def close(self) -> None:
        pass


class GlooGroup:
    """Processes of a torch process group, over a gloo group of its own.

    Made by all of them together, in the constructor of what uses it: a new group is a collective.
    `ranks` are those of the default group, the leader's first.
    """

    def __init__(self, ranks: Sequence[int], timeout_s: float) -> None:
        import torch.distributed as dist

        self._dist: Any = dist
        self._group = OwnGroup(ranks, timeout_s)
        self._leader = ranks[0]
        self.process = ranks.index(dist.get_rank())
        self.processes = len(ranks)
        self._problem: BaseException | None = None

    def broadcast_from_leader(self, word: Any) -> Any:
        words = [word]
        self._collect(self._dist.broadcast_object_list, words, self._leader)
        return words[0]

    def gather(self, reply: Any) -> list[Any]:
        replies: list[Any] | None = [None] * self.processes if self.process == 0 else None
        self._collect(self._dist.gather_object, reply, replies, self._leader)
        return replies or []

    def gather_all(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.processes
        self._collect(self._dist.all_gather_object, values, value)
        return values

    def close(self) -> None:
        self._group.close()

    def _collect(self, collective: Callable[..., object], *args: object) -> None:
        if self._problem is not None:
            raise GroupLost(self._problem)
        try:
            self._group.call(collective, *args)
        except Exception as error:
            self._problem = error
            raise GroupLost(error) from error


class GroupLost(DistributedError):
    """A process of this replica is gone, or hangs: the replica has to be started again."""

    def __init__(self, problem: BaseException) -> None:
        super().__init__(f"a process of this replica does not answer: {problem}")


def portable(error: BaseException) -> BaseException:
    """The error, if it can be sent to another process; else its text."""
    if isinstance(error, ValidationError) and not isinstance(error.value, str | int | float | None):
        error = ValidationError(error.field, repr(error.value), error.expected)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return DistributedError(f"{type(error).__name__}: {error}")
    return error
