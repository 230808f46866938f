"""What a training says of itself: logs, events, metrics, usage."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Annotated

from msgspec import Meta

from atoll.core.errors import Temporary
from atoll.core.model import Model, encode
from atoll.core.status import Event, LogLine, Training
from atoll.core.usage import usage as used
from atoll.server.operations import (
    NDJSON,
    Answer,
    Call,
    Query,
    json_answer,
    stream_answer,
)

BEAT = b"\n"  # an empty line: readers of line-delimited JSON skip it

Rank = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class LogQuery(Query, frozen=True):
    rank: list[Rank] = []
    tail: Annotated[int, Meta(ge=0, le=10_000_000)] | None = None
    follow: bool = False


class EventQuery(Query, frozen=True):
    since: Annotated[float, Meta(ge=0, le=1e12)] | None = None


class EventList(Model, frozen=True):
    items: list[Event]


class Metrics(Model, frozen=True, omit_defaults=False):
    """Counted from what was seen of the training. Durations in seconds."""

    ready: int
    target: int
    ranks_running: int
    ranks_succeeded: int
    ranks_failed: int
    restarts: int
    resizes: int
    generation: int
    observed_generation: int
    age_s: float
    running_s: float
    time_to_first_rank_s: float | None
    rank_seconds: float
    gpu_seconds: float


async def logs(call: Call) -> Answer:
    query: LogQuery = call.query
    training = await call.plane.store.get(call.key)
    executor = call.plane.executors.get(training.spec.executor)
    if executor is None:
        raise Temporary(f"the executor {training.spec.executor!r} is not set up on this server")
    lines = executor.logs(training, ranks=query.rank or None, tail=query.tail, follow=query.follow)
    return stream_answer(call.plane.streams.run(_encoded(lines), beat=BEAT), NDJSON)


async def _encoded(lines: AsyncIterator[LogLine]) -> AsyncIterator[bytes]:
    try:
        async for line in lines:
            yield encode(line) + b"\n"
    finally:
        if hasattr(lines, "aclose"):
            await lines.aclose()


async def events(call: Call) -> Answer:
    found = await call.plane.store.events(call.key, since=call.query.since)
    return json_answer(EventList(items=list(found)))


async def usage(call: Call) -> Answer:
    training = await call.plane.store.get(call.key)
    return json_answer(used(training, time.time()))


async def metrics(call: Call) -> Answer:
    training = await call.plane.store.get(call.key)
    return json_answer(measured(training, time.time()))


def measured(training: Training, now: float) -> Metrics:
    status = training.status
    until = now if status.ended_at is None else status.ended_at
    spent = used(training, now)
    started = status.started_at
    phases = [rank.phase for rank in status.ranks]
    targets = [point.target for point in status.world_size_history]
    return Metrics(
        ready=status.world.ready,
        target=training.spec.world_size.target,
        ranks_running=phases.count("Running"),
        ranks_succeeded=phases.count("Succeeded"),
        ranks_failed=phases.count("Failed"),
        restarts=sum(rank.restarts for rank in (*status.ranks, *status.retired)),
        resizes=sum(a != b for a, b in zip(targets, targets[1:], strict=False)),
        generation=training.generation,
        observed_generation=status.observed_generation,
        age_s=max(0.0, now - training.created_at),
        running_s=0.0 if started is None else max(0.0, until - started),
        time_to_first_rank_s=None if started is None else max(0.0, started - training.created_at),
        rank_seconds=spent.rank_seconds,
        gpu_seconds=spent.gpu_seconds,
    )
