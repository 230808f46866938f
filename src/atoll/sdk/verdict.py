"""What a state of a training means to those who wait for it, in words and in numbers. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from atoll.core.phase import Phase
from atoll.core.status import RankExit, Training, WorldStatus


def verdict(training: Training) -> str:
    """Why it failed, the cause first, then each bad rank."""
    status = training.status
    bad = [rank_exit for rank_exit in status.rank_exits if rank_exit.is_failure]
    cause = status.root_cause
    if cause is not None:
        bad.sort(key=lambda rank_exit: rank_exit.rank != cause.rank)
    told = "; ".join(map(_exit_text, bad))
    if cause is None and (status.phase is Phase.FAILED or not told):
        # No rank is to blame: what was it then?
        told = "; ".join(filter(None, (status.message or status.reason, told)))
    text = f"training {training.name!r} {status.phase.value}" + (f": {told}" if told else "")
    if cause is not None and cause.log_tail:
        tail = "\n".join(f"  {line}" for line in cause.log_tail[-10:])
        text += f"\nlast lines of rank {cause.rank}:\n{tail}"
    return text


def _exit_text(bad: RankExit) -> str:
    code = "unknown" if bad.exit_code is None else bad.exit_code
    text = f"rank {bad.rank}: exit_code={code} reason={bad.termination_reason}"
    return f"{text} ({bad.message})" if bad.message else text


def late(training: Training, needed: int, timeout: float) -> str:
    status = training.status
    waits = [f"rank {r.rank}: {r.message}" for r in status.ranks if r.phase == "Pending"][:3]
    text = f"training {training.name!r}: {status.world.ready} of {needed} ranks"
    text += f" ready after {timeout:g} s (phase {status.phase.value or 'not seen yet'})"
    return text + "".join(f"; {line}" for line in waits if not line.endswith(": "))


def world_of(training: Training) -> WorldStatus:
    """What was seen, against what is wanted now: a scale shows at once in `target`."""
    size = training.spec.world_size
    ready = training.status.world.ready
    return replace(
        training.status.world,
        target=size.target,
        min=size.min,
        max=size.max,
        below_minimum=ready < size.min,
    )
