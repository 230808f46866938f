"""Results of ranks over HTTP."""

from __future__ import annotations

import base64
import json
from typing import Any

from atoll.agent.result import JSON, NONE
from atoll.core.errors import NotFound
from atoll.core.model import Model, encode
from atoll.core.spec import RankNumber
from atoll.server.handlers.admission import executor_of
from atoll.server.http.operations import Answer, ApiCall, Query, json_answer


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

    found = await executor.result(training, query.rank)
    if found is None:
        raise NotFound(f"result of rank {query.rank} of training", training.name)
    return json_answer(report_of(query.rank, *found))


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
