"""For whoever keeps the server running: is it there, can it work, how does it do."""

from __future__ import annotations

from litestar import Response

from atoll.core.model import Model
from atoll.core.problem import Problem
from atoll.server.gauges import Gauges
from atoll.server.operations import Answer, Call, Operation, Said, json_answer
from atoll.server.problems import MEDIA_TYPE


class Health(Model, frozen=True, omit_defaults=False):
    status: str = "ok"


async def healthz(call: Call) -> Answer:
    return json_answer(Health())


async def readyz(call: Call) -> Answer:
    """Ready when the store answers; a store that cannot be read is a 503 or 500."""
    await call.plane.store.version()
    return json_answer(Health())


def operations(gauges: Gauges) -> tuple[Operation, ...]:
    async def metrics(call: Call) -> Answer:
        text, media_type = gauges.exposition()
        return Response(text, media_type=media_type)

    ok = Said("It is.", Health)
    not_ready = Said("It is not.", Problem, MEDIA_TYPE)
    return (
        Operation("GET", "/healthz", healthz, "Is the server there?", {200: ok}, is_open=True),
        Operation(
            "GET",
            "/readyz",
            readyz,
            "Can it work?",
            {200: ok, 500: not_ready, 503: not_ready},
            is_open=True,
        ),
        Operation(
            "GET",
            "/metrics",
            metrics,
            "Totals for Prometheus.",
            {200: Said("Series.", str, "text/plain")},
            is_open=True,
        ),
    )
