"""Results of ranks over HTTP, and their logs without the lines that carry results."""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from msgspec.structs import replace

from atoll.agent.result import JSON, NONE, find_result, nonce_of
from atoll.core.errors import NotFound
from atoll.core.lines import RESULT_MARK, without_result
from atoll.core.model import Model, encode
from atoll.core.ports import Executor
from atoll.core.spec import RankNumber
from atoll.core.status import LogLine, Training
from atoll.logs.files import merged
from atoll.server.handlers.admission import executor_of
from atoll.server.http.operations import Answer, ApiCall, Query, json_answer

NEAR = 64  # lines at the end of a log to search first: most results are there


class ResultQuery(Query, frozen=True):
    rank: RankNumber = 0
    uid: str | None = None


class RankResult(Model, frozen=True, omit_defaults=False):
    """The result of a rank: `value` where it is JSON, else `payload` in base64.

    Other encodings are `msgpack` and, where the rank asked for it, `pickle`, which the server
    never opens. With the encoding `none` there is no value, and `error` says why.
    """

    rank: int
    encoding: str
    value: Any = None
    payload: str | None = None
    error: str | None = None


async def result(call: ApiCall) -> Answer:
    query: ResultQuery = call.query
    training = await call.plane.store.get(call.key)
    if query.uid not in (None, training.uid):
        raise NotFound("training", call.name)
    executor = executor_of(training, call.plane)

    async def texts(tail: int | None) -> AsyncIterator[str]:
        async for line in executor.logs(training, ranks=[query.rank], tail=tail):
            yield line.text

    reading = await find_result(texts, nonce_of(training.uid))
    if reading.result is not None:
        return json_answer(report_of(query.rank, *reading.result))
    if reading.is_torn:
        return json_answer(RankResult(rank=query.rank, encoding=NONE, error=reading.trouble))
    raise NotFound(f"result of rank {query.rank} of training", training.name)


def report_of(rank: int, encoding: str, payload: bytes) -> RankResult:
    if encoding == NONE:
        error = payload.decode(errors="replace")
        return RankResult(rank=rank, encoding=encoding, error=error)
    if encoding != JSON:
        packed = base64.b64encode(payload).decode()
        return RankResult(rank=rank, encoding=encoding, payload=packed)
    try:
        report = RankResult(rank=rank, encoding=encoding, value=json.loads(payload))
        encode(report)  # JSON can name text that UTF-8 cannot hold
        return report
    except (ValueError, RecursionError) as error:
        message = f"the result cannot be read: it is not JSON in UTF-8: {error}"
        return RankResult(rank=rank, encoding=NONE, error=message)


async def without_results(lines: AsyncIterator[LogLine]) -> AsyncIterator[LogLine]:
    """The lines as the ranks printed them, without results."""
    try:
        async for line in lines:
            text = without_result(line.text)
            if text is not None:
                yield line if text == line.text else replace(line, text=text)
    finally:
        if hasattr(lines, "aclose"):
            await lines.aclose()


async def printed_logs(
    executor: Executor,
    training: Training,
    *,
    ranks: Sequence[int] | None,
    tail: int | None,
    follow: Callable[[], bool] | None,
) -> AsyncIterator[LogLine]:
    """As `Executor.logs`, without results; `tail` counts printed lines."""
    if tail and follow is None and await _ends_with_result(executor, training, ranks):
        async for line in _last_printed(executor, training, ranks, tail):
            yield line
        return
    async for line in without_results(
        executor.logs(training, ranks=ranks, tail=tail, follow=follow)
    ):
        yield line


async def _ends_with_result(
    executor: Executor, training: Training, ranks: Sequence[int] | None
) -> bool:
    lines = executor.logs(training, ranks=ranks, tail=NEAR)
    return any([RESULT_MARK in line.text async for line in lines])


async def _last_printed(
    executor: Executor, training: Training, ranks: Sequence[int] | None, tail: int
) -> AsyncIterator[LogLine]:
    """Reads further back until there are `tail` printed lines, or the logs begin."""
    extra = NEAR
    while True:
        read: defaultdict[int, int] = defaultdict(int)
        texts: defaultdict[int, list[LogLine]] = defaultdict(list)
        async for line in executor.logs(training, ranks=ranks, tail=tail + extra):
            read[line.rank] += 1
            text = without_result(line.text)
            if text is not None:
                texts[line.rank].append(replace(line, text=text))
        is_cut = [rank for rank, count in read.items() if count == tail + extra]
        if all(len(texts[rank]) >= tail for rank in is_cut):
            break
        extra *= 4
    for line in merged([iter(texts[rank][-tail:]) for rank in sorted(texts)]):
        yield line
