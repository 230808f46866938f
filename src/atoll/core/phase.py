"""Phases and reasons: the state machine of a training as one table, and why things ended.

Nothing heavy is imported: what supervises ranks needs the reasons.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

# The vocabulary of ends: each reason a rank or a training can have, with what it means.
#
# The values travel, are stored and are compared by programs; they never change. A reason that is
# not in these tables comes from a newer release and is shown as it is. Only the standard library is
# imported: what supervises ranks has nothing else.


class _Reason(StrEnum):
    meaning: str

    def __new__(cls, value: str, meaning: str) -> _Reason:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member


class ExitReason(_Reason):
    """How one attempt of a rank ended: `Exit.reason`, `RankExit.termination_reason`."""

    COMPLETED = "Completed", "it exited with code 0"
    ERROR = "Error", "it exited with a code other than 0"
    SIGNAL = "Signal", "it was killed by a signal"
    OOM_KILLED = "OOMKilled", "out of memory"
    STOPPED = "Stopped", "stopped by atoll"
    COMMAND_NOT_FOUND = "CommandNotFound", "no such command"
    CANNOT_RUN = "CannotRun", "the command cannot be run"
    FROZEN = "Frozen", "it stopped answering"
    SUPERVISOR_LOST = "SupervisorLost", "its supervisor was lost"
    EVICTED = "Evicted", "evicted from its host"
    PREEMPTED = "Preempted", "preempted by something of higher priority"
    REJECTED = "Rejected", "its host would not start it"
    HOST_LOST = "HostLost", "its host stopped answering"
    DELETED = "Deleted", "it was deleted by somebody"
    INIT_FAILED = "InitFailed", "a container that runs before it failed"
    START_GATE_FAILED = "StartGateFailed", "its start gate cannot run"
    DEADLINE_EXCEEDED = "DeadlineExceeded", "still running at the deadline"
    TIME_LIMIT = "TimeLimit", "its backend's time limit ended it"
    VANISHED = "Vanished", "it disappeared"
    UNKNOWN = "Unknown", "how it ended could not be learned"


class PhaseReason(_Reason):
    """Why a training is in its phase: `Status.reason`."""

    RANK_FAILED = "RankFailed", "too many ranks failed for good"
    DEADLINE_EXCEEDED = "DeadlineExceeded", "it was still running at its deadline"
    EXECUTOR_REFUSED = "ExecutorRefused", "its executor cannot run it"
    EXECUTOR_LOST = "ExecutorLost", "its executor has lost all record of the ranks"
    BENCH_NOT_MEASURED = "BenchNotMeasured", "the link that it requires could not be measured"
    LINK_TOO_SLOW = "LinkTooSlow", "the link is slower than it requires"
    INVALID_SPEC = "InvalidSpec", "its spec is not valid"
    ALL_RANKS_EXITED = "AllRanksExited", "every rank that is wanted exited with code 0"
    CANCEL_REQUESTED = "CancelRequested", "it was cancelled on request"
    FAILING = "Failing", "it has failed, and its ranks are being stopped"
    CANCELLING = "Cancelling", "it is being cancelled, and its ranks are being stopped"
    QUORUM_REACHED = "QuorumReached", "at least min ranks run or have exited with code 0"
    WAITING_FOR_CAPACITY = "WaitingForCapacity", "its ranks wait to be started together"
    BELOW_MINIMUM = "BelowMinimum", "fewer than min ranks are ready"


EXIT_REASONS = frozenset(ExitReason)


class ConditionType(_Reason):
    """What else holds of a training: `Condition.type`. A phase says where it is in its life."""

    READY = "Ready", "its phase is ready"
    COMPLETE = "Complete", "it has succeeded, as `kubectl wait` asks for Jobs"
    SUCCEEDED = "Succeeded", "its phase is succeeded"
    FAILED = "Failed", "its phase is failed"
    CANCELLED = "Cancelled", "its phase is cancelled"
    ADMITTED = "Admitted", "its start gate is open: ranks may run"
    BELOW_MINIMUM = "BelowMinimum", "fewer than min ranks are ready"
    STALLED = "Stalled", "some ranks have been idle for longer than the stall timeout"
    WARNINGS = "Warnings", "something is wrong with how it trains; the message says what"
    RANKS_LOST = "RanksLost", "some ranks failed for good, and it continues without them"
    EXITS_FROM_BACKEND = (
        "ExitsFromBackend",
        "some exits are the backend's: ranks left no record",
    )
    MESH_CAPABLE = "MeshCapable", "every host reaches every other"
    DEGRADED_MESH = "DegradedMesh", "some hosts do not reach each other"
    EXECUTOR_MISSING = "ExecutorMissing", "its executor is not configured"
    EXECUTOR_UNREACHABLE = "ExecutorUnreachable", "its executor does not answer"
    BACKEND_FAILING = "BackendFailing", "an action on its executor fails again and again"
    STATUS_INCOMPLETE = "StatusIncomplete", "the API server refused parts of its status"
    STATUS_STALE = "StatusStale", "statuses cannot be written: this one may be out of date"


# What these mean, the exit code says already.
_EXPLAINED_BY_CODE = frozenset(
    {ExitReason.COMPLETED, ExitReason.ERROR, ExitReason.SIGNAL, ExitReason.UNKNOWN, ""}
)


def describe_reason(reason: str, message: str = "") -> str:
    """Why a rank ended, beyond its exit code: `out of memory (limit 4Gi)`; may be empty."""
    meaning = "" if reason in _EXPLAINED_BY_CODE else describe_meaning(reason, ExitReason)
    if meaning and message and not message.startswith(meaning):
        return f"{meaning} ({message})"
    return message or meaning


def describe_meaning(reason: str, reasons: type[_Reason]) -> str:
    """What a reason means; one that is not known, as it is."""
    return next((known.meaning for known in reasons if known == reason), reason)


def table(reasons: type[_Reason], name: str = "reason") -> str:
    """A vocabulary as a table in Markdown."""
    rows = [f"| `{reason}` | {reason.meaning} |" for reason in reasons]
    return "\n".join([f"| {name} | meaning |", "|---|---|", *rows])


def listing(reasons: type[_Reason]) -> str:
    """A vocabulary in one line, for the description of a schema."""
    return "; ".join(f"{reason}: {reason.meaning}" for reason in reasons)


class Phase(StrEnum):
    """Where a training is. `""` before the first status."""

    NONE = ""
    PENDING = "pending"
    READY = "ready"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED})

# The promise to clients; terminal phases have no way out.
EDGES: dict[Phase, frozenset[Phase]] = {
    Phase.NONE: frozenset({Phase.PENDING, Phase.READY}) | TERMINAL,
    Phase.PENDING: frozenset({Phase.READY}) | TERMINAL,
    Phase.READY: frozenset({Phase.PENDING}) | TERMINAL,
    Phase.SUCCEEDED: frozenset(),
    Phase.FAILED: frozenset(),
    Phase.CANCELLED: frozenset(),
}


class Tally(NamedTuple):
    """A world counted: all that the phase depends on."""

    min: int
    wanted: int  # ranks of the target that have not failed for good
    ready: int  # of those, running or exited 0
    succeeded: int  # of those, exited 0
    alive: int  # processes of any rank not known to be gone
    is_failing: bool  # a decision to fail was taken; ranks are being stopped
    is_cancelling: bool
    is_gate_open: bool


class Rule(NamedTuple):
    """A training that is counted so is in this phase, for this reason."""

    when: Callable[[Tally], bool]
    phase: Phase
    reason: str


# Row order is policy. A training ends only when nothing of it is alive, so a terminal phase
# means that every exit is known and no process is left. The last row always matches.
RULES = (
    Rule(lambda t: t.is_failing and t.alive == 0, Phase.FAILED, PhaseReason.RANK_FAILED),
    Rule(
        lambda t: t.succeeded == t.wanted and t.wanted >= t.min and t.alive == 0 and t.is_gate_open,
        Phase.SUCCEEDED,
        PhaseReason.ALL_RANKS_EXITED,
    ),
    Rule(lambda t: t.is_cancelling and t.alive == 0, Phase.CANCELLED, PhaseReason.CANCEL_REQUESTED),
    Rule(lambda t: t.is_failing, Phase.PENDING, PhaseReason.FAILING),
    Rule(lambda t: t.is_cancelling, Phase.PENDING, PhaseReason.CANCELLING),
    Rule(lambda t: t.ready >= t.min, Phase.READY, PhaseReason.QUORUM_REACHED),
    Rule(lambda t: not t.is_gate_open, Phase.PENDING, PhaseReason.WAITING_FOR_CAPACITY),
    Rule(lambda t: True, Phase.PENDING, PhaseReason.BELOW_MINIMUM),
)


def advance(current: Phase, tally: Tally) -> Rule | None:
    """The first rule that holds, or None where `current` is terminal and nothing may change."""
    return None if current.is_terminal else next(rule for rule in RULES if rule.when(tally))


def diagram() -> str:
    """The machine as a Mermaid state diagram, printed from the table."""
    lines = ["stateDiagram-v2"]
    for start, ends in EDGES.items():
        for end in sorted(ends):
            lines.append(f"    {start or '[*]'} --> {end}")
    lines += [f"    {phase} --> [*]" for phase in sorted(TERMINAL)]
    return "\n".join(lines)
