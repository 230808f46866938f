"""Trainings over HTTP: create, read, list, watch, scale, cancel, delete."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Annotated, Literal

from msgspec import Meta
from msgspec.structs import replace

from atoll.core.checks import NAME_PATTERN
from atoll.core.errors import (
    Conflict,
    Gone,
    Temporary,
    UDTerminalState,
    ValidationError,
    WorldSizeOutOfBounds,
)
from atoll.core.model import Model, SpecModel, encode
from atoll.core.ports import Change, Key, Store
from atoll.core.problem import problem_of
from atoll.core.spec import ScaleTarget, TrainingSpec
from atoll.core.status import Event, Training, TrainingList
from atoll.server.admission import admitted, default_executor
from atoll.server.operations import SSE, Answer, ApiCall, Query, json_answer, stream_answer
from atoll.server.problems import status_of

WRITE_ATTEMPTS = 50
MAX_KEY = 200
IF_DEFAULT = "Atoll-If-Default"
BEAT = b": still here\n\n"

Version = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=86_400 * 365)]
Name = Annotated[str, Meta(pattern=NAME_PATTERN)]


class OneQuery(Query, frozen=True):
    watch: bool = False
    after: Version | None = None
    timeout: Seconds | None = None


class ListQuery(OneQuery, frozen=True, rename={"continue_": "continue"}):
    limit: Annotated[int, Meta(ge=1, le=500)] = 100
    continue_: Name | None = None
    phase: Literal["pending", "ready", "succeeded", "failed", "cancelled"] | None = None
    prefix: Annotated[str, Meta(max_length=63, pattern="^[a-z0-9-]*$")] = ""


class Scale(SpecModel, frozen=True):
    target: ScaleTarget


class Removal(Model, frozen=True):
    """A training whose ranks are being stopped and whose record is then removed."""

    name: str
    uid: str
    is_removed: bool = False


async def create(call: ApiCall) -> Answer:
    spec = admitted(call.body, call.plane)
    _check_default(call, spec)
    wish = Training(
        namespace=call.namespace, uid=uuid.uuid4().hex, spec=spec, created_at=time.time()
    )
    stored = await call.plane.store.create(wish, idempotency_key=_key(call))
    is_new = stored.uid == wish.uid
    if not is_new and stored.generation == 1 and compact(stored).spec != compact(wish).spec:
        raise Conflict(f"this idempotency key belongs to {stored.name!r}, which has another spec")
    return json_answer(compact(stored), 201 if is_new else 200)


def _check_default(call: ApiCall, spec: TrainingSpec) -> None:
    """Refuses a spec that was made for another default executor than there is.

    A client on this machine puts its own directory and environment into a spec for `local`.
    """
    expected = call.request.headers.get(IF_DEFAULT.lower())
    default = default_executor(call.plane)
    if expected is not None and expected != default:
        raise ValidationError("executor", spec.executor, f"the default here is {default}")


def _key(call: ApiCall) -> str | None:
    key: str | None = call.request.headers.get("idempotency-key")
    if key is not None and not (0 < len(key) <= MAX_KEY and key.isprintable()):
        raise ValidationError(
            "Idempotency-Key", key, f"expected 1 to {MAX_KEY} printable characters"
        )
    return key


async def read(call: ApiCall) -> Answer:
    query: OneQuery = call.query
    if query.watch:
        return await watch(call, call.name)
    _only_with_watch(query)
    return json_answer(compact(await call.plane.store.get(call.key)))


async def read_many(call: ApiCall) -> Answer:
    query: ListQuery = call.query
    if query.watch:
        if query.phase is not None or query.continue_ is not None:
            option = "phase" if query.phase is not None else "continue"
            value = getattr(query, option, query.continue_)
            raise ValidationError(option, value, "not with watch")
        return await watch(call, None)
    _only_with_watch(query)
    version = await call.plane.store.version()
    matches = await call.plane.store.list(
        call.namespace,
        after=query.continue_ or "",
        limit=query.limit + 1,
        phase=query.phase,
        prefix=query.prefix,
    )
    page = [compact(training) for training in matches[: query.limit]]
    more = page[-1].name if len(matches) > query.limit else None
    return json_answer(TrainingList(items=page, resource_version=version, continue_=more))


def _only_with_watch(query: OneQuery) -> None:
    for option in ("after", "timeout"):
        if getattr(query, option) is not None:
            raise ValidationError(option, getattr(query, option), "expected only with watch")


async def watch(call: ApiCall, name: str | None) -> Answer:
    """Streams every change after the version `after`; without it, the present state first."""
    plane, query = call.plane, call.query
    after = query.after
    if after is None and "last-event-id" in call.request.headers:
        after = _last_event_id(call.request.headers["last-event-id"])
    now: list[Change] = []
    if after is None:
        after = await plane.store.version()
        present = [await plane.store.get(call.key)] if name else await _all(call)
        now = [Change(version=t.resource_version, training=t) for t in present]
        after = max([after, *(change.version for change in now)])
    elif name:
        # An unknown name is an error; the changes of a removed training may still be in the store.
        await _check_known(call, after)
    prefix = "" if name else query.prefix

    def is_wanted(change: Change) -> bool:
        training = change.training
        return training.namespace == call.namespace and training.name.startswith(prefix)

    key = call.key if name else None
    await _check_kept(plane.store, after, key)
    source = _changes(now, plane.store.watch(after, key), is_wanted)
    return stream_answer(plane.streams.run(source, beat=BEAT, limit_s=query.timeout), SSE)


async def _check_kept(store: Store, after: int, key: Key | None) -> None:
    """Tries the first step of a watch, so that a version too old is a 410 and not a stream."""
    probe = store.watch(after, key)
    first = asyncio.ensure_future(anext(probe))
    await asyncio.wait({first}, timeout=0)
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
        await first


async def _check_known(call: ApiCall, after: int) -> None:
    store = call.plane.store
    newest = await store.version()
    if after >= newest:
        await store.get(call.key)


def _last_event_id(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise ValidationError("Last-Event-ID", text, "expected a resource version")
    return int(text)


async def _all(call: ApiCall) -> list[Training]:
    return list(await call.plane.store.list(call.namespace, prefix=call.query.prefix))


async def _changes(
    now: list[Change], rest: AsyncIterator[Change], is_wanted: Callable[[Change], bool]
) -> AsyncIterator[bytes]:
    yield BEAT  # some proxies hold back headers until the body begins
    for change in now:
        yield event_bytes(change)
    try:
        async for change in rest:
            if is_wanted(change):
                yield event_bytes(change)
    except Gone as error:
        problem = encode(problem_of(error, status_of(error)))
        yield b"event: error\ndata: " + problem + b"\n\n"
    finally:
        if isinstance(rest, AsyncGenerator):
            await rest.aclose()


def event_bytes(change: Change) -> bytes:
    """One change as a server-sent event; its id is the version to resume from."""
    kind = b"removed" if change.is_removed else b"changed"
    data = encode(compact(change.training))
    return b"event: %b\nid: %d\ndata: %b\n\n" % (kind, change.version, data)


async def scale(call: ApiCall) -> Answer:
    target = call.body.target

    def wish(training: Training) -> Training:
        size = training.spec.world_size
        if training.deletion_requested_at is not None:
            raise Conflict(f"training {call.name!r} is being deleted")
        if training.status.phase.is_terminal:
            raise UDTerminalState(training.status.phase.value, target)
        if not size.min <= target <= size.max:
            raise WorldSizeOutOfBounds(target, size.min, size.max)
        world_size = replace(size, target=target)
        return replace(training, spec=replace(training.spec, world_size=world_size))

    try:
        return json_answer(compact(await _change(call, wish)))
    except UDTerminalState as error:
        event = Event(
            type="Warning", reason="UDTerminalState", message=f"scale: {error}", at=time.time()
        )
        await call.plane.store.record(call.key, event)
        raise


async def cancel(call: ApiCall) -> Answer:
    def wish(training: Training) -> Training:
        if training.status.phase.is_terminal:
            return training
        return replace(training, spec=replace(training.spec, cancel=True))

    return json_answer(compact(await _change(call, wish)))


async def delete(call: ApiCall) -> Answer:
    def wish(training: Training) -> Training:
        if training.deletion_requested_at is not None:
            return training
        return replace(training, deletion_requested_at=time.time())

    training = await _change(call, wish)
    return json_answer(Removal(name=training.name, uid=training.uid), 202)


async def _change(call: ApiCall, wish: Callable[[Training], Training]) -> Training:
    """Writes what `wish` returns; reads and tries again if the controller wrote in between."""
    store = call.plane.store
    for _ in range(WRITE_ATTEMPTS):
        training = await store.get(call.key)
        changed = wish(training)
        if changed == training:
            return training
        try:
            return await store.update_spec(changed)
        except Conflict:
            await asyncio.sleep(0)
    raise Temporary(f"training {call.name!r} changes too fast to be written: try again")


def compact(training: Training) -> Training:
    """The training with the digest of its shipped code in place of the code, for small answers."""
    source = training.spec.source
    if source is None:
        return training
    return replace(training, spec=replace(training.spec, source=source.by_digest()))
