"""The outer rounds of a training, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Annotated

from msgspec import Meta

from atoll.core.errors import NotFound, Temporary
from atoll.core.rounds import RoundItem, RoundList, RoundSummary, items_of, with_absent
from atoll.core.status import Training
from atoll.metrics.rounds import RoundTable, StoreObservation
from atoll.server.http.operations import Answer, ApiCall, Plane, Query, json_answer

MAX_ITEMS = 10_000  # of one answer: some 3 MB
FROM_STORE = "read from the manifests in the store"

RoundNumber = Annotated[int, Meta(ge=0, le=10**9)]


class RoundsQuery(Query, frozen=True, rename={"from_": "from"}):
    from_: RoundNumber = 0
    to: RoundNumber | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_ITEMS)] = MAX_ITEMS
    run: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    costs: bool = False
    uid: str | None = None


async def rounds(call: ApiCall) -> Answer:
    query: RoundsQuery = call.query
    training = await call.plane.store.get(call.key)
    if query.uid not in (None, training.uid):
        raise NotFound("training", call.name)
    if call.plane.metrics is None:
        return json_answer(RoundList(items=[], is_kept=False))
    table = call.plane.metrics.rounds
    return json_answer(await asyncio.to_thread(_rounds, table, training, query))


def _rounds(table: RoundTable, training: Training, query: RoundsQuery) -> RoundList:
    uid = training.uid
    run = query.run or table.run_of(uid)
    source = describe_source(table.observation(uid))
    if run is None:
        return RoundList(items=[], summary=with_absent(table.summary(uid), training), why=source)
    return RoundList(
        items=select_rounds(table, uid, run, query),
        summary=with_absent(table.summary(uid, run), training),
        why=source,
        dropped=table.dropped(uid, run)[0],
    )


def describe_source(observation: StoreObservation | None) -> str:
    """Where the rounds come from, as text."""
    if observation is None:
        return "reported by the replicas: the store has not been read yet"
    return f"reported by the replicas: {observation.problem}" if observation.problem else FROM_STORE


def select_rounds(table: RoundTable, uid: str, run: str, query: RoundsQuery) -> list[RoundItem]:
    # Joins and departures show against the round before: read one more of each fragment.
    more = query.limit + len(table.newest(uid, run))
    stored = table.rounds(uid, run, max(0, query.from_ - 1), query.to, more)
    items = items_of(stored, has_costs=query.costs)
    return [item for item in items if item.round >= query.from_][-query.limit :]


async def summary_of_training(plane: Plane, uid: str) -> RoundSummary | None:
    """The summary of the rounds; None if there are none or they cannot be read now."""
    if plane.metrics is None:
        return None
    with contextlib.suppress(Temporary):
        return await asyncio.to_thread(plane.metrics.rounds.summary, uid)
    return None
