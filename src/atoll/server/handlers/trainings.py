"""Trainings over HTTP: create, read, watch, scale, cancel, delete; events, attempts and stats."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import Callable
from typing import Annotated, Literal

from msgspec import Meta
from msgspec.structs import replace

from atoll.core.attempts import AttemptList, attempts_of
from atoll.core.errors import (
    Conflict,
    NotFound,
    Temporary,
    UDTerminalState,
    ValidationError,
    WorldSizeOutOfBounds,
)
from atoll.core.model import Model, SpecModel
from atoll.core.rounds import with_rounds
from atoll.core.spec import RankNumber, ScaleTarget, TrainingSpec
from atoll.core.stats import training_stats
from atoll.core.status import UNSUPPORTED_FIELDS, Event, Training, TrainingList
from atoll.core.warnings import find_warnings, merge_warnings
from atoll.server.handlers.admission import (
    admit,
    check_backend,
    check_growth,
    check_run,
    default_executor,
    probe_executors,
    unsupported_message,
)
from atoll.server.handlers.rounds import summary_of_training
from atoll.server.handlers.watch import last_event_id, watch
from atoll.server.http.encoded import redact, with_staleness
from atoll.server.http.operations import Answer, ApiCall, Query, json_answer

WRITE_ATTEMPTS = 50  # conflicts with the controller end after two or three
KEY_PATTERN = "^[!-~]([ -~]{0,198}[!-~])?$"
IF_DEFAULT = "Atoll-If-Default"

_KEY = re.compile(KEY_PATTERN)

Version = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, Meta(ge=0, le=86_400 * 365)]


class OneQuery(Query, frozen=True):
    watch: bool = False
    after: Version | None = None
    timeout: Seconds | None = None


class ListQuery(OneQuery, frozen=True, rename={"continue_": "continue"}):
    limit: Annotated[int, Meta(ge=1, le=500)] = 100
    continue_: Annotated[str, Meta(pattern="^[A-Za-z0-9_=-]{1,2000}$")] | None = None
    phase: Literal["pending", "ready", "succeeded", "failed", "cancelled"] | None = None
    prefix: Annotated[str, Meta(max_length=63, pattern="^[a-z0-9-]*$")] = ""


class Scale(SpecModel, frozen=True):
    target: ScaleTarget


class Removal(Model, frozen=True):
    """A training that is being deleted: first its ranks stop, then the record goes."""

    name: str
    uid: str
    is_removed: bool = False


async def create(call: ApiCall) -> Answer:
    spec = admit(call.body, call.plane, call.namespace)
    _check_default(call, spec)
    await check_run(spec, call.plane, call.namespace)
    await check_backend(spec, call.plane, call.namespace)
    training = Training(
        namespace=call.namespace, uid=uuid.uuid4().hex, spec=spec, created_at=time.time()
    )
    events = []
    if words := unsupported_message(training, call.plane):
        events = [Event(type="Warning", reason=UNSUPPORTED_FIELDS, message=words, at=time.time())]
    stored = await call.plane.store.create(
        training, idempotency_key=idempotency_key(call), events=events
    )
    is_new = stored.uid == training.uid
    if (
        not is_new
        and stored.generation == 1
        and stored.spec.by_digest() != training.spec.by_digest()
    ):
        raise Conflict(f"this idempotency key belongs to {stored.name!r}, which has another spec")
    return json_answer(redact(stored), 201 if is_new else 200)


def _check_default(call: ApiCall, spec: TrainingSpec) -> None:
    """Raises ValidationError if the client expects another default executor.

    A client on this machine puts its own directory and environment into a spec for `local`.
    """
    expected = call.request.headers.get(IF_DEFAULT.lower())
    default = default_executor(call.plane)
    if expected is not None and expected != default:
        raise ValidationError("executor", spec.executor, f"the default here is {default}")


def idempotency_key(call: ApiCall) -> str | None:
    key: str | None = call.request.headers.get("idempotency-key")
    if key is not None and not _KEY.fullmatch(key):
        raise ValidationError("Idempotency-Key", key, "expected 1 to 200 printable characters")
    return key


async def read(call: ApiCall) -> Answer:
    query: OneQuery = call.query
    last_event_id(call)  # checks the header
    if query.watch:
        return await watch(call, call.name)
    _check_watch_options(query)
    training = await call.plane.store.get(call.key)
    metrics = call.plane.metrics
    if metrics is not None:
        if metrics.catch_up and training.status.phase.is_terminal:
            await metrics.catch_up(training)  # ranks report their last metrics as they end
        # The controller writes warnings a moment later.
        new_warnings = find_warnings(
            training, training.status.ranks, metrics.rounds.observed(training.uid)
        )
        status = replace(
            training.status, warnings=merge_warnings(training.status.warnings, new_warnings)
        )
        training = replace(training, status=status)
    training = with_staleness(training, call.plane.setup.stale())
    summary = await summary_of_training(call.plane, training.uid)
    return json_answer(with_rounds(redact(training), summary))


async def read_many(call: ApiCall) -> Answer:
    query: ListQuery = call.query
    last_event_id(call)
    if query.watch:
        if query.phase is not None or query.continue_ is not None:
            option = "phase" if query.phase is not None else "continue"
            value = getattr(query, option, query.continue_)
            raise ValidationError(option, value, "not with watch")
        return await watch(call, None)
    _check_watch_options(query)
    version = await call.plane.store.version()
    page = await call.plane.store.page(
        call.namespace,
        after=query.continue_ or "",
        limit=query.limit,
        phase=query.phase,
        prefix=query.prefix,
    )
    stale = call.plane.setup.stale()
    items = [redact(with_staleness(training, stale)) for training in page.items]
    return json_answer(TrainingList(items=items, resource_version=version, continue_=page.more))


def _check_watch_options(query: OneQuery) -> None:
    for option in ("after", "timeout"):
        if getattr(query, option) is not None:
            raise ValidationError(option, getattr(query, option), "expected only with watch")


async def scale(call: ApiCall) -> Answer:
    target = call.body.target

    def edit(training: Training) -> Training:
        size = training.spec.world_size
        if training.deletion_requested_at is not None:
            raise Conflict(f"training {call.name!r} is being deleted")
        if training.status.phase.is_terminal:
            raise UDTerminalState(training.status.phase.value, target)
        if not size.min <= target <= size.max:
            raise WorldSizeOutOfBounds(target, size.min, size.max)
        spec = replace(training.spec, world_size=replace(size, target=target))
        check_growth(training, spec, call.plane)
        return replace(training, spec=spec)

    try:
        return json_answer(redact(await _change(call, edit)))
    except UDTerminalState as error:
        event = Event(
            type="Warning", reason="UDTerminalState", message=f"scale: {error}", at=time.time()
        )
        await call.plane.store.record(call.key, event)
        raise


async def cancel(call: ApiCall) -> Answer:
    def edit(training: Training) -> Training:
        if training.status.phase.is_terminal:
            return training
        return replace(training, spec=replace(training.spec, cancel=True))

    return json_answer(redact(await _change(call, edit)))


async def delete(call: ApiCall) -> Answer:
    def edit(training: Training) -> Training:
        if training.deletion_requested_at is not None:
            return training
        return replace(training, deletion_requested_at=time.time())

    training = await _change(call, edit)
    return json_answer(Removal(name=training.name, uid=training.uid), 202)


async def _change(call: ApiCall, edit: Callable[[Training], Training]) -> Training:
    """Writes what `change` returns; tries again if the controller wrote in between."""
    store = call.plane.store
    for _ in range(WRITE_ATTEMPTS):
        training = await store.get(call.key)
        changed = edit(training)
        if changed == training:
            return training
        try:
            return await store.update_spec(changed)
        except Conflict:
            await asyncio.sleep(0)
    raise Temporary(f"training {call.name!r} changes too fast to be written: try again")


class UidQuery(Query, frozen=True):
    # Answer only for the training with this uid: another one may have its name by now.
    uid: Annotated[str, Meta(max_length=200)] | None = None


class EventQuery(UidQuery, frozen=True):
    since: Annotated[float, Meta(ge=0, le=1e12)] | None = None


class AttemptQuery(UidQuery, frozen=True):
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
    attempt_list = attempts_of(training.status, await call.plane.store.attempts(call.key))
    selected = [one for one in attempt_list if not query.rank or one.rank in query.rank]
    return json_answer(AttemptList(items=selected))


async def events(call: ApiCall) -> Answer:
    await training_of(call)
    newest_first = await call.plane.store.events(call.key, since=call.query.since)
    return json_answer(EventList(items=list(newest_first)))


async def stats(call: ApiCall) -> Answer:
    training = await training_of(call)
    return json_answer(training_stats(training, call.plane.clock()))
