"""Facts about a training over HTTP: events, attempts and stats; and the list of executors."""

from __future__ import annotations

import logging
from typing import Annotated

from msgspec import Meta

from atoll.core.attempts import AttemptList, attempts_of
from atoll.core.errors import NotFound
from atoll.core.model import Model
from atoll.core.spec import RankNumber
from atoll.core.stats import training_stats
from atoll.core.status import Event, Training
from atoll.server.handlers.admission import probe_executors
from atoll.server.http.operations import (
    Answer,
    ApiCall,
    Query,
    json_answer,
)

log = logging.getLogger(__name__)


class ReportQuery(Query, frozen=True):
    # Answer only for the training with this uid: another one may have its name by now.
    uid: Annotated[str, Meta(max_length=200)] | None = None


class EventQuery(ReportQuery, frozen=True):
    since: Annotated[float, Meta(ge=0, le=1e12)] | None = None


class AttemptQuery(ReportQuery, frozen=True):
    rank: list[RankNumber] = []


class EventList(Model, frozen=True):
    items: list[Event]


async def executors(call: ApiCall) -> Answer:
    return json_answer(await probe_executors(call.plane.executors, call.plane.setup))


async def training_of(call: ApiCall) -> Training:
    """The training the request names. Raises NotFound if its `uid` is another."""
    training = await call.plane.store.get(call.key)
    if call.query.uid not in (None, training.uid):
        raise NotFound("training", call.name)
    return training


async def attempts(call: ApiCall) -> Answer:
    query: AttemptQuery = call.query
    training = await training_of(call)
    attempts_known = attempts_of(training.status, await call.plane.store.attempts(call.key))
    selected = [one for one in attempts_known if not query.rank or one.rank in query.rank]
    return json_answer(AttemptList(items=selected))


async def events(call: ApiCall) -> Answer:
    await training_of(call)
    newest_first = await call.plane.store.events(call.key, since=call.query.since)
    return json_answer(EventList(items=list(newest_first)))


async def stats(call: ApiCall) -> Answer:
    training = await training_of(call)
    return json_answer(training_stats(training, call.plane.clock()))
