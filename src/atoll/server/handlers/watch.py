"""Watches: changes of trainings as server-sent events, each encoded once for all watchers."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from atoll.core.errors import Gone, NotFound, ValidationError
from atoll.core.model import encode
from atoll.core.ports import Change, Key, Store
from atoll.core.problem import problem_of
from atoll.core.status import Training
from atoll.server.http.encoded import EncodedChanges
from atoll.server.http.operations import SSE, Answer, ApiCall, stream_answer
from atoll.server.http.problems import status_of

HEARTBEAT = b": heartbeat\n\n"
EVENT_ID_PATTERN = "^[0-9]{1,18}$"


async def watch(call: ApiCall, name: str | None) -> Answer:
    """Streams every change after the version `after`; without one, the present state first."""
    plane, query, store = call.plane, call.query, call.plane.store
    after = last_event_id(call) if query.after is None else query.after
    key = call.key if name else (call.namespace, "")
    prefix = "" if name else query.prefix
    present: AsyncIterator[Training] | None = None
    if after is None:
        after = await store.version()
        present = _one(await store.get(key)) if name else _all(store, call.namespace, prefix)
    elif name:
        after = await _first_version(store, after, key)

    def matches(change: Change) -> bool:
        return change.training.name.startswith(prefix)

    await _check_not_expired(store, after, key)
    source = _changes(present, store.watch(after, key), matches, plane.encoded)
    return stream_answer(plane.streams.run(source, heartbeat=HEARTBEAT, limit_s=query.timeout), SSE)


async def _first_version(store: Store, after: int, key: Key) -> int:
    """The version to watch a training from: the newest, if it has not changed since `after`.
    That one may be older than the change log, though nothing was missed.

    An unknown name is an error, unless changes of a removed training may still be kept.
    """
    newest = await store.version()
    try:
        training = await store.get(key)
    except NotFound:
        if after >= newest:
            raise
        return after
    return max(newest, after) if training.resource_version <= after <= newest else after


async def _check_not_expired(store: Store, after: int, key: Key) -> None:
    """Starts a watch and ends it, so that an expired version is a 410 and not a stream."""
    probe = store.watch(after, key)
    first = asyncio.ensure_future(anext(probe))
    await asyncio.wait({first}, timeout=0)
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
        await first


def last_event_id(call: ApiCall) -> int | None:
    """The last version that the client has, as browsers send it. Raises ValidationError."""
    text: str | None = call.request.headers.get("last-event-id")
    if text is None:
        return None
    if not re.fullmatch(EVENT_ID_PATTERN, text):
        raise ValidationError("Last-Event-ID", text, "expected a resource version")
    return int(text)


async def _one(training: Training) -> AsyncIterator[Training]:
    yield training


async def _all(store: Store, namespace: str, prefix: str) -> AsyncIterator[Training]:
    """Reads page by page, as fast as the client does."""
    more: str | None = ""
    while more is not None:
        page = await store.page(namespace, after=more, prefix=prefix)
        for training in page.items:
            yield training
        more = page.more


async def _changes(
    present: AsyncIterator[Training] | None,
    changes: AsyncIterator[Change],
    matches: Callable[[Change], bool],
    encoded: EncodedChanges,
) -> AsyncIterator[bytes]:
    yield HEARTBEAT  # some proxies hold back headers until the body begins
    try:
        sent_versions: dict[str, int] = {}  # by name: versions sent with the present state
        if present is not None:
            async for training in present:
                sent_versions[training.name] = training.resource_version
                yield encoded.of(Change(version=training.resource_version, training=training))
        newest_sent = max(sent_versions.values(), default=0)
        async for change in changes:
            if change.version <= newest_sent and change.version <= sent_versions.get(
                change.training.name, 0
            ):
                continue
            if matches(change):
                yield encoded.of(change)
    except Gone as error:
        problem = encode(problem_of(error, status_of(error)))
        yield b"event: error\ndata: " + problem + b"\n\n"
    finally:
        if isinstance(changes, AsyncGenerator):
            await changes.aclose()
