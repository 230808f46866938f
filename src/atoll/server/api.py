"""The native API: one row for each endpoint."""

from __future__ import annotations

from starlette.responses import Response

from atoll.core.executors import ExecutorList
from atoll.core.metrics import Metrics
from atoll.core.model import Model
from atoll.core.problem import Problem
from atoll.core.spec import TrainingSpec
from atoll.core.status import PlacedLine, Training, TrainingList, Usage
from atoll.server import reports, trainings
from atoll.server.operations import NDJSON, SSE, Answer, Call, Operation, Said, json_answer
from atoll.server.problems import MEDIA_TYPE

ONE = "/v1/trainings/{name}"
ALL = "/v1/trainings"


class Health(Model, frozen=True, omit_defaults=False):
    status: str = "ok"


async def healthz(call: Call) -> Answer:
    return json_answer(Health())


async def readyz(call: Call) -> Answer:
    """Ready when the store answers; a store that cannot be read is a 503 or 500."""
    await call.plane.store.version()
    return json_answer(Health())


async def metrics(call: Call) -> Answer:
    text, media_type = call.plane.gauges.exposition()
    return Response(text, media_type=media_type)


def _refused(what: str) -> Said:
    return Said(what, Problem, MEDIA_TYPE)


_BAD = {400: _refused("A field or option is not valid; the answer names it.")}
_DENIED = {401: _refused("No token, or one that is not known.")}
_MISSING = {404: _refused("There is no such training in this namespace.")}
_COMMON = _BAD | _DENIED | {503: _refused("It may work later.")}
_NAMED = _COMMON | _MISSING
_GONE = {410: _refused("`after` is older than the oldest version kept.")}
_LARGE = {413: _refused("The body is too large.")}
_TRAINING = Said("The training.", Training)
_IS = Said("It is.", Health)
_IS_NOT = Said("It is not.", Problem, MEDIA_TYPE)
_WATCHED = Said("The training; with `watch`, a stream of its changes.", Training)

NATIVE = (
    Operation(
        "POST",
        ALL,
        trainings.create,
        "Store a training; its ranks are started soon after.",
        {
            201: Said("Stored.", Training),
            200: Said("This idempotency key had made it before.", Training),
            409: _refused("The name is taken, or the key was used for something else."),
            **_COMMON,
            **_LARGE,
        },
        body=TrainingSpec,
        headers={
            "Idempotency-Key": "A create repeated with the same key makes one training.",
            trainings.IF_DEFAULT: "Refused with 400 unless this executor is the default.",
        },
    ),
    Operation(
        "GET",
        ALL,
        trainings.read_many,
        "Trainings by name, a page at a time; or, with `watch`, a stream of their changes.",
        {200: Said("One page.", TrainingList), **_COMMON, **_GONE},
        query=trainings.ListQuery,
    ),
    Operation(
        "GET",
        ONE,
        trainings.read,
        "One training; or, with `watch`, a stream of its changes after a version.",
        {200: _WATCHED, **_NAMED, **_GONE},
        query=trainings.OneQuery,
    ),
    Operation(
        "DELETE",
        ONE,
        trainings.delete,
        "Stop the ranks, then remove the record.",
        {202: Said("It is being removed.", trainings.Removal), **_NAMED},
    ),
    Operation(
        "POST",
        f"{ONE}/scale",
        trainings.scale,
        "Ask for another number of ranks, within the bounds of the training.",
        {200: _TRAINING, 409: _refused("The training is over."), **_NAMED, **_LARGE},
        body=trainings.Scale,
    ),
    Operation(
        "POST",
        f"{ONE}/cancel",
        trainings.cancel,
        "Stop the ranks and keep the record.",
        {200: _TRAINING, **_NAMED},
    ),
    Operation(
        "GET",
        f"{ONE}/logs",
        reports.logs,
        "Log lines with their rank, as line-delimited JSON. With `follow` and `tail`, first the "
        '`places` they begin at; `{"cut":true}` last where the server goes away.',
        {200: Said("Lines.", PlacedLine, NDJSON), **_NAMED},
        query=reports.LogQuery,
    ),
    Operation(
        "GET",
        f"{ONE}/events",
        reports.events,
        "What happened, newest first.",
        {200: Said("Events.", reports.EventList), **_NAMED},
        query=reports.EventQuery,
    ),
    Operation(
        "GET",
        f"{ONE}/metrics",
        reports.metrics,
        "The training in numbers.",
        {200: Said("Numbers.", Metrics), **_NAMED},
        query=reports.ReportQuery,
    ),
    Operation(
        "GET",
        f"{ONE}/usage",
        reports.usage,
        "Seconds that ranks and GPUs were used.",
        {200: Said("Seconds.", Usage), **_NAMED},
        query=reports.ReportQuery,
    ),
    Operation(
        "GET",
        "/v1/executors",
        reports.executors,
        "Where trainings can run, and whether each of these places answers now.",
        {200: Said("All of them.", ExecutorList), **_COMMON},
    ),
    Operation("GET", "/healthz", healthz, "Is the server there?", {200: _IS}, is_open=True),
    Operation(
        "GET",
        "/readyz",
        readyz,
        "Can it work?",
        {200: _IS, 500: _IS_NOT, 503: _IS_NOT},
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
STREAMED = {ALL: SSE, ONE: SSE}
