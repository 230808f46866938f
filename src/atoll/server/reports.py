"""Reports on a training over HTTP: logs, events, metrics, usage; and the list of executors."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Annotated

from msgspec import Meta

from atoll.core.errors import Gone, NotFound, Temporary, ValidationError
from atoll.core.metrics import measured
from atoll.core.model import Model, encode
from atoll.core.ports import Executor, Resuming, Store
from atoll.core.spec import LineCount, RankNumber
from atoll.core.status import Event, LogLine, Training
from atoll.core.usage import usage as used
from atoll.server.admission import executor_of
from atoll.server.background import beside
from atoll.server.executors import probed
from atoll.server.operations import (
    NDJSON,
    Answer,
    ApiCall,
    Query,
    json_answer,
    stream_answer,
)
from atoll.server.results import printed_logs, without_results

log = logging.getLogger(__name__)

BEAT = b"\n"  # an empty line: readers of line-delimited JSON skip it


class LogPlaces(Model, frozen=True):
    """The first line of a followed log that has a `tail`: where the log of each rank begins."""

    places: dict[int, int]


class LogCut(Model, frozen=True):
    """The last line if the server or the backend went away: ask again for the rest."""

    cut: bool


CUT = encode(LogCut(cut=True)) + b"\n"


class ReportQuery(Query, frozen=True):
    # Answer only for the training with this uid: another one may have its name by now.
    uid: Annotated[str, Meta(max_length=200)] | None = None


class LogQuery(ReportQuery, frozen=True):
    rank: list[RankNumber] = []
    tail: LineCount | None = None
    follow: bool = False
    # Continue after these lines, as `rank:at,…`: the `at` of a line, or the `places` sent first.
    places: (
        Annotated[str, Meta(pattern="^[0-9]{1,10}:[0-9]{1,19}(,[0-9]{1,10}:[0-9]{1,19})*$")] | None
    ) = None


class EventQuery(ReportQuery, frozen=True):
    since: Annotated[float, Meta(ge=0, le=1e12)] | None = None


class EventList(Model, frozen=True):
    items: list[Event]


async def logs(call: ApiCall) -> Answer:
    query: LogQuery = call.query
    training = await _training(call)
    executor = executor_of(training, call.plane)
    end = End(training)
    follow = end.is_reached if query.follow else None
    lines, head = await _open_logs(executor, training, query, follow)
    watched = end.watched(call.plane.store) if query.follow else contextlib.nullcontext()
    source = _encoded(lines, watched, head)
    return stream_answer(call.plane.streams.run(source, beat=BEAT, cut=CUT), NDJSON)


async def executors(call: ApiCall) -> Answer:
    return json_answer(await probed(call.plane.executors, call.plane.setup))


class End:
    """Whether a training is over, kept up to date while its logs are followed."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._is_over = training.status.phase.is_terminal

    def is_reached(self) -> bool:
        return self._is_over

    def watched(self, store: Store) -> AbstractAsyncContextManager[None]:
        return beside(self._follow(store))

    async def _follow(self, store: Store) -> None:
        training = self._training
        while not self._is_over:
            try:
                async for change in store.watch(training.resource_version, training.key):
                    self._is_over = change.is_removed or change.training.status.phase.is_terminal
                    if self._is_over:
                        return
                return
            except Gone:
                training = await store.get(training.key)
                self._is_over = training.status.phase.is_terminal


async def _open_logs(
    executor: Executor, training: Training, query: LogQuery, follow: Callable[[], bool] | None
) -> tuple[AsyncIterator[LogLine], bytes]:
    """The log lines, and the first line of the answer: the places to resume from, or nothing."""
    ranks = query.rank or None
    if query.places is not None and not isinstance(executor, Resuming):
        expected = f"the executor {training.executor!r} has none: leave them out"
        raise ValidationError("places", query.places, expected)
    if not isinstance(executor, Resuming) or (follow is None and query.places is None):
        tail = query.tail
        return printed_logs(executor, training, ranks=ranks, tail=tail, follow=follow), b""
    places: dict[int, int] = {}
    if query.tail is not None:
        places = await executor.log_places(training, query.tail, ranks=ranks)
    head = encode(LogPlaces(places=places)) + b"\n" if follow and query.tail is not None else b""
    for pair in query.places.split(",") if query.places else ():
        rank, _, at = pair.partition(":")
        places[int(rank)] = int(at)
    lines = executor.logs_after(training, places, ranks=ranks, follow=follow)
    return without_results(lines), head


async def _encoded(
    lines: AsyncIterator[LogLine], watched: AbstractAsyncContextManager[None], head: bytes
) -> AsyncIterator[bytes]:
    async with watched:
        try:
            if head:
                yield head
            async for line in lines:
                yield encode(line) + b"\n"
        except Temporary as error:
            log.info("logs: %s", error)
            yield CUT
        finally:
            if hasattr(lines, "aclose"):
                await lines.aclose()


async def _training(call: ApiCall) -> Training:
    """The training the request names. Raises NotFound if its `uid` is another."""
    training = await call.plane.store.get(call.key)
    if call.query.uid not in (None, training.uid):
        raise NotFound("training", call.name)
    return training


async def events(call: ApiCall) -> Answer:
    await _training(call)
    newest_first = await call.plane.store.events(call.key, since=call.query.since)
    return json_answer(EventList(items=list(newest_first)))


async def usage(call: ApiCall) -> Answer:
    training = await _training(call)
    return json_answer(used(training, call.plane.clock()))


async def metrics(call: ApiCall) -> Answer:
    training = await _training(call)
    return json_answer(measured(training, call.plane.clock()))
