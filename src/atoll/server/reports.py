"""What a training says of itself: logs, events, metrics, usage."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Annotated

from msgspec import Meta

from atoll.core.errors import Gone
from atoll.core.metrics import measured
from atoll.core.model import Model, encode
from atoll.core.ports import Store
from atoll.core.status import Event, LogLine, Training
from atoll.core.usage import usage as used
from atoll.server.admission import executor_of
from atoll.server.operations import (
    NDJSON,
    Answer,
    Call,
    Query,
    json_answer,
    stream_answer,
)

BEAT = b"\n"  # an empty line: readers of line-delimited JSON skip it
CUT = b'{"cut":true}\n'  # the server goes away; ask again for the rest

Rank = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class LogQuery(Query, frozen=True):
    rank: list[Rank] = []
    tail: Annotated[int, Meta(ge=0, le=10_000_000)] | None = None
    follow: bool = False


class EventQuery(Query, frozen=True):
    since: Annotated[float, Meta(ge=0, le=1e12)] | None = None


class EventList(Model, frozen=True):
    items: list[Event]


async def logs(call: Call) -> Answer:
    query: LogQuery = call.query
    training = await call.plane.store.get(call.key)
    executor = executor_of(training, call.plane.executors)
    end = End(training)
    lines = executor.logs(
        training,
        ranks=query.rank or None,
        tail=query.tail,
        follow=end.is_reached if query.follow else None,
    )
    watched = end.watched(call.plane.store) if query.follow else contextlib.nullcontext()
    source = _encoded(lines, watched)
    return stream_answer(call.plane.streams.run(source, beat=BEAT, cut=CUT), NDJSON)


class End:
    """Whether a training is over, kept up to date while its logs are followed."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._is_over = training.status.phase.is_terminal

    def is_reached(self) -> bool:
        return self._is_over

    @contextlib.asynccontextmanager
    async def watched(self, store: Store) -> AsyncIterator[None]:
        task = asyncio.create_task(self._follow(store))
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _follow(self, store: Store) -> None:
        seen = self._training
        while not self._is_over:
            try:
                async for change in store.watch(seen.resource_version, seen.key):
                    self._is_over = change.is_removed or change.training.status.phase.is_terminal
                    if self._is_over:
                        return
                return
            except Gone:
                seen = await store.get(seen.key)
                self._is_over = seen.status.phase.is_terminal


async def _encoded(
    lines: AsyncIterator[LogLine], watched: AbstractAsyncContextManager[None]
) -> AsyncIterator[bytes]:
    async with watched:
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
