"""`/deployments` and `/health` for the basilica-sdk client, over the same store and controller.

Its clients never retry and keep no idle connection safely, so every answer closes its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

import atoll
from atoll.core.errors import (
    BackendError,
    Conflict,
    Gone,
    NotFound,
    Temporary,
    ValidationError,
)
from atoll.core.model import decode
from atoll.core.ports import Change, Key, Store
from atoll.core.status import LogLine, Training
from atoll.local.rendezvous_file import find_etcd
from atoll.server import reports, trainings
from atoll.server.admission import admitted, default_executor, executor_of
from atoll.server.auth import caller
from atoll.server.basilica.answers import CLOSE, UNSUPPORTED, Unsupported, on_error, said
from atoll.server.basilica.request import Create, Probe, spec_of
from atoll.server.basilica.wire import deployment, event_item, is_settled, listed, moment
from atoll.server.operations import (
    Answer,
    Call,
    Operation,
    Plane,
    Query,
    Said,
    Stream,
    read_body,
    routes,
)
from atoll.server.routing import REST, Route

ONE = "/deployments/{name}"
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
FOLLOW_LIMIT_S = 1150.0  # the client gives up, and loses all it has read, after 1200
REMOVAL_S = 60.0
SETTLE_S = 1.0
DRAIN_S = 20.0


class DeploymentLogQuery(Query, frozen=True):
    follow: bool = False
    tail: Annotated[int, Meta(ge=0, le=10_000_000)] | None = None


class DeploymentEventQuery(Query, frozen=True):
    limit: Annotated[int, Meta(ge=0, le=2**31)] | None = None


def routes_of(plane: Plane) -> list[Route]:
    refusals = (_refusal(method, prefix) for prefix in UNSUPPORTED for method in METHODS)
    return [*routes(ROWS, plane, caller, on_error), *refusals]


def _refusal(method: str, prefix: str) -> Route:
    async def refuse(request: Request) -> Answer:
        raise Unsupported(f"atoll does not support {UNSUPPORTED[prefix]}")

    return Route(method, f"{prefix}/{REST}", refuse, on_error)


async def health(call: Call) -> Answer:
    await call.plane.store.version()
    count = len(call.plane.executors)
    return said(
        {
            "status": "healthy",
            "version": atoll.__version__,
            "timestamp": moment(time.time()),
            "healthy_validators": count,
            "total_validators": count,
        }
    )


async def create(call: Call) -> Answer:
    body = await _body(call.request)
    if decode(body, Probe).distributed is None:
        raise Unsupported(
            "atoll does not support inference deployments: it runs distributed trainings "
            "(basilica.distributed), which have 'distributed' in the request"
        )
    wish = decode(body, Create)
    if not wish.distributed.enabled:
        raise ValidationError("distributed.enabled", False, "expected true")
    executor = default_executor(call.plane)
    spec = spec_of(
        wish,
        backend=rendezvous_of(wish.distributed.rendezvous.backend, executor),
        path_first=str(Path(sys.executable).parent) if executor == "local" else None,
    )
    spec = admitted(spec, call.plane)
    training = Training(
        namespace=call.namespace, uid=uuid.uuid4().hex, spec=spec, created_at=time.time()
    )
    stored = await _create(call.plane.store, training)
    return said(deployment(await _settled(call.plane.store, stored)), 201)


async def _body(request: Request) -> bytes:
    """The body. One that is too large is read all the same: a client that is still sending
    when the connection closes never sees why."""
    try:
        return await read_body(request)
    except HTTPException:
        with contextlib.suppress(TimeoutError, ClientDisconnect):
            async with asyncio.timeout(DRAIN_S):
                while (await request.receive()).get("more_body"):
                    pass
        raise


async def _create(store: Store, training: Training) -> Training:
    """Stored; a name that is just being given up is waited for."""
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
        await _until_gone(store, training.key, deadline)


async def _settled(store: Store, training: Training) -> Training:
    """As it is when it is as asked for, or a second later: the client looks every 5 s only."""
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


async def _until_gone(store: Store, key: Key, deadline: float) -> None:
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
        raise Temporary(f"{key[1]!r} is still being removed: try again") from None


def rendezvous_of(asked: str, executor: str | None) -> str:
    """What was asked for; c10d where this machine has nothing to meet in etcd with.

    Both are elastic, and etcd-v2 is the client's default, not its user's decision.
    """
    if asked != "etcd-v2" or executor != "local":
        return asked
    try:
        find_etcd()
    except BackendError:
        return "c10d"
    return asked if importlib.util.find_spec("etcd") else "c10d"


async def read(call: Call) -> Answer:
    return said(deployment(await call.plane.store.get(call.key)))


async def read_all(call: Call) -> Answer:
    found = await call.plane.store.list(call.namespace)
    return said({"deployments": [listed(training) for training in found], "total": len(found)})


async def scale(call: Call) -> Answer:
    await trainings.scale(call)
    store = call.plane.store
    return said(deployment(await _settled(store, await store.get(call.key))))


async def delete(call: Call) -> Answer:
    await trainings.delete(call)
    message = "the ranks are being stopped, then the record is removed"
    return said({"instanceName": call.name, "state": "Terminating", "message": message})


async def restart(call: Call) -> Answer:
    """The same training from the start: removed, and created again once it is gone."""
    store = call.plane.store
    old = await store.get(call.key)
    if old.deletion_requested_at is not None:
        raise Conflict(f"training {call.name!r} is being deleted: deploy it again")
    spec = replace(admitted(old.spec, call.plane), cancel=False)
    if spec.source is not None:  # read now: the code goes with the record
        spec = replace(spec, source=replace(spec.source, content=await store.source(old)))
    await trainings.delete(call)
    await _until_gone(store, call.key, time.monotonic() + REMOVAL_S)
    again = Training(
        namespace=old.namespace, uid=uuid.uuid4().hex, spec=spec, created_at=time.time()
    )
    return said(deployment(await store.create(again)))


async def events(call: Call) -> Answer:
    await call.plane.store.get(call.key)
    found = list(await call.plane.store.events(call.key))
    limit = call.query.limit
    return said({"events": [event_item(event) for event in found[:limit]]})


async def logs(call: Call) -> Answer:
    """Plain text, each line with its rank where there may be more than one.

    `tail` is per rank. A follow ends with the training, or before the client would give up.
    """
    query: DeploymentLogQuery = call.query
    training = await call.plane.store.get(call.key)
    end = reports.End(training)
    lines = executor_of(training, call.plane).logs(
        training, tail=query.tail, follow=end.is_reached if query.follow else None
    )
    is_shown = training.spec.world_size.max > 1
    source = _text(lines, end, call.plane.store, is_rank_shown=is_shown)
    limit_s = FOLLOW_LIMIT_S if query.follow else None
    chunks = call.plane.streams.run(source, beat=b"", limit_s=limit_s)
    return Stream(chunks, "text/plain", CLOSE)


async def _text(
    lines: AsyncIterator[LogLine], end: reports.End, store: Store, *, is_rank_shown: bool
) -> AsyncIterator[bytes]:
    async with end.watched(store):
        try:
            async for line in lines:
                prefix = f"[rank {line.rank}] " if is_rank_shown else ""
                yield f"{prefix}{line.text}\n".encode(errors="replace")
        finally:
            if hasattr(lines, "aclose"):
                await lines.aclose()


_OK = {200: Said("Done.")}

ROWS = (
    Operation("GET", "/health", health, "Is the server there?", _OK),
    Operation("POST", "/deployments", create, "Deploy.", {201: Said("Stored.")}),
    Operation("GET", "/deployments", read_all, "All of them.", _OK),
    Operation("GET", ONE, read, "One of them.", _OK),
    Operation("DELETE", ONE, delete, "Stop and remove.", _OK),
    Operation("POST", f"{ONE}/scale-distributed", scale, "Resize.", _OK, body=trainings.Scale),
    Operation("POST", f"{ONE}/restart", restart, "From the start again.", _OK),
    Operation("GET", f"{ONE}/logs", logs, "What ranks print.", _OK, query=DeploymentLogQuery),
    Operation("GET", f"{ONE}/events", events, "What happened.", _OK, query=DeploymentEventQuery),
)
