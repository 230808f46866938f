"""What happened between two statuses, as events; and the status in one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from atoll.core.bench import DONE as BENCH_DONE
from atoll.core.mesh import MeshState
from atoll.core.phase import Phase
from atoll.core.ranks import in_words, is_lost
from atoll.core.status import Event, EventType, Exit, RankStatus, Status


def narrate(old: Status, new: Status, now: float) -> tuple[Event, ...]:
    """The events of one status write, oldest first."""
    told_ones: Iterator[tuple[EventType, str, str]] = _changes(old, new)
    return tuple(Event(type=t, reason=r, message=m, at=now) for t, r, m in told_ones)


def _changes(old: Status, new: Status) -> Iterator[tuple[EventType, str, str]]:
    if old.phase is Phase.NONE:
        yield "Normal", "Accepted", f"{new.world.target} ranks wanted"
    if new.last_resize is not None and new.last_resize != old.last_resize:
        resize = new.last_resize
        yield "Normal", "Scaled", f"target {resize.from_target} -> {resize.to_target}"
    before = {r.rank: r for r in (*old.ranks, *old.retired)}
    after = (*new.ranks, *new.retired)
    started = [r.rank for r in after if r.is_alive and _is_new(before.get(r.rank), r)]
    for rank in after:
        was = before.get(rank.rank)
        if rank.previous is not None and rank.previous not in _told_of(was):
            yield "Warning", "RankRestarting", f"rank {rank.rank}: {in_words(rank.previous)}"
        if rank.exit is not None and (was is None or was.exit != rank.exit):
            yield _ending(rank)
    if started:
        yield "Normal", "RanksStarted", f"started: {_spans(started)}"
    if old.phase is Phase.READY and new.phase is Phase.PENDING and new.world.below_minimum:
        world = new.world
        yield "Warning", "WorldShrunkBelowMin", f"{world.ready} ranks ready, min is {world.min}"
    yield from _beside_the_ranks(old, new)
    if new.failing and not old.failing:
        yield "Warning", new.failing, new.message or new.failing_message or "stopping the rest"
    if new.phase is not old.phase:
        kind: EventType = "Warning" if new.phase is Phase.FAILED else "Normal"
        yield kind, new.phase.capitalize(), told(new)


def _told_of(was: RankStatus | None) -> tuple[Exit | None, ...]:
    return (None, None) if was is None else (was.exit, was.previous)


def _beside_the_ranks(old: Status, new: Status) -> Iterator[tuple[EventType, str, str]]:
    was, mesh = old.mesh.state if old.mesh else MeshState.PENDING, new.mesh
    if mesh is not None and mesh.state not in (was, MeshState.PENDING):
        kind: EventType = "Warning" if mesh.state is MeshState.DEGRADED else "Normal"
        yield kind, f"Mesh{mesh.state}", mesh.message or f"hosts: {mesh.hosts}"
    if new.bench.phase != old.bench.phase and new.bench.phase in BENCH_DONE:
        kind = "Normal" if new.bench.phase == "Succeeded" else "Warning"
        yield kind, f"Bench{new.bench.phase}", new.bench.message


def _is_new(was: RankStatus | None, rank: RankStatus) -> bool:
    return was is None or not was.is_alive or was.attempt != rank.attempt


def _ending(rank: RankStatus) -> tuple[EventType, str, str]:
    ended = rank.exit
    assert ended is not None
    text = f"rank {rank.rank}: {in_words(ended)}"
    if rank.phase == "Succeeded":
        return "Normal", "RankSucceeded", text
    if ended.is_stopped:
        return "Normal", "RankStopped", text
    if is_lost(rank):
        return "Warning", "RankLost", text
    return "Warning", "RankRestarting", text


def told(status: Status) -> str:
    """The status in one sentence."""
    world = status.world
    if status.root_cause is not None:
        root = status.root_cause
        code = "unknown" if root.exit_code is None else root.exit_code
        signal = f" signal={root.signal}" if root.signal else ""
        why = f": {root.message}" if root.message else ""
        return f"rank {root.rank}: exit_code={code} reason={root.termination_reason}{signal}{why}"
    if status.failing_message:
        return status.failing_message
    if status.phase is Phase.SUCCEEDED:
        return f"{world.ready} of {world.target} ranks exited 0"
    if status.phase is Phase.CANCELLED:
        return "cancelled on request"
    alive = sum(r.is_alive for r in status.ranks)
    if status.failing or status.reason == "Cancelling":
        return f"stopping: {alive} ranks still alive"
    return f"{world.ready} of {world.target} ranks ready, min {world.min}"


def _spans(ranks: Sequence[int]) -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
