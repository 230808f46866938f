"""The server as an ASGI application: its routes, its OpenAPI document, its error answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import cache, partial
from typing import Literal

from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from atoll.controller.informer import INFORMER, Informer
from atoll.controller.loop import machine_clock
from atoll.core.checks import NAME_PATTERN
from atoll.core.clock import Now
from atoll.core.errors import Temporary
from atoll.core.executors import ExecutorList, Limits
from atoll.core.metrics import LatestMetricList, MetricSeriesList
from atoll.core.model import Model, encode
from atoll.core.ports import Executor, Store, Tokens
from atoll.core.problem import Problem
from atoll.core.rank_access import (
    ExecRequest,
    ExecResult,
    ExecTarget,
    KillRequest,
    KillResult,
    StackList,
    StackRequest,
)
from atoll.core.ranks import AttemptList
from atoll.core.rounds import RoundList, TrainingWithRounds
from atoll.core.spec import TrainingSpec
from atoll.core.status import LogMatch, OffsetLine, Training, TrainingList, TrainingStats
from atoll.core.weights import ChannelList
from atoll.metrics.store import MetricStore
from atoll.server.background import CONTROLLER, BackgroundTasks, TaskFailure, Work
from atoll.server.basilica import deployments
from atoll.server.gauges import Gauges
from atoll.server.handlers import logs, metrics, rank_access, trainings
from atoll.server.handlers.admission import Setup
from atoll.server.handlers.trainings import EVENT_ID_PATTERN
from atoll.server.http.auth import Gate, authenticate, token_of
from atoll.server.http.operations import (
    JSON,
    MAX_BODY_BYTES,
    MEDIA_TYPE,
    NDJSON,
    SSE,
    Answer,
    AnswerDoc,
    ApiCall,
    HeaderDoc,
    Operation,
    PathEndpoint,
    Plane,
    json_answer,
    on_error,
    routes,
)
from atoll.server.http.streams import Streams
from atoll.server.ui import routes as ui
from atoll.server.ui.rows import Rows
from atoll.server.ui.sessions import Sessions

# The native API: one row for each endpoint.

ONE = "/v1/trainings/{name}"
ALL = "/v1/trainings"
METRICS = "/metrics"


class Health(Model, frozen=True):
    """`failing`: background tasks that fail while trainings are still reconciled."""

    status: Literal["ok", "degraded"]
    failing: list[TaskFailure] = []


async def healthz(call: ApiCall) -> Answer:
    return json_answer(Health(status="ok"))


async def readyz(call: ApiCall) -> Answer:
    """Ready when the store answers and trainings are reconciled; else 503 or 500."""
    plane = call.plane
    await plane.store.version()
    failing = plane.background.failures
    for failure in failing:
        if failure.name in (CONTROLLER, INFORMER):
            raise Temporary(f"trainings are not reconciled now: {failure.error}")
    if plane.metrics is not None and plane.metrics.trouble:
        failing.append(TaskFailure(name="metrics", error=plane.metrics.trouble))
    return json_answer(Health(status="degraded" if failing else "ok", failing=failing))


async def prometheus(call: ApiCall) -> Answer:
    """Totals; with a token also the active trainings of its namespace."""
    namespace = call.namespace or None
    if namespace is None and token_of(call.request):
        namespace = await authenticate(call.plane, call.request)
    gauges, now = call.plane.gauges, time.time()
    text, media_type = await asyncio.to_thread(
        gauges.exposition, namespace, lambda uid: metrics.newest_by_name(call.plane, uid), now
    )
    return Response(text, media_type=media_type)


def _problem(description: str) -> AnswerDoc:
    return AnswerDoc(description, Problem, MEDIA_TYPE)


_INVALID = {400: _problem("A field or option is not valid; the answer names it.")}
_DENIED = {401: _problem("The token is missing or unknown.")}
_MISSING = {404: _problem("This namespace has no such training.")}
_COMMON_PROBLEMS = (
    _INVALID | _DENIED | {503: _problem("The request cannot be served now; try again later.")}
)
_NAME_PROBLEMS = _COMMON_PROBLEMS | _MISSING
_EXPIRED = {410: _problem("The version `after` has expired: read again, then watch.")}
_TOO_LARGE = {413: _problem("The body or the spec in it is too large; the answer names the field.")}
_REACH_PROBLEMS = _NAME_PROBLEMS | {
    409: _problem("The rank does not run, or its executor has no way into ranks."),
}
_TRAINING = AnswerDoc("The training.", Training)
_YES = AnswerDoc("Yes.", Health)
_NO = AnswerDoc("No.", Problem, MEDIA_TYPE)
_TRAINING_OR_CHANGES = AnswerDoc(
    "The training and the progress of its outer rounds; with `watch`, a stream of changes.",
    TrainingWithRounds,
)
_LOG_LINES = AnswerDoc("Log lines.", OffsetLine, NDJSON, (logs.LogOffsets, logs.LogCut))
_RESUME_HEADER = {
    "Last-Event-ID": HeaderDoc("With `watch`, the version to continue from.", EVENT_ID_PATTERN)
}

NATIVE = (
    Operation(
        "POST",
        ALL,
        trainings.create,
        "Create a training; its ranks start soon after.",
        {
            201: AnswerDoc("Stored.", Training),
            200: AnswerDoc("An earlier request with this idempotency key created it.", Training),
            409: _problem("The name is taken, or the key belongs to another spec."),
            **_COMMON_PROBLEMS,
            **_TOO_LARGE,
        },
        body=TrainingSpec,
        max_body=MAX_BODY_BYTES,
        headers={
            "Idempotency-Key": HeaderDoc(
                "Requests repeated with the same key create one training.", trainings.KEY_PATTERN
            ),
            trainings.IF_DEFAULT: HeaderDoc(
                "The answer is 400 unless this executor is the default.", NAME_PATTERN
            ),
        },
    ),
    Operation(
        "GET",
        ALL,
        trainings.read_many,
        "List trainings by name, one page at a time; with `watch`, stream their changes.",
        {200: AnswerDoc("One page of trainings.", TrainingList), **_COMMON_PROBLEMS, **_EXPIRED},
        query=trainings.ListQuery,
        headers=_RESUME_HEADER,
    ),
    Operation(
        "GET",
        ONE,
        trainings.read,
        "Read one training; with `watch`, stream its changes after a version.",
        {200: _TRAINING_OR_CHANGES, **_NAME_PROBLEMS, **_EXPIRED},
        query=trainings.OneQuery,
        headers=_RESUME_HEADER,
    ),
    Operation(
        "DELETE",
        ONE,
        trainings.delete,
        "Stop the ranks, then delete the record.",
        {202: AnswerDoc("The training is being deleted.", trainings.Removal), **_NAME_PROBLEMS},
    ),
    Operation(
        "POST",
        f"{ONE}/scale",
        trainings.scale,
        "Change the target number of ranks, between `min` and `max`.",
        {200: _TRAINING, 409: _problem("The training is over."), **_NAME_PROBLEMS, **_TOO_LARGE},
        body=trainings.Scale,
    ),
    Operation(
        "POST",
        f"{ONE}/cancel",
        trainings.cancel,
        "Stop the ranks and keep the record.",
        {200: _TRAINING, **_NAME_PROBLEMS},
    ),
    Operation(
        "POST",
        f"{ONE}/rerun",
        trainings.rerun,
        "Run a training again under another name, by default `NAME-r2`, with a copy of its spec "
        "and code.",
        {
            201: AnswerDoc("The new training.", Training),
            200: AnswerDoc("An earlier request with this idempotency key created it.", Training),
            409: _problem("The name is taken, or the code of the training is no longer stored."),
            **_NAME_PROBLEMS,
            **_TOO_LARGE,
        },
        body=trainings.Rerun,
        headers={
            "Idempotency-Key": HeaderDoc(
                "Requests repeated with the same key create one training.", trainings.KEY_PATTERN
            ),
        },
    ),
    Operation(
        "GET",
        f"{ONE}/logs",
        logs.logs,
        "Log lines with their rank, as line-delimited JSON. With `follow` and `tail`, the first "
        "line holds the `offsets` the log lines begin at. The last line is "
        '`{"cut":true}` if the server shuts down before the logs end. Lines of several ranks come '
        "in the order of their times. With `at`, the lines of one rank around that place.",
        {200: _LOG_LINES, **_NAME_PROBLEMS},
        query=logs.LogQuery,
    ),
    Operation(
        "GET",
        f"{ONE}/logs/search",
        logs.search,
        "Search for lines that contain a text, as line-delimited JSON with offsets. The last "
        "line has the number of hits, and where to continue if there are more than `limit`.",
        {
            200: AnswerDoc("Hits.", LogMatch, NDJSON, (logs.SearchEnd, logs.LogCut)),
            **_NAME_PROBLEMS,
        },
        query=logs.SearchQuery,
    ),
    Operation(
        "GET",
        f"{ONE}/result",
        trainings.result,
        "Read the result of a rank: what its function returned, or what its program set last. "
        "404 if there is none.",
        {200: AnswerDoc("The result.", trainings.RankResult), **_NAME_PROBLEMS},
        query=trainings.ResultQuery,
    ),
    Operation(
        "GET",
        f"{ONE}/metrics",
        metrics.metrics,
        "Read the metrics that ranks reported with `atoll.report`, as columns: one series for "
        "each name and rank.",
        {200: AnswerDoc("One series for each name and rank.", MetricSeriesList), **_NAME_PROBLEMS},
        query=metrics.MetricsQuery,
    ),
    Operation(
        "GET",
        "/v1/metrics",
        metrics.newest_metrics,
        "Read the newest value of these metrics for every training, as its lowest rank reported "
        "it; with `ranks`, the newest value of each rank too.",
        {200: AnswerDoc("The newest values.", LatestMetricList), **_COMMON_PROBLEMS},
        query=metrics.NewestQuery,
    ),
    Operation(
        "GET",
        f"{ONE}/rounds",
        metrics.rounds,
        "Read the outer rounds of a DiLoCo training: members, missing and late replicas, and "
        "costs; the newest `limit` of the requested ones, in order.",
        {200: AnswerDoc("The rounds.", RoundList), **_NAME_PROBLEMS},
        query=metrics.RoundsQuery,
    ),
    Operation(
        "GET",
        f"{ONE}/weights",
        metrics.weights,
        "Read the channels of weights that a training publishes or follows: their newest versions, "
        "and their followers in all trainings with how far each is behind.",
        {200: AnswerDoc("The channels; none if it has no weights.", ChannelList), **_NAME_PROBLEMS},
        query=metrics.WeightsQuery,
    ),
    Operation(
        "POST",
        f"{ONE}/metrics",
        metrics.report_metrics,
        "Store the metrics of a rank, sent as lines of JSON. Only the token in the environment of "
        "a rank is accepted here, and it is valid for nothing else.",
        {
            200: AnswerDoc("Stored.", metrics.MetricsStored),
            **_INVALID,
            **_DENIED,
            **_MISSING,
            **_TOO_LARGE,
        },
        is_open=True,
    ),
    Operation(
        "GET",
        f"{ONE}/events",
        trainings.events,
        "Events of a training, newest first.",
        {200: AnswerDoc("Events.", trainings.EventList), **_NAME_PROBLEMS},
        query=trainings.EventQuery,
    ),
    Operation(
        "GET",
        f"{ONE}/attempts",
        trainings.attempts,
        "List the attempts of the ranks: start, end and exit. The newest attempt of each rank and "
        "the 20 before it.",
        {200: AnswerDoc("Attempts, in order of rank.", AttemptList), **_NAME_PROBLEMS},
        query=trainings.AttemptQuery,
    ),
    Operation(
        "GET",
        f"{ONE}/stats",
        trainings.stats,
        "Read the counters of a training: ranks by phase, restarts, resizes, and the rank-seconds "
        "and GPU-seconds it has used.",
        {200: AnswerDoc("The counters.", TrainingStats), **_NAME_PROBLEMS},
        query=trainings.UidQuery,
    ),
    Operation(
        "GET",
        f"{ONE}/exec",
        rank_access.exec_target,
        "Read where you can enter a rank that runs: its host and process, or its pod.",
        {200: AnswerDoc("The process or the pod.", ExecTarget), **_REACH_PROBLEMS},
        query=rank_access.TargetQuery,
    ),
    Operation(
        "POST",
        f"{ONE}/exec",
        rank_access.exec,
        "Run a command in the environment and directory of a rank, and answer when it has ended.",
        {200: AnswerDoc("How it ended.", ExecResult), **_REACH_PROBLEMS, **_TOO_LARGE},
        query=trainings.UidQuery,
        body=ExecRequest,
    ),
    Operation(
        "POST",
        f"{ONE}/kill",
        rank_access.kill,
        "Send a signal to the process of a rank.",
        {200: AnswerDoc("The process.", KillResult), **_REACH_PROBLEMS, **_TOO_LARGE},
        query=trainings.UidQuery,
        body=KillRequest,
    ),
    Operation(
        "POST",
        f"{ONE}/stacks",
        rank_access.take_stacks,
        "Take the stacks of ranks that run and of the processes they started; equal ones are "
        "folded.",
        {200: AnswerDoc("The stacks.", StackList), **_REACH_PROBLEMS, **_TOO_LARGE},
        query=trainings.UidQuery,
        body=StackRequest,
    ),
    Operation(
        "GET",
        f"{ONE}/stacks",
        rank_access.stored_stacks,
        "Read the stacks that atoll took by itself: of ranks that stalled, that it had to kill, "
        "or whose round timed out.",
        {200: AnswerDoc("The stacks.", StackList), **_REACH_PROBLEMS},
        query=rank_access.StacksQuery,
    ),
    Operation(
        "GET",
        "/v1/executors",
        trainings.executors,
        "List the executors, and whether each is reachable now.",
        {200: AnswerDoc("All executors.", ExecutorList), **_COMMON_PROBLEMS},
    ),
    Operation(
        "PATCH",
        "/v1/executors/{name}",
        trainings.set_limits,
        "Change how many slots, CPUs and how much memory ranks of an executor of kind `local` may "
        "ask for in all. It holds after a restart, too.",
        {
            200: AnswerDoc("All executors.", ExecutorList),
            **_COMMON_PROBLEMS,
            404: _problem("There is no such executor."),
            **_TOO_LARGE,
        },
        body=Limits,
    ),
    Operation(
        "GET", "/healthz", healthz, "Whether the server is running.", {200: _YES}, is_open=True
    ),
    Operation(
        "GET",
        "/readyz",
        readyz,
        "Whether the server can serve requests: its store answers.",
        {200: _YES, 500: _NO, 503: _NO},
        is_open=True,
    ),
    Operation(
        "GET",
        METRICS,
        prometheus,
        "Totals of the server in the Prometheus text format; with a token also gauges of the 200 "
        "newest active trainings of its namespace.",
        {200: AnswerDoc("Metrics as text.", str, "text/plain")},
        is_open=True,
    ),
)
STREAMED = {ALL: SSE, ONE: SSE}


def native_operations(*, is_metrics_open: bool) -> tuple[Operation, ...]:
    """The rows; without `is_metrics_open`, `/metrics` needs a token."""
    if is_metrics_open:
        return NATIVE
    return tuple(
        replace(row, is_open=False, answers={**row.answers, **_DENIED})
        if row.path == METRICS
        else row
        for row in NATIVE
    )


def create_app(
    *,
    store: Store,
    tokens: Tokens,
    executors: Mapping[str, Executor],
    streams: Streams | None = None,
    setup: Setup | None = None,
    informer: Informer | None = None,
    gauges: Gauges | None = None,
    clock: Callable[[], Now] | None = None,
    metrics: MetricStore | None = None,
    sessions: Sessions | None = None,
    report_key: bytes = b"",
    background: BackgroundTasks | None = None,
    is_metrics_open: bool = True,
    lifespan: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext,
) -> Router:
    """The HTTP server of one control plane.

    Without the `informer` of its process it runs one of its own.
    `/metrics` has totals of all namespaces; without `is_metrics_open` it needs a token.
    `lifespan` is entered when the server starts. Call `streams.close()` when shutdown begins, so
    that open watches end.
    """
    streams = Streams() if streams is None else streams
    has_own_informer = informer is None
    informer = informer or Informer(store)
    gauges = gauges or Gauges(informer)
    setup = Setup() if setup is None else setup
    clock = machine_clock() if clock is None else clock
    plane = Plane(
        store,
        tokens,
        executors,
        streams,
        informer,
        gauges,
        Rows(store),
        setup,
        clock,
        metrics=metrics,
        report_key=report_key,
        sessions=sessions or Sessions(),
        background=background or BackgroundTasks(),
    )

    @contextlib.asynccontextmanager
    async def run_tasks(_: Router) -> AsyncIterator[None]:
        works: dict[str, Work] = {
            "gauges": gauges.follow,
            "rows": lambda: plane.rows.follow(informer),
        }
        if has_own_informer:
            works[INFORMER] = informer.run
        async with contextlib.AsyncExitStack() as running:
            for name, work in works.items():
                await running.enter_async_context(plane.background.running(name, work))
            await running.enter_async_context(lifespan())
            yield

    rows = native_operations(is_metrics_open=is_metrics_open)

    document = cache(partial(_document, rows))  # encoded once: reading it needs no token

    async def openapi(request: Request) -> Response:
        return Response(document(), media_type=JSON)

    table = [
        *routes(rows, plane, authenticate, on_error),
        *deployments.routes_of(plane),
        *ui.routes_of(plane),
        Route("/openapi.json", PathEndpoint({"GET": openapi}, on_error)),
    ]
    return Router(
        table,
        redirect_slashes=False,
        default=_not_found,
        lifespan=run_tasks,
        middleware=[Middleware(Gate, plane=plane, on_refusal=_on_stray)],
    )


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    await _on_stray(Request(scope), HTTPException(404))(scope, receive, send)


def _document(rows: Sequence[Operation]) -> bytes:
    from atoll.server.http.openapi import document  # slow to import, and rarely needed

    return encode(document(rows, STREAMED))


def _on_stray(request: Request, error: Exception) -> Response:
    """Answers a request that no endpoint takes, in the dialect of the client."""
    is_foreign = request.url.path.startswith("/deployments")
    return (deployments.on_error if is_foreign else on_error)(request, error)
