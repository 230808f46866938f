"""Logs over HTTP: read, follow, search, since a time, around an offset."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Annotated

from msgspec import Meta
from starlette.responses import Response

from atoll.core.errors import Temporary, ValidationError
from atoll.core.model import Model, encode
from atoll.core.ports import Executor
from atoll.core.spec import LineCount, RankNumber
from atoll.core.status import LogLine, LogMatch, Training
from atoll.logs.files import offsets_since
from atoll.logs.search import LogSearch, lines_around
from atoll.server.handlers.admission import executor_of
from atoll.server.handlers.trainings import UidQuery
from atoll.server.http.operations import NDJSON, Answer, ApiCall, stream_answer

log = logging.getLogger(__name__)

HEARTBEAT = b"\n"  # an empty line: readers of line-delimited JSON skip it
MAX_HITS = 1000  # of one search: clients page on with `offsets`

Offset = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Timestamp = Annotated[float, Meta(ge=0, le=1e12)]
SearchText = Annotated[str, Meta(min_length=1, max_length=1000, pattern="^[^\\n]*$")]
Around = Annotated[int, Meta(ge=0, le=1000)]
Offsets = Annotated[str, Meta(pattern="^[0-9]{1,10}:[0-9]{1,19}(,[0-9]{1,10}:[0-9]{1,19})*$")]


class LogOffsets(Model, frozen=True):
    """The first line of a followed log with a `tail`: the offset where each rank begins."""

    offsets: dict[int, int]


class LogCut(Model, frozen=True):
    """The last line if the server or the backend stopped: ask again from there."""

    cut: bool


CUT = encode(LogCut(cut=True)) + b"\n"


class SearchEnd(Model, frozen=True, omit_defaults=False):
    """The last line of a search. With `is_cut` there may be more: search from `offsets` on."""

    done: bool
    hits: int
    is_cut: bool = False
    offsets: dict[int, int] = {}


class LogQuery(UidQuery, frozen=True, rename="camel"):
    rank: list[RankNumber] = []
    tail: LineCount | None = None
    follow: bool = False
    # Continue after these, as `rank:at,…`: the `at` of a line, or the `offsets` sent first.
    offsets: Offsets | None = None
    since: Timestamp | None = None  # only lines of that time or later
    search: SearchText | None = None  # only lines that contain this
    ignore_case: bool = False
    # Lines of one rank around an offset: how many up to it, and how many after it.
    at: Offset | None = None
    before: Around = 0
    after: Around = 0


class SearchQuery(UidQuery, frozen=True, kw_only=True, rename="camel"):
    q: SearchText
    rank: list[RankNumber] = []
    ignore_case: bool = False
    offsets: Offsets | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_HITS)] = MAX_HITS


async def logs(call: ApiCall) -> Answer:
    query: LogQuery = call.query
    training = await call.training()
    executor = executor_of(training, call.plane)
    if query.at is not None:
        return _around(training, executor, query)
    if query.search is not None and not query.follow and query.tail is None:
        if query.since is None and (folder := executor.log_folder(training)) is not None:
            hits = _file_hits(call, folder, query.search, query)
            return _streamed(call, _lines_of(hits))
    follow = partial(call.plane.informer.is_over, training) if query.follow else None
    lines, head = await _open_logs(executor, training, query, follow)
    return _streamed(call, _encoded(_select(lines, query), head))


def _streamed(call: ApiCall, source: AsyncIterator[bytes]) -> Answer:
    return stream_answer(call.plane.streams.run(source, heartbeat=HEARTBEAT, cut=CUT), NDJSON)


def _around(training: Training, executor: Executor, query: LogQuery) -> Answer:
    folder = executor.log_folder(training)
    if folder is None:
        expected = f"the executor {training.executor!r} has no files of logs: leave it out"
        raise ValidationError("at", query.at, expected)
    if len(query.rank) != 1:
        raise ValidationError("rank", query.rank, "expected one rank with at")
    lines = lines_around(folder, query.rank[0], query.at or 0, query.before, query.after)
    body = b"".join(encode(line) + b"\n" for line in lines)
    return Response(body, media_type=NDJSON)


async def _select(lines: AsyncIterator[LogLine], query: LogQuery) -> AsyncIterator[LogLine]:
    """The lines that match the query. With `since`, lines without a time do not match."""
    since, needle = query.since, query.search
    if needle is not None and query.ignore_case:
        needle = needle.lower()
    try:
        async for line in lines:
            if since is not None and (line.time is None or line.time < since):
                continue
            text = line.text.lower() if query.ignore_case else line.text
            if needle is None or needle in text:
                yield line
    finally:
        if hasattr(lines, "aclose"):
            await lines.aclose()


async def search(call: ApiCall) -> Answer:
    query: SearchQuery = call.query
    training = await call.training()
    executor = executor_of(training, call.plane)
    return _streamed(call, _search(call, training, executor, query))


async def _search(
    call: ApiCall, training: Training, executor: Executor, query: SearchQuery
) -> AsyncIterator[bytes]:
    count, offsets = 0, dict(read_offsets(query.offsets))
    if (folder := executor.log_folder(training)) is not None:
        hits = _file_hits(call, folder, query.q, query)
    else:
        hits = _line_hits(training, executor, query)
    async with contextlib.aclosing(hits):
        async for hit in hits:
            if hit is None:
                yield HEARTBEAT
                continue
            count += 1
            if hit.at is not None:
                offsets[hit.rank] = hit.at
            yield encode(hit) + b"\n"
            if count == query.limit:
                break
    is_cut = count == query.limit
    end = SearchEnd(done=True, hits=count, is_cut=is_cut, offsets=offsets if is_cut else {})
    yield encode(end) + b"\n"


async def _file_hits(
    call: ApiCall, folder: Path, text: str, query: LogQuery | SearchQuery
) -> AsyncGenerator[LogMatch | None, None]:
    """Yields hits by rank and offset, found in a thread; None after each step."""
    search_step = LogSearch(
        folder,
        text,
        ranks=query.rank or None,
        is_case_blind=query.ignore_case,
        offsets=read_offsets(query.offsets),
    )
    while True:
        async with call.plane.searches:
            hits = await asyncio.to_thread(search_step.step)
        if hits is None:
            return
        for hit in hits:
            yield hit
        yield None


async def _line_hits(
    training: Training, executor: Executor, query: SearchQuery
) -> AsyncGenerator[LogMatch | None, None]:
    """Yields hits of an executor without log files: reads all lines."""
    needle = query.q.lower() if query.ignore_case else query.q
    lines = executor.logs(training, ranks=query.rank or None)
    async for line in lines:
        if needle in (line.text.lower() if query.ignore_case else line.text):
            at = getattr(line, "at", None)
            yield LogMatch(rank=line.rank, text=line.text[:4096], time=line.time, at=at)


async def _lines_of(hits: AsyncGenerator[LogMatch | None, None]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(hits):
        async for hit in hits:
            yield HEARTBEAT if hit is None else encode(hit) + b"\n"


def read_offsets(text: str | None) -> dict[int, int]:
    pairs = (pair.partition(":") for pair in text.split(",")) if text else ()
    return {int(rank): int(at) for rank, _, at in pairs}


async def _open_logs(
    executor: Executor, training: Training, query: LogQuery, follow: Callable[[], bool] | None
) -> tuple[AsyncIterator[LogLine], bytes]:
    """The log lines, and the first line of the answer: offsets to resume from, or nothing."""
    ranks = query.rank or None
    has_start = query.offsets is not None or query.since is not None
    if follow is None and not has_start:
        tail = query.tail
        return executor.logs(training, ranks=ranks, tail=tail, follow=follow), b""
    offsets: dict[int, int] = {}
    if query.tail is not None:
        offsets = await executor.log_offsets(training, query.tail, ranks=ranks)
    folder = executor.log_folder(training)
    if query.since is not None and folder is not None:
        known = await asyncio.to_thread(offsets_since, folder, ranks, query.since)
        offsets |= {rank: max(at, offsets.get(rank, 0)) for rank, at in known.items()}
    head = encode(LogOffsets(offsets=offsets)) + b"\n" if follow and query.tail is not None else b""
    offsets |= read_offsets(query.offsets)
    lines = executor.logs_after(training, offsets, ranks=ranks, follow=follow)
    return lines, head


async def _encoded(lines: AsyncIterator[LogLine], head: bytes) -> AsyncIterator[bytes]:
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
