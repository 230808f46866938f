"""The processes of one replica: they decide together, so that a replica is in a round or out of it.

Process 0 asks the store and decides; the others learn its answer. Each does its own share of the
work, and what went wrong for one has gone wrong for all.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

from atoll.core.errors import DistributedError, ValidationError

T = TypeVar("T")


class Team(Protocol):
    """`share` is called by all processes of the replica in the same order, by one thread each."""

    @property
    def process(self) -> int: ...

    @property
    def processes(self) -> int: ...

    def share(self, message: Any) -> list[Any]:
        """The words of all processes, by process."""


class Solo:
    """A replica of one process."""

    process = 0
    processes = 1

    def share(self, message: Any) -> list[Any]:
        return [message]


class _Text(str):
    """The text of a value that stays in its process."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class _Failure(NamedTuple):
    error: BaseException


def lead(team: Team, decide: Callable[[], T]) -> T:
    """What process 0 decides. Its error is raised by all."""
    if team.processes == 1:
        return decide()
    answer: T = together(team, decide if team.process == 0 else _nothing)[0]
    return answer


def together(team: Team, work: Callable[[], T]) -> list[T]:
    """What the work of each process gave. If one failed, all raise."""
    if team.processes == 1:
        return [work()]
    own: BaseException | None = None
    try:
        message: Any = work()
    except Exception as error:
        own, message = error, _Failure(_portable(error))
    messages: list[T] = team.share(message)
    if own is not None:
        raise own
    for process, each in enumerate(messages):
        if isinstance(each, _Failure):
            each.error.add_note(f"in process {process} of the replica's {team.processes}")
            raise each.error
    return messages


def is_equal(
    team: Team, work: Callable[[], T], message: Callable[[T], Any] = lambda _: None
) -> tuple[T, list[Any]]:
    """What the work gave in this process, once it is done in all, and a word on it from each."""
    retained: list[T] = []

    def run() -> Any:
        retained.append(work())
        return message(retained[0])

    messages = together(team, run)
    return retained[0], messages


def _nothing() -> Any:
    return None


def _portable(error: BaseException) -> BaseException:
    """The error, if it can be sent to another process; else its text."""
    if isinstance(error, ValidationError) and not isinstance(error.value, str | int | float | None):
        error = ValidationError(error.field, _Text(repr(error.value)), error.expected)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return DistributedError(f"{type(error).__name__}: {error}")
    return error
