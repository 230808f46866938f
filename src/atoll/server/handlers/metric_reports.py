"""What ranks report by HTTP, with a token of their training alone."""

from __future__ import annotations

import asyncio
import contextlib

from atoll.agent.metrics import MOST_BATCH
from atoll.backends.metrics_token import read_token
from atoll.core.errors import Denied, NotFound
from atoll.core.model import Model
from atoll.server.http.auth import token_of
from atoll.server.http.operations import Answer, ApiCall, json_answer


class Taken(Model, frozen=True, omit_defaults=False):
    """How many batches were new."""

    batches: int


async def take(call: ApiCall) -> Answer:
    """Keeps the batches in the body, a line each. One that arrives twice counts once."""
    plane = call.plane
    speaker = None
    if plane.report_key:
        speaker = read_token(plane.report_key, token_of(call.request))
    if speaker is None or plane.series is None:
        raise Denied("expected the token of a rank of this training")
    training = await plane.store.get((speaker.namespace, call.name))
    if training.uid != speaker.uid:
        raise NotFound("training", call.name)
    async with contextlib.AsyncExitStack() as held:
        # Of its own name, so that reports never hold up what people send.
        body = await plane.bodies.read(
            call.request, f"reports of {speaker.namespace}", MOST_BATCH, held
        )
        lines = [line for line in body.splitlines() if line]
        taken = await asyncio.to_thread(plane.series.take, training.uid, lines)
    return json_answer(Taken(batches=taken))
