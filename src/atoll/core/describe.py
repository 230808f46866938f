"""Sentences about how ranks and trainings ended, and events for what changed in a status.

The meaning of each reason is in `core/phase.py`. People read `exited with code 1`; programs that
search logs match `exit_code=1 reason=Error`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence

from atoll.core.mesh import MeshState
from atoll.core.phase import (
    EXIT_REASONS,
    ExitReason,
    Phase,
    PhaseReason,
    describe_meaning,
    describe_reason,
)
from atoll.core.status import (
    BENCH_DONE,
    AttemptStatus,
    Event,
    EventType,
    Exit,
    RankExit,
    RankStatus,
    Status,
    Training,
)
from atoll.core.text import escape_control, limited_spans

TAIL_LINES = 10  # of a log in an error: the traceback of a typical failure ends in them
MAX_LINES = 20  # different ends in one text
MAX_WAITS = 8  # different things that ranks wait for, in one text
MAX_NAMED = 100  # failed ranks that an error names one by one


def events_between(old: Status, new: Status, now: float) -> tuple[Event, ...]:
    """The events of one status write, oldest first."""
    changes = _changes(old, new)
    return tuple(Event(type=t, reason=r, message=m, at=now) for t, r, m in changes)


def _changes(old: Status, new: Status) -> Iterator[tuple[EventType, str, str]]:
    if old.phase is Phase.NONE:
        yield "Normal", "Accepted", f"{_count_ranks(new.world.target)} wanted"
    if new.last_resize is not None and new.last_resize != old.last_resize:
        resize = new.last_resize
        yield "Normal", "Scaled", f"target {resize.from_target} -> {resize.to_target}"
    before = {r.rank: r for r in (*old.ranks, *old.removed_ranks)}
    after = (*new.ranks, *new.removed_ranks)
    started = [r.rank for r in after if r.is_alive and _is_new(before.get(r.rank), r)]
    ends: list[tuple[EventType, str, int, Exit]] = []
    for rank in after:
        was = before.get(rank.rank)
        if rank.previous_exit is not None and rank.previous_exit not in _exits_of(was):
            ends.append(("Warning", "RankRestarting", rank.rank, rank.previous_exit))
        if rank.exit is not None and (was is None or was.exit != rank.exit):
            ends.append((*_kind_of_end(rank), rank.rank, rank.exit))
    yield from _folded(ends)
    if started:
        yield "Normal", "RanksStarted", f"started: {limited_spans(started)}"
    is_ending = new.reason in (PhaseReason.FAILING, PhaseReason.CANCELLING) or new.failing
    is_shrunk = old.phase is Phase.READY and new.phase is Phase.PENDING and not is_ending
    if is_shrunk and new.world.below_minimum:
        world = new.world
        yield (
            "Warning",
            "WorldShrunkBelowMin",
            f"{_count_ranks(world.ready)} ready, min is {world.min}",
        )
    yield from _stalls(old, new)
    for text in new.warnings:
        if text not in old.warnings:
            yield "Warning", "TrainingWarning", text
    yield from _other_changes(old, new)
    if new.failing and not old.failing:
        yield "Warning", new.failing, new.message or new.failing_message or "stopping the rest"
    if new.phase is not old.phase:
        kind: EventType = "Warning" if new.phase is Phase.FAILED else "Normal"
        yield kind, new.phase.capitalize(), describe_status(new)


def _exits_of(was: RankStatus | None) -> tuple[Exit | None, ...]:
    return (None, None) if was is None else (was.exit, was.previous_exit)


def _other_changes(old: Status, new: Status) -> Iterator[tuple[EventType, str, str]]:
    was, mesh = old.mesh.state if old.mesh else MeshState.PENDING, new.mesh
    if mesh is not None and mesh.state not in (was, MeshState.PENDING):
        kind: EventType = "Warning" if mesh.state is MeshState.DEGRADED else "Normal"
        yield kind, f"Mesh{mesh.state}", mesh.message or f"hosts: {mesh.hosts}"
    if mesh is not None and mesh.foreign_writes > (old.mesh.foreign_writes if old.mesh else 0):
        yield (
            "Warning",
            "MeshKeysChanged",
            "somebody else changed keys of the mesh gate in the etcd",
        )
    if new.bench.phase != old.bench.phase and new.bench.phase in BENCH_DONE:
        kind = "Normal" if new.bench.phase == "Succeeded" else "Warning"
        yield kind, f"Bench{new.bench.phase}", new.bench.message


def _stalls(old: Status, new: Status) -> Iterator[tuple[EventType, str, str]]:
    if stopped := sorted(set(new.stalled) - set(old.stalled)):
        is_one = len(stopped) == 1
        text = f"{'has' if is_one else 'have'} reported nothing, printed nothing and used no CPU"
        yield "Warning", "RankStalled", f"{describe_ranks(stopped)} {text} within its stall timeout"
    # One that is to stop may use some CPU for that.
    alive = {r.rank for r in new.ranks if r.is_alive and r.rank < new.world.target}
    if moving := sorted((set(old.stalled) - set(new.stalled)) & alive):
        verb = "moves" if len(moving) == 1 else "move"
        yield "Normal", "RankMoves", f"{describe_ranks(moving)} {verb} again"


def _is_new(was: RankStatus | None, rank: RankStatus) -> bool:
    return was is None or not was.is_alive or was.attempt != rank.attempt


def _kind_of_end(rank: RankStatus) -> tuple[EventType, str]:
    if rank.phase == "Succeeded":
        return "Normal", "RankSucceeded"
    if rank.exit is not None and rank.exit.is_stopped:
        return "Normal", "RankStopped"
    return "Warning", "RankLost" if rank.phase == "Failed" else "RankRestarting"


def _folded(
    ends: Sequence[tuple[EventType, str, int, Exit]],
) -> Iterator[tuple[EventType, str, str]]:
    """One event for each kind of end, however many ranks ended so."""
    kinds: dict[tuple[EventType, str], list[tuple[int, Exit]]] = {}
    for kind, reason, rank, ended in ends:
        kinds.setdefault((kind, reason), []).append((rank, ended))
    for (kind, reason), group in kinds.items():
        yield kind, reason, "; ".join(exit_lines(group))


def exit_lines(ends: Iterable[tuple[int, Exit | RankExit]]) -> list[str]:
    """`ranks 0-3, 7: exit_code=1 reason=Error`: a line for all that ended alike, and at the end one
    for the rest if there are too many."""
    groups: dict[str, list[int]] = {}
    for rank, ended in ends:
        groups.setdefault(_exit_text(ended), []).append(rank)
    lines = [f"{describe_ranks(own)}: {text}" for text, own in list(groups.items())[:MAX_LINES]]
    if remaining := [rank for own in list(groups.values())[MAX_LINES:] for rank in own]:
        lines.append(f"{describe_ranks(remaining)}: in {len(groups) - MAX_LINES} other ways")
    return lines


def waiting_lines(ranks: Iterable[RankStatus]) -> list[str]:
    """`ranks 4-7: no room`: a line for all ranks that wait for the same, and one for the rest."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        if rank.phase == "Pending":
            groups.setdefault(escape_control(rank.message) or "starting", []).append(rank.rank)
    lines = [f"{describe_ranks(own)}: {text}" for text, own in list(groups.items())[:MAX_WAITS]]
    if remaining := [rank for own in list(groups.values())[MAX_WAITS:] for rank in own]:
        others = len(groups) - MAX_WAITS
        lines.append(f"{describe_ranks(remaining)}: wait for {others} other things")
    return lines


def describe_ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {limited_spans(ranks)}"


def describe_exit(ended: Exit | RankExit) -> str:
    """How the rank ended: `was killed by SIGSEGV (segmentation fault), exit code 139`."""
    code, reason = _code_and_reason(ended)
    if code is None:
        text = "ended with an exit code that could not be learned"
    elif ended.signal:
        text = f"was killed by {_describe_signal(ended.signal)}, exit code {code}"
    else:
        text = f"exited with code {code}"
    why = escape_control(describe_reason(reason, ended.message))
    return f"{text}: {why}" if why else text


def describe_attempt(ended: AttemptStatus) -> str:
    """How an attempt that has ended did."""
    return describe_exit(
        Exit(
            code=ended.exit_code,
            at=ended.ended_at or 0.0,
            reason=ended.reason,
            signal=ended.signal,
            message=ended.message,
        )
    )


# Their names say what they mean: "killed by SIGKILL (killed)" says it twice.
PLAIN_SIGNALS = {signal.SIGKILL, signal.SIGTERM, signal.SIGQUIT}


def _describe_signal(name: str) -> str:
    known = signal.Signals.__members__.get(name)
    meaning = None if known is None or known in PLAIN_SIGNALS else signal.strsignal(known)
    return f"{name} ({meaning.lower()})" if meaning else name


def _code_and_reason(ended: Exit | RankExit) -> tuple[int | None, str]:
    if isinstance(ended, RankExit):
        return ended.exit_code, ended.termination_reason
    return ended.code, ended.reason


def exit_line(rank: int, ended: Exit | RankExit) -> str:
    """`rank 1: exit_code=137 reason=OOMKilled signal=SIGKILL: out of memory`."""
    return f"rank {rank}: {_exit_text(ended)}"


def _exit_text(ended: Exit | RankExit) -> str:
    code, reason = _code_and_reason(ended)
    text = f"exit_code={'unknown' if code is None else code} reason={reason}"
    if ended.signal:
        text += f" signal={ended.signal}"
    why = describe_reason(reason, ended.message) if reason in EXIT_REASONS else ended.message
    return f"{text}: {escape_control(why)}" if why else text


def describe_end(training: Training) -> str:
    """How a training ended, in one sentence."""
    status, name = training.status, training.display_name
    if status.phase is Phase.SUCCEEDED:
        return f"{name} succeeded: {describe_phase(status)}"
    if status.phase is Phase.CANCELLED:
        is_removed = training.deletion_requested_at is not None and not training.spec.cancel
        return f"{name} was cancelled" + (": it is being removed" if is_removed else "")
    return f"{name} failed: {describe_cause(status) or describe_phase(status)}"


def describe_cause(status: Status) -> str:
    """The failure that brought a training down, with all ranks that failed alike; may be empty.

    `both ranks failed the same way: ValueError: oops (rank 1 first)`.
    """
    cause = status.root_cause
    if cause is None:
        return ""
    times = cause.restart_count
    restarts = f"after {times} restart{'' if times == 1 else 's'}" if times else ""
    group = ranks_with_same_failure(status)
    if len(group) == 1:
        after = f" {restarts}" if restarts else ""
        return f"rank {cause.rank} failed first{after}: it {describe_exit(cause)}"
    first = ", ".join(filter(None, (f"rank {cause.rank} first", restarts)))
    return f"{_who(group, status)} failed the same way: {_failure_text(cause)} ({first})"


def ranks_with_same_failure(status: Status) -> list[int]:
    """The ranks that failed as the root cause did, that one included."""
    cause = status.root_cause
    if cause is None:
        return []
    return [
        e.rank for e in status.rank_exits if e.rank == cause.rank or _has_same_failure(e, cause)
    ]


def describe_others(status: Status) -> list[str]:
    """What became of the ranks that are not in `describe_cause`, a line for each kind of end.

    `rank 2 failed after it: ConnectionError: …`, `ranks 4-7 were stopped by atoll`.
    """
    cause, group = status.root_cause, set(ranks_with_same_failure(status))
    groups: dict[str, list[int]] = {}
    for ended in status.rank_exits:
        if ended.rank in group or not ended.is_failure:
            continue
        after = " after it" if cause is not None and ended.collateral else ""
        text = f"failed{after}: {_failure_text(ended)}"
        groups.setdefault("" if is_stopped_by_atoll(ended) else text, []).append(ended.rank)
    stopped = groups.pop("", [])
    lines = [f"{describe_ranks(own)} {text}" for text, own in list(groups.items())[:MAX_LINES]]
    if remaining := [rank for own in list(groups.values())[MAX_LINES:] for rank in own]:
        lines.append(f"{describe_ranks(remaining)} failed in {len(groups) - MAX_LINES} other ways")
    if stopped:
        verb = "was" if len(stopped) == 1 else "were"
        lines.append(f"{describe_ranks(stopped)} {verb} stopped by atoll")
    return lines


def is_stopped_by_atoll(ended: RankExit) -> bool:
    """Whether atoll stopped the rank. One that failed because another one did was not stopped."""
    return ended.termination_reason == ExitReason.STOPPED


def _has_same_failure(ended: RankExit, cause: RankExit) -> bool:
    is_own = ended.is_failure and not is_stopped_by_atoll(ended)
    return is_own and _failure_text(ended) == _failure_text(cause)


def _failure_text(ended: RankExit) -> str:
    """The exception that ended a rank, or else how it ended."""
    if ended.termination_reason == ExitReason.ERROR and ended.message:
        return escape_control(ended.message)
    return describe_exit(ended)


def _who(ranks: Sequence[int], status: Status) -> str:
    if len(ranks) < len(status.rank_exits):
        return describe_ranks(ranks)
    return "both ranks" if len(ranks) == 2 else f"all {len(ranks)} ranks"


def describe_failure(training: Training, *, has_tail: bool = True) -> str:
    """Why a training failed: the cause first, then each failed rank, then its last lines."""
    status, cause = training.status, training.status.root_cause
    bad = [ended for ended in status.rank_exits if ended.is_failure]
    if cause is not None:
        bad.sort(key=lambda ended: ended.rank != cause.rank)
    if len(bad) <= MAX_NAMED:
        reasons = [exit_line(ended.rank, ended) for ended in bad]
    else:
        reasons = exit_lines((ended.rank, ended) for ended in bad)
    if cause is None and (status.phase is Phase.FAILED or not reasons):
        reasons.insert(0, describe_phase(status))  # no rank is to blame
    if len(ranks_with_same_failure(status)) > 1:
        reasons.insert(0, describe_cause(status))
    text = f"training {training.display_name!r} {status.phase.value}: {'; '.join(reasons)}"
    if cause is not None and cause.log_tail and has_tail:
        text += f"\nlast lines of rank {cause.rank}:"
        text += "".join(f"\n  {escape_control(line)}" for line in cause.log_tail[-TAIL_LINES:])
    if cause is not None and cause.stack:
        text += f"\nwhere rank {cause.rank} was:"
        text += "".join(f"\n  {escape_control(line)}" for line in cause.stack)
    return text


def describe_phase(status: Status) -> str:
    """Why a training is in its phase: its message, or else the meaning of its reason."""
    why = status.message or describe_meaning(status.reason, PhaseReason) or status.phase.value
    return escape_control(why)


def describe_status(status: Status) -> str:
    """A status in one sentence."""
    if status.phase is Phase.NONE:  # its world is not known yet either
        return "not started yet"
    world = status.world
    if len(ranks_with_same_failure(status)) > 1:
        return describe_cause(status)
    if status.root_cause is not None:
        return exit_line(status.root_cause.rank, status.root_cause)
    if status.failing_message:
        return status.failing_message
    if status.phase is Phase.SUCCEEDED:
        return f"{world.ready} of {world.target} ranks exited 0"
    if status.phase is Phase.CANCELLED:
        return "cancelled on request"
    alive = sum(r.is_alive for r in status.ranks)
    if status.failing or status.reason == PhaseReason.CANCELLING:
        return f"stopping: {_count_ranks(alive)} still alive"
    stalled = f"; stalled: {describe_ranks(sorted(status.stalled))}" if status.stalled else ""
    return f"{world.ready} of {world.target} ranks ready, min {world.min}{stalled}"


def _count_ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"
