"""Trainings over HTTP: create, read, watch, scale, cancel, delete; events, attempts and stats."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta
from msgspec.structs import replace

from atoll.agent.result import JSON, NONE
from atoll.core.errors import (
    Conflict,
    Gone,
    NotFound,
    Temporary,
    UDTerminalState,
    ValidationError,
    WorldSizeOutOfBounds,
)
from atoll.core.model import Model, SpecModel, encode
from atoll.core.ports import Change, Key, Store, TrainingPage
from atoll.core.problem import problem_of
from atoll.core.ranks import AttemptList, attempts_of, find_warnings, merge_warnings
from atoll.core.rounds import with_rounds
from atoll.core.select import Metrics, Selection
from atoll.core.settings import name_label
from atoll.core.spec import RankNumber, ScaleTarget, TrainingSpec, WorldSize
from atoll.core.status import UNSUPPORTED_FIELDS, Event, Training, TrainingList, training_stats
from atoll.server.handlers.admission import (
    admit,
    check_backend,
    check_growth,
    check_run,
    default_executor,
    executor_of,
    probe_executors,
    unsupported_message,
)
from atoll.server.handlers.metrics import aggregates_of, summary_of_training
from atoll.server.http.operations import (
    SSE,
    Answer,
    ApiCall,
    EncodedChanges,
    Query,
    json_answer,
    redact,
    status_of,
    stream_answer,
    with_staleness,
)

# Watches: changes of trainings as server-sent events, each encoded once for all watchers.

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
    # Each is a name, or one with a value: `lr=0.1`, `lr>=0.1`, `min:loss<2`. All must hold.
    label: list[str] = []
    setting: list[str] = []
    metric: list[str] = []
    sort: Annotated[str, Meta(min_length=1, max_length=200)] | None = None


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
    call.plane.executors[spec.executor or ""].check_gpus(spec)
    await check_run(spec, call.plane, call.namespace)
    await check_backend(spec, call.plane, call.namespace)
    training = Training(
        namespace=call.namespace, uid=uuid.uuid4().hex, spec=spec, created_at=time.time()
    )
    events = []
    if message := unsupported_message(training, call.plane):
        events = [Event(type="Warning", reason=UNSUPPORTED_FIELDS, message=message, at=time.time())]
    try:
        stored = await call.plane.store.create(
            training, idempotency_key=idempotency_key(call), events=events
        )
    except Conflict as error:
        await _name_the_other(call, training, error)
        raise
    is_new = stored.uid == training.uid
    if (
        not is_new
        and stored.generation == 1
        and stored.spec.by_digest() != training.spec.by_digest()
    ):
        raise Conflict(f"this idempotency key belongs to {stored.name!r}, which has another spec")
    return json_answer(redact(stored), 201 if is_new else 200)


async def _name_the_other(call: ApiCall, training: Training, error: Conflict) -> None:
    """Raises the same error with the name of the training that is there, as it is shown, if that is
    another one: `a b` and `a.b` are both the DNS label `a-b`."""
    try:
        other = (await call.plane.store.get(training.key)).display_name
    except NotFound:
        return  # deleted since
    if other != training.display_name:
        raise Conflict(
            f"{training.display_name!r} is too much like {other!r}, which exists: choose another "
            "name, or delete that one"
        ) from error


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
            training.status,
            warnings=merge_warnings(training.status.warnings, new_warnings),
            settings=training.settings_with(metrics.settings.get(training.uid, {})),
        )
        training = replace(training, status=status)
    training = with_staleness(training, call.plane.setup.stale())
    summary = await summary_of_training(call.plane, training.uid)
    return json_answer(with_rounds(redact(training), summary))


async def read_many(call: ApiCall) -> Answer:
    query: ListQuery = call.query
    last_event_id(call)
    if query.watch:
        for option in ("phase", "continue_", "label", "setting", "metric", "sort"):
            if value := getattr(query, option):
                raise ValidationError(option.strip("_"), value, "not with watch")
        return await watch(call, None)
    _check_watch_options(query)
    selection = Selection.parse(query.label, query.setting, query.metric, query.sort)
    version = await call.plane.store.version()
    page = await (_page if selection.sort is None else _sorted_page)(call, selection)
    stale = call.plane.setup.stale()
    items = [redact(with_staleness(training, stale)) for training in page.items]
    return json_answer(TrainingList(items=items, resource_version=version, continue_=page.more))


async def _page(call: ApiCall, selection: Selection) -> TrainingPage:
    """In order of name. A page of a filtered list may be short, or empty, and have a next one."""
    query: ListQuery = call.query
    page = await call.plane.store.page(
        call.namespace,
        after=query.continue_ or "",
        limit=query.limit,
        phase=query.phase,
        prefix=query.prefix,
    )
    if selection == Selection():
        return page
    values = await _metrics_of(call, page.items, selection)
    return page._replace(items=[each for each in page.items if selection.matches(each, values)])


async def _sorted_page(call: ApiCall, selection: Selection) -> TrainingPage:
    """All trainings are read for it; `continue` is the position in the sorted list."""
    query: ListQuery = call.query
    start = query.continue_ or "0"
    if not re.fullmatch("[0-9]{1,9}", start):
        raise ValidationError("continue", start, "expected the continue of the page before")
    trainings: list[Training] = []
    more: str | None = ""
    while more is not None:
        page = await call.plane.store.page(
            call.namespace, after=more, limit=500, phase=query.phase, prefix=query.prefix
        )
        trainings += page.items
        more = page.more
        await asyncio.sleep(0)
    values = await _metrics_of(call, trainings, selection)

    def order() -> list[Training]:
        matching = (each for each in trainings if selection.matches(each, values))
        return selection.order(matching, values, time.time())

    ordered = await asyncio.to_thread(order)
    end = int(start) + query.limit
    return TrainingPage(ordered[int(start) : end], str(end) if end < len(ordered) else None)


async def _metrics_of(
    call: ApiCall, trainings: Sequence[Training], selection: Selection
) -> Metrics:
    metric_store, names = call.plane.metrics, selection.metric_names
    if metric_store is None or not names:
        return {}
    uids = [training.uid for training in trainings]
    return await asyncio.to_thread(aggregates_of, metric_store, uids, names)


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


async def set_limits(call: ApiCall) -> Answer:
    executor = call.plane.executors.get(call.name)
    if executor is None:
        raise NotFound("executor", call.name)
    call.plane.setup.check_namespace(call.name, call.namespace)
    executor.set_limits(call.body)
    return json_answer(await probe_executors(call.plane.executors, call.plane.setup))


async def attempts(call: ApiCall) -> Answer:
    query: AttemptQuery = call.query
    training = await call.training()
    attempt_list = attempts_of(training.status, await call.plane.store.attempts(call.key))
    selected = [one for one in attempt_list if not query.rank or one.rank in query.rank]
    return json_answer(AttemptList(items=selected))


async def events(call: ApiCall) -> Answer:
    await call.training()
    newest_first = await call.plane.store.events(call.key, since=call.query.since)
    return json_answer(EventList(items=list(newest_first)))


async def stats(call: ApiCall) -> Answer:
    training = await call.training()
    return json_answer(training_stats(training, call.plane.clock()))


# Runs a training again under another name, with a copy of its spec and code.

MAX_NAME_CHARS = 63  # characters of a name
MAX_NAMES = 1000  # that are tried: `-r1` to `-r999` and the name itself
_RERUN = re.compile(r"-r([0-9]{1,3})$")


class Rerun(SpecModel, frozen=True):
    """What to change. `env` is merged over the copied variables."""

    name: str | None = None  # default: made from the old name
    world_size: WorldSize | None = None
    env: dict[str, str] = {}
    args: list[str] | None = None

    def __post_init__(self) -> None:
        if self.name is not None:
            name_label("name", self.name)


async def rerun(call: ApiCall) -> Answer:
    changes: Rerun = call.body
    old, key = await call.plane.store.get(call.key), idempotency_key(call)
    source = await _with_source(call.plane.store, old)
    spec = admit(apply_changes(source, changes), call.plane, call.namespace, is_code_stored=True)
    await check_run(spec, call.plane, call.namespace)
    await check_backend(spec, call.plane, call.namespace)
    executor = call.plane.executors[spec.executor or ""]
    if missing := executor.missing_path(spec):
        raise Conflict(f"training {old.name!r} cannot be run again: {missing} is gone")
    for name in names_after(old.display_name) if changes.name is None else (changes.name,):
        new = Training(
            namespace=call.namespace,
            uid=uuid.uuid4().hex,
            spec=replace(spec, name=name, display_name=None),
            created_at=time.time(),
        )
        try:
            stored = await call.plane.store.create(new, idempotency_key=key)
        except NotFound as error:
            raise _code_missing(old) from error
        except Conflict:
            if changes.name is not None:
                raise
            continue
        return json_answer(redact(stored), 201 if stored.uid == new.uid else 200)
    raise Conflict(f"{old.name!r} was run again {MAX_NAMES} times: give the new one a name")


def apply_changes(spec: TrainingSpec, changes: Rerun) -> TrainingSpec:
    """The spec with these changes, and without a cancellation."""
    return replace(
        spec,
        cancel=False,
        world_size=changes.world_size or spec.world_size,
        env={**spec.env, **changes.env},
        args=spec.args if changes.args is None else changes.args,
    )


def names_after(name: str) -> Iterator[str]:
    """Names for runs after `name`: `a-r2`, `a-r3`, …"""
    match = _RERUN.search(name)
    base, first = (name, 2) if match is None else (name[: match.start()], int(match[1]) + 1)
    for number in range(first, first + MAX_NAMES):
        end = f"-r{number}"
        yield base[: MAX_NAME_CHARS - len(end)].rstrip("-") + end


async def _with_source(store: Store, old: Training) -> TrainingSpec:
    spec = old.spec
    if spec.source is None or not spec.source.is_digest:
        return spec
    try:
        content = await store.source(old)
    except NotFound as error:
        raise _code_missing(old) from error
    return replace(spec, source=replace(spec.source, content=content))


def _code_missing(old: Training) -> Conflict:
    return Conflict(f"training {old.name!r} cannot be run again: its code is gone")


# Results of ranks over HTTP.


class ResultQuery(Query, frozen=True):
    rank: RankNumber = 0
    uid: str | None = None


class RankResult(Model, frozen=True, omit_defaults=False):
    """The result of a rank: `value` where it is JSON, else `payload` in base64.

    Other encodings are `msgpack` and, where the rank asked for it, `pickle`, which the server
    never opens. With the encoding `none` there is no value, and `error` says why.
    """

    rank: int
    encoding: str
    value: Any = None
    payload: str | None = None
    error: str | None = None


async def result(call: ApiCall) -> Answer:
    query: ResultQuery = call.query
    training = await call.training()
    executor = executor_of(training, call.plane)

    stored = await executor.result(training, query.rank)
    if stored is None:
        raise NotFound(f"result of rank {query.rank} of training", training.name)
    return json_answer(report_of(query.rank, *stored))


def report_of(rank: int, encoding: str, payload: bytes) -> RankResult:
    if encoding == NONE:
        error = payload.decode(errors="replace")
        return RankResult(rank=rank, encoding=encoding, error=error)
    if encoding != JSON:
        packed = base64.b64encode(payload).decode()
        return RankResult(rank=rank, encoding=encoding, payload=packed)
    try:
        report = RankResult(rank=rank, encoding=encoding, value=json.loads(payload))
        encode(report)  # JSON can name text that UTF-8 cannot hold
        return report
    except (ValueError, RecursionError) as error:
        message = f"the result cannot be read: it is not JSON in UTF-8: {error}"
        return RankResult(rank=rank, encoding=NONE, error=message)
