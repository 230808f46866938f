"""A way into a rank: a command beside it, signals to it, and its stacks."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from atoll.core.checks import check_bounds
from atoll.core.errors import Conflict, ValidationError
from atoll.core.model import Model, SpecModel
from atoll.core.spec import RankNumber

if TYPE_CHECKING:
    from atoll.core.ports import Executor
    from atoll.core.status import RankStatus, Training

EXEC_TIMEOUT_S = 60.0  # a look at a rank; longer ones are asked for
MAX_EXEC_S = 3600.0  # a request that takes longer does not survive most proxies
MAX_STDIN_BYTES = 2**19  # in base64 it still fits into the body of a request
TIMED_OUT = 124  # as timeout(1) has it


class ExecRequest(SpecModel, frozen=True):
    """A command to run in the environment and directory of a rank."""

    command: Annotated[list[str], Meta(min_length=1)]
    """The command and its arguments."""
    rank: RankNumber = 0
    """Number of the rank."""
    stdin: bytes = b""
    """What the command reads, in base64."""
    timeout_s: Annotated[float, Meta(ge=0.1, le=MAX_EXEC_S)] = EXEC_TIMEOUT_S
    """Seconds after which the command is killed."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.command or not all(isinstance(argument, str) for argument in self.command):
            raise ValidationError("command", self.command, "expected a command and its arguments")
        if len(self.stdin) > MAX_STDIN_BYTES:
            expected = f"expected at most {MAX_STDIN_BYTES} bytes"
            raise ValidationError("stdin", f"{len(self.stdin)} bytes", expected)


class ExecResult(Model, frozen=True, omit_defaults=False):
    """How a command in a rank ended, and what it printed."""

    exit_code: int
    """Exit code; 128 and the number of the signal that killed it; 124 after the timeout."""
    stdout: str
    """What it printed."""
    stderr: str
    """What it printed as errors."""
    is_cut: bool = False
    """Whether it printed more than is kept, 1 MiB of each."""


class ExecTarget(Model, frozen=True, omit_defaults=False):
    """Where a rank can be entered by the caller: its process, or the container in its pod."""

    rank: int
    """Number of the rank."""
    host: str | None
    """Host on which it runs."""
    pid: int | None
    """Its process on that host."""
    kubectl: list[str] = []
    """Arguments of `kubectl exec` that name its container."""


class KillRequest(SpecModel, frozen=True):
    """A signal for a rank."""

    rank: RankNumber
    """Number of the rank."""
    signal: Annotated[str, Meta(max_length=20)] = "SIGKILL"
    """Name or number of the signal."""

    def __post_init__(self) -> None:
        check_bounds(self)
        signal_of(self.signal)


class KillResult(Model, frozen=True, omit_defaults=False):
    """The process that was sent the signal."""

    rank: int
    """Number of the rank."""
    signal: str
    """Name of the signal."""
    host: str | None
    """Host on which the rank runs."""
    pid: int | None
    """Its process on that host."""


class Frame(Model, frozen=True):
    """One call. `code` is its line in the source, where that can be read."""

    file: str
    line: int
    function: str
    code: str = ""


class ThreadStack(Model, frozen=True):
    """The calls of one thread, the innermost first."""

    name: str = ""
    frames: list[Frame] = []


class ProcessStack(Model, frozen=True):
    """One process of a rank: the threads, the main one first, or the reason why there are none."""

    pid: int
    command: str = ""
    state: str = ""
    threads: list[ThreadStack] = []
    reason: str = ""


class RankStacks(Model, frozen=True):
    """The stacks of one rank: of its own process first, then of its children."""

    rank: int
    """Number of the rank."""
    attempt: int = 0
    """Number of the attempt."""
    at: float = 0.0
    """When they were taken, in seconds since 1970."""
    cause: str = ""
    """Why atoll took them by itself; empty if somebody asked."""
    processes: list[ProcessStack] = []
    """The processes of the rank."""
    reason: str = ""
    """Why there are none."""


class FoldedStack(Model, frozen=True):
    """Processes of ranks that are at the same place."""

    ranks: str
    """Which ranks: 0-2, 5."""
    count: int
    """Number of processes."""
    is_child: bool = False
    """Whether these are processes that the ranks started."""
    where: str = ""
    """The place, in one line; why it is unknown, if it is."""
    stack: list[str] = []
    """The calls of the main thread, the innermost first."""
    message: str = ""
    """Which ranks are where, in one line."""


class StackList(Model, frozen=True, omit_defaults=False):
    """The stacks of ranks."""

    items: list[RankStacks] = []
    """The ranks."""
    folded: list[FoldedStack] = []
    """The same, with equal stacks in one line: the most frequent first."""
    message: str = ""
    """What would show more."""


class StackRequest(SpecModel, frozen=True):
    """Which ranks to take the stacks of."""

    ranks: Annotated[list[RankNumber], Meta(max_length=10_000)] = []
    """Numbers of ranks; none: all that run."""


def signal_of(text: str) -> signal.Signals:
    """The signal for `SIGTERM`, `term` or `15`. Raises ValidationError."""
    name = text.strip().upper()
    try:
        if name.isdigit():
            return signal.Signals(int(name))
        return signal.Signals["SIG" + name.removeprefix("SIG")]
    except (KeyError, ValueError):
        expected = "expected the name or number of a signal, such as SIGKILL, TERM or 15"
        raise ValidationError("signal", text, expected) from None


def running_rank(training: Training, rank: int) -> RankStatus:
    """Raises ValidationError for a rank that cannot be, and Conflict for one that does not run."""
    highest = training.spec.world_size.max - 1
    if rank > highest:
        expected = f"expected at most {highest}: the ranks of {training.name}"
        raise ValidationError("rank", rank, expected)
    for one in training.status.ranks:
        if one.rank == rank and one.is_alive:
            return one
    raise Conflict(f"rank {rank} of {training.name!r} does not run")


def running_ranks(training: Training, numbers: Sequence[int]) -> list[RankStatus]:
    """Those of these numbers, or all without any, that run. Raises as `running_rank` does."""
    if numbers:
        return [running_rank(training, number) for number in sorted(set(numbers))]
    ranks = [rank for rank in training.status.ranks if rank.is_alive]
    if not ranks:
        raise Conflict(f"no rank of {training.name!r} runs")
    return ranks


def check_action(executor: Executor, training: Training, action: str) -> None:
    """Raises Conflict if the executor has no way into its ranks for this: `exec`, `kill`."""
    for limit in executor.SUPPORTS:
        if limit.field == action:
            raise Conflict(f"atoll {action}: the executor {training.executor!r}: {limit.reason}")
