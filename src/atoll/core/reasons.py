"""The vocabulary of ends: each reason a rank or a training can have, with what it means.

The values travel, are stored and are compared by programs; they never change. A reason that is
not in these tables comes from a newer release and is shown as it is. Only the standard library is
imported: what supervises ranks has nothing else.
"""

from __future__ import annotations

from enum import StrEnum


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
    DELETED = "Deleted", "its pod was deleted by somebody"
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


def table(reasons: type[_Reason]) -> str:
    """A vocabulary as a table in Markdown."""
    rows = [f"| `{reason}` | {reason.meaning} |" for reason in reasons]
    return "\n".join(["| reason | meaning |", "|---|---|", *rows])


def listing(reasons: type[_Reason]) -> str:
    """A vocabulary in one line, for the description of a schema."""
    return "; ".join(f"{reason}: {reason.meaning}" for reason in reasons)
