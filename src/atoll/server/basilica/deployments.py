"""`/deployments` and `/health` for the basilica-sdk client, over the same store and controller.

The client never retries, and an idle connection may fail its next request, so each answer
closes its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import sys
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

from msgspec import Meta
from msgspec.structs import replace
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import atoll
from atoll.backends.local.rendezvous import find_etcd
from atoll.core.checks import check_name
from atoll.core.errors import (
    AtollError,
    BackendError,
    Conflict,
    Gone,
    NotFound,
    Temporary,
    ValidationError,
)
from atoll.core.executors import LOCAL
from atoll.core.model import encode
from atoll.core.ports import Change, Key, Store
from atoll.core.problem import rename_fields
from atoll.core.status import LogLine, Training
from atoll.server.basilica.wire import (
    FIELDS,
    Create,
    Json,
    Probe,
    deployment,
    event_item,
    is_settled,
    list_item,
    spec_of,
    timestamp,
)
from atoll.server.handlers import trainings
from atoll.server.handlers.admission import admit, default_executor, executor_of
from atoll.server.http.auth import authenticate
from atoll.server.http.operations import (
    JSON,
    MAX_BODY_BYTES,
    Answer,
    AnswerDoc,
    ApiCall,
    Operation,
    PathEndpoint,
    Plane,
    Query,
    StreamAnswer,
    decode_body,
    routes,
    status_of,
)

# Answers and errors in the format of the basilica-sdk client: bodies, codes, headers.

CLOSE = {"Connection": "close"}
# Parts of the Basilica platform that atoll does not have, by path.
UNSUPPORTED: dict[str, str] = {
    "/rentals": "rentals: atoll runs trainings on machines you have, it does not rent any",
    "/nodes": "nodes: atoll runs trainings on machines you have, it does not rent any",
    "/v2/secure-cloud": "rentals: atoll runs trainings on machines you have, it rents none",
    "/secure-cloud": "rentals: atoll runs trainings on machines you have, it rents none",
    "/ssh-keys": "SSH keys: there is no rented machine to log in to",
    "/billing": "billing: nothing is charged; `atoll status` shows what a training has used",
    "/rl": "reinforcement-learning clusters",
    "/deployments/{name}/share-token": "share links: a token is good for its whole namespace",
    "/deployments/{name}/enroll-metadata": "public metadata: every request needs a token",
    "/public": "public metadata: every request needs a token",
}

log = logging.getLogger(__name__)


class Unsupported(AtollError):
    """The Basilica platform has this, atoll does not."""


def answer(body: Json, status: int = 200) -> Answer:
    """JSON that closes its connection."""
    return Response(encode(body), status, headers=CLOSE, media_type=JSON)


class ErrorCode(NamedTuple):
    """How the client names one kind of error, and whether it may retry."""

    name: str
    is_retryable: bool = False


CODES: Mapping[int, ErrorCode] = {
    400: ErrorCode("BASILICA_API_BAD_REQUEST"),
    401: ErrorCode("BASILICA_API_AUTH_FAILED"),
    404: ErrorCode("BASILICA_API_NOT_FOUND"),
    409: ErrorCode("BASILICA_API_CONFLICT"),
    413: ErrorCode("BASILICA_API_TOO_LARGE"),
    501: ErrorCode("BASILICA_API_NOT_SUPPORTED"),
    503: ErrorCode("BASILICA_API_UNAVAILABLE", is_retryable=True),
}


def error_answer(status: int, message: str) -> Answer:
    error_code = CODES.get(status, ErrorCode("BASILICA_API_ERROR"))
    error = {
        "code": error_code.name,
        "message": message,
        "timestamp": timestamp(time.time()),
        "retryable": error_code.is_retryable,
    }
    return answer({"error": error}, status)


def on_error(request: Request, error: Exception) -> Answer:
    """Any error of a request as the error body that the client reads."""
    if isinstance(error, Unsupported):
        return error_answer(501, str(error))
    if isinstance(error, ValidationError):
        return error_answer(status_of(error), str(rename_fields(error, FIELDS)))
    if isinstance(error, AtollError):
        return error_answer(status_of(error), str(error))
    if isinstance(error, HTTPException):
        return error_answer(
            error.status_code, f"{request.method} {request.url.path}: {error.detail}"
        )
    log.error("%s %s", request.method, request.url.path, exc_info=error)
    return error_answer(500, "internal error in atoll; the log of the server has the details")


ONE = "/deployments/{name}"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
FOLLOW_LIMIT_S = 1150.0  # the client drops the whole answer after 1200 s
REMOVAL_S = 60.0  # ranks have 10 s to stop, a pod 30 s
SETTLE_S = 1.0  # of the 5 s between two polls of the client


class DeploymentLogQuery(Query, frozen=True):
    follow: bool = False
    tail: Annotated[int, Meta(ge=0, le=10_000_000)] | None = None


class DeploymentEventQuery(Query, frozen=True):
    limit: Annotated[int, Meta(ge=0, le=2**31)] | None = None


def routes_of(plane: Plane) -> list[Route]:
    refusals = (
        Route(path, _refusal(prefix))
        for prefix in UNSUPPORTED
        for path in (prefix, prefix + "/{path:path}")
    )
    own = routes(ROWS, plane, authenticate, on_error, read_name=exact_name)
    return [*own, *refusals]


def exact_name(field: str, name: str) -> str:
    """The basilica client has no names for people: one that is no DNS label is a mistake."""
    check_name(field, name)
    return name


def _refusal(prefix: str) -> PathEndpoint:
    async def refuse(request: Request) -> Answer:
        raise Unsupported(f"atoll does not support {UNSUPPORTED[prefix]}")

    return PathEndpoint(dict.fromkeys(METHODS, refuse), on_error)


async def health(call: ApiCall) -> Answer:
    await call.plane.store.version()
    count = len(call.plane.executors)
    return answer(
        {
            "status": "healthy",
            "version": atoll.__version__,
            "timestamp": timestamp(time.time()),
            "healthy_validators": count,
            "total_validators": count,
        }
    )


async def create(call: ApiCall) -> Answer:
    async with contextlib.AsyncExitStack() as turn:
        bodies = call.plane.bodies
        body = await bodies.read(call.request, call.namespace, MAX_BODY_BYTES, turn)
        return await _create_from(call, body)


async def _create_from(call: ApiCall, body: bytes) -> Answer:
    if (await decode_body(body, Probe)).distributed is None:
        raise Unsupported(
            "atoll does not support inference deployments: it runs distributed trainings "
            "(basilica.distributed), which have 'distributed' in the request"
        )
    order = await decode_body(body, Create)
    if not order.distributed.enabled:
        raise ValidationError("distributed.enabled", False, "expected true")
    executor = default_executor(call.plane)
    spec = spec_of(
        order,
        backend=rendezvous_of(order.distributed.rendezvous.backend, executor),
        path_first=str(Path(sys.executable).parent) if executor == LOCAL else None,
    )
    if executor == LOCAL:  # the client asks for 8 CPUs and 32 GiB by itself: nobody chose them
        spec = replace(spec, resources=replace(spec.resources, cpu=None, memory=None))
    spec = admit(spec, call.plane, call.namespace)
    training = Training(
        namespace=call.namespace, uid=uuid.uuid4().hex, spec=spec, created_at=time.time()
    )
    stored = await _create(call.plane.store, training)
    return answer(deployment(await _settled(call.plane.store, stored)), 201)


async def _create(store: Store, training: Training) -> Training:
    """Stores the training; waits while an older one of that name is being deleted."""
    deadline = time.monotonic() + REMOVAL_S
    while True:
        try:
            return await store.create(training)
        except Conflict:
            try:
                old = await store.get(training.key)
            except NotFound:
                continue
            if old.deletion_requested_at is None or time.monotonic() > deadline:
                raise
        await _until_deleted(store, training.key, deadline)


async def _settled(store: Store, training: Training) -> Training:
    """Waits up to `SETTLE_S` for the requested world: the client polls only every 5 s, and an
    answer that is already settled saves it a wait."""
    if is_settled(training):
        return training
    try:
        async with asyncio.timeout(SETTLE_S):
            async with _watching(store, training.resource_version, training.key) as changes:
                async for change in changes:
                    training = change.training
                    if change.is_removed or is_settled(training):
                        break
    except (TimeoutError, Gone):
        pass
    return training


@contextlib.asynccontextmanager
async def _watching(store: Store, after: int, key: Key) -> AsyncIterator[AsyncIterator[Change]]:
    changes = store.watch(after, key)
    try:
        yield changes
    finally:
        if isinstance(changes, AsyncGenerator):
            await changes.aclose()


async def _until_deleted(store: Store, key: Key, deadline: float) -> None:
    try:
        async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
            while True:
                version = await store.version()
                try:
                    await store.get(key)
                    async with _watching(store, version, key) as changes:
                        async for change in changes:
                            if change.is_removed:
                                return
                except NotFound:
                    return
                except Gone:
                    continue
    except TimeoutError:
        raise Temporary(f"{key[1]!r} is still being deleted: try again") from None


def rendezvous_of(backend: str, executor: str | None) -> str:
    """The rendezvous backend to use: c10d instead of etcd-v2 where this machine has no etcd.

    Both are elastic, and etcd-v2 is the default of the client, rarely a choice of its user.
    """
    if backend != "etcd-v2" or executor != "local":
        return backend
    try:
        find_etcd()
    except BackendError:
        return "c10d"
    return backend if importlib.util.find_spec("etcd") else "c10d"


async def read(call: ApiCall) -> Answer:
    return answer(deployment(await call.plane.store.get(call.key)))


async def read_all(call: ApiCall) -> Answer:
    items = [list_item(training) for training in await call.plane.store.list(call.namespace)]
    return answer({"deployments": items, "total": len(items)})


async def scale(call: ApiCall) -> Answer:
    await trainings.scale(call)
    store = call.plane.store
    return answer(deployment(await _settled(store, await store.get(call.key))))


async def delete(call: ApiCall) -> Answer:
    await trainings.delete(call)
    message = "the ranks are being stopped, then the record is deleted"
    return answer({"instanceName": call.name, "state": "Terminating", "message": message})


async def restart(call: ApiCall) -> Answer:
    """Deletes the training, then creates it again from the same spec."""
    store = call.plane.store
    old = await store.get(call.key)
    if old.deletion_requested_at is not None:
        raise Conflict(f"training {call.name!r} is being deleted: deploy it again")
    spec = replace(admit(old.spec, call.plane, call.namespace), cancel=False)
    if spec.source is not None:  # read now: the code goes with the record
        spec = replace(spec, source=replace(spec.source, content=await store.source(old)))
    await trainings.delete(call)
    await _until_deleted(store, call.key, time.monotonic() + REMOVAL_S)
    again = Training(
        namespace=old.namespace, uid=uuid.uuid4().hex, spec=spec, created_at=time.time()
    )
    return answer(deployment(await store.create(again)))


async def events(call: ApiCall) -> Answer:
    await call.plane.store.get(call.key)
    newest_first = list(await call.plane.store.events(call.key))
    items = [event_item(event) for event in newest_first[: call.query.limit]]
    return answer({"events": items})


async def logs(call: ApiCall) -> Answer:
    """Plain text; each line begins with its rank where the training may have several.

    `tail` is per rank. A follow ends with the training, or shortly before the client gives up.
    """
    query: DeploymentLogQuery = call.query
    training = await call.plane.store.get(call.key)
    lines = executor_of(training, call.plane).logs(
        training,
        ranks=None,
        tail=query.tail,
        follow=partial(call.plane.informer.is_over, training) if query.follow else None,
    )
    has_ranks = training.spec.world_size.max > 1
    source = _text(lines, has_rank_prefix=has_ranks)
    limit_s = FOLLOW_LIMIT_S if query.follow else None
    chunks = call.plane.streams.run(source, heartbeat=b"", limit_s=limit_s)
    return StreamAnswer(chunks, "text/plain", CLOSE)


async def _text(lines: AsyncIterator[LogLine], *, has_rank_prefix: bool) -> AsyncIterator[bytes]:
    try:
        async for line in lines:
            prefix = f"[rank {line.rank}] " if has_rank_prefix else ""
            yield f"{prefix}{line.text}\n".encode(errors="replace")
    finally:
        if hasattr(lines, "aclose"):
            await lines.aclose()


_OK = {200: AnswerDoc("Done.")}

ROWS = (
    Operation("GET", "/health", health, "Whether the server is running.", _OK),
    Operation("POST", "/deployments", create, "Create a training.", {201: AnswerDoc("Stored.")}),
    Operation("GET", "/deployments", read_all, "List all trainings.", _OK),
    Operation("GET", ONE, read, "Read one training.", _OK),
    Operation("DELETE", ONE, delete, "Stop the ranks, then remove the training.", _OK),
    Operation(
        "POST",
        f"{ONE}/scale-distributed",
        scale,
        "Change the number of ranks.",
        _OK,
        body=trainings.Scale,
    ),
    Operation(
        "POST", f"{ONE}/restart", restart, "Start the training again from the beginning.", _OK
    ),
    Operation("GET", f"{ONE}/logs", logs, "Log lines of the ranks.", _OK, query=DeploymentLogQuery),
    Operation(
        "GET", f"{ONE}/events", events, "Events of the training.", _OK, query=DeploymentEventQuery
    ),
)
