"""How a training ended, in words: the first failing rank, why, and its last lines."""

from __future__ import annotations

import signal

from atoll.cli.show import counted
from atoll.core.phase import Phase
from atoll.core.status import RankExit, Training

REASONS = {
    "CannotRun": "it cannot be run",
    "CommandNotFound": "no such command",
    "Evicted": "evicted from its host",
    "Frozen": "it stopped answering",
    "OOMKilled": "out of memory",
    "Preempted": "its host was taken away",
    "SupervisorLost": "its supervisor was lost",
    "Vanished": "it disappeared",
}
TAIL_LINES = 10


def exit_in_words(ended: RankExit) -> str:
    """`killed by SIGSEGV (segmentation fault), exit code 139`."""
    if ended.exit_code is None:
        text = "ended with an exit code that could not be learned"
    elif ended.signal:
        text = f"was killed by {_signal(ended.signal)}, exit code {ended.exit_code}"
    else:
        text = f"exited with code {ended.exit_code}"
    why = REASONS.get(ended.termination_reason)
    if why is not None:
        text += f": {why}"
    return f"{text} ({ended.message})" if ended.message else text


def _signal(name: str) -> str:
    meaning = None
    if name in signal.Signals.__members__:
        meaning = signal.strsignal(signal.Signals[name])
    return f"{name} ({meaning.lower()})" if meaning else name


def verdict(training: Training) -> str:
    """The end in one sentence."""
    status, name = training.status, training.name
    if status.phase is Phase.SUCCEEDED:
        return f"{name} succeeded: {status.message or 'every rank exited 0'}"
    if status.phase is Phase.CANCELLED:
        is_removed = training.deletion_requested_at is not None and not training.spec.cancel
        return f"{name} was cancelled" + (": it is being removed" if is_removed else "")
    if status.root_cause is None:
        return f"{name} failed: {status.message or status.reason}"
    cause = status.root_cause
    restarts = f" after {counted(cause.restart_count, 'restart')}" if cause.restart_count else ""
    return f"{name} failed: rank {cause.rank} failed first{restarts}: it {exit_in_words(cause)}"


def report(training: Training) -> str:
    """The verdict, and for a failure what is needed to understand it."""
    cause = training.status.root_cause
    lines = [verdict(training)]
    if training.status.phase is not Phase.FAILED or cause is None:
        return lines[0]
    others = [e.rank for e in training.status.rank_exits if e.is_failure and e.rank != cause.rank]
    if others:
        lines.append(f"  ranks that fell or were stopped after it: {', '.join(map(str, others))}")
    if cause.log_tail:
        lines.append(f"  last lines of rank {cause.rank}:")
        lines += [f"  | {line}" for line in cause.log_tail[-TAIL_LINES:]]
    else:
        lines.append(f"  rank {cause.rank} printed nothing")
    return "\n".join(lines)
