"""Trainings as custom resources of a cluster, which kubectl shows and changes as any other object.

The API server provides what a Store needs: versions, generations, conditional writes and a watch.
Events are part of the status, so that one write stores both; copies as Kubernetes events serve
`kubectl describe`. A finalizer keeps a training until its ranks are torn down.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from atoll.backends.kubernetes.client import Cluster, ObjectList
from atoll.backends.kubernetes.code import CodeMaps, CodeMissing
from atoll.backends.kubernetes.render import owner_of
from atoll.core.errors import (
    AtollError,
    Conflict,
    Denied,
    Gone,
    NotFound,
    ObjectTooLarge,
    Permanent,
    StatusRefused,
    Temporary,
    ValidationError,
)
from atoll.core.model import encode
from atoll.core.phase import ConditionType, PhaseReason
from atoll.core.ports import PAGE_BYTES, Change, Key, SettledTraining, Snapshot, TrainingPage
from atoll.core.spec import Code
from atoll.core.status import AttemptStatus, Event, Status, Training, clear_condition
from atoll.operator.resource import (
    FINALIZER,
    KEY_LABEL,
    is_leaving,
    mark_incomplete,
    read_list,
    smaller_bodies,
    spec_body,
    status_body,
    to_event,
    to_resource,
    to_training,
    with_attempts,
    with_events,
)

Json = dict[str, Any]
log = logging.getLogger(__name__)

KIND = "trainings"
RETRY_S = 0.5  # until a watch that broke is opened again
MAX_CACHED = 1000  # objects of up to 1 MB; those of trainings that run are far fewer
LISTED = 50  # objects of one request, which the API server cannot bound in bytes
SCANNED = 2000  # for one page: a filter that matches nothing ends after 40 requests


class KubernetesStore:
    """The Store of `core/ports.py` on `trainings.atoll.dev`, in one namespace or in all."""

    def __init__(self, cluster: Cluster, namespace: str | None = None) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._code = CodeMaps(cluster)
        self._copies: set[asyncio.Task[None]] = set()
        # By uid: an object as it was last read or written, and the training that it is.
        self._last: dict[str, tuple[Json, Training]] = {}
        self._refusals: dict[str, str] = {}  # the last status not stored, by uid, and why

    async def create(
        self,
        training: Training,
        *,
        idempotency_key: str | None = None,
        events: Sequence[Event] = (),
    ) -> Training:
        mark = None if idempotency_key is None else _digest(idempotency_key)
        code = training.spec.code
        if code is not None:
            await self._check_code(training, code)
            training = replace(training, spec=replace(training.spec, code=code.by_digest()))
        stored, is_new = await self._create(training, mark)
        await self._code.keep(stored.namespace, code, owner_of(stored))
        for event in events if is_new else ():
            await self.record(stored.key, event)
        return stored

    async def _check_code(self, training: Training, code: Code) -> None:
        if code.is_digest:
            try:
                await self._code.put(training.namespace, code)
            except CodeMissing as error:
                raise NotFound("code of training", training.name) from error

    async def _create(self, training: Training, mark: str | None) -> tuple[Training, bool]:
        """And whether it is new: its uid is the cluster's in any case."""
        if mark is not None and (original := await self._find_by_key(training, mark)):
            return original, False
        try:
            raw = await self._cluster.create(KIND, training.namespace, to_resource(training, mark))
        except Conflict as error:
            if mark is not None and (original := await self._find_by_key(training, mark)):
                return original, False
            raise Conflict(
                f"a training named {training.name!r} exists: choose another name, or delete "
                "it, as --replace and replace=True do"
            ) from error
        return to_training(raw), True

    async def get(self, key: Key) -> Training:
        raw = await self._raw(key)
        training = self._parse(raw)
        if len(self._last) >= MAX_CACHED:
            self._last.clear()
        # The next status write can add events to this object without reading it again.
        self._last[training.uid] = raw, training
        return training

    async def list(self, namespace: str | None = None) -> Sequence[Training]:
        return (await self._list(namespace))[1]

    async def snapshot(self) -> Snapshot:
        return _snapshot(*await self._list(None))

    async def _list(self, namespace: str | None) -> tuple[int, Sequence[Training]]:
        """And the version that they were read at."""
        version, trainings = 0, list[Training]()
        try:
            async for page in self._cluster.pages(KIND, namespace or self._namespace):
                version = version or int(page.version)
                trainings += [t for t in map(self._readable, page.items) if t is not None]
        except Gone as error:
            raise Temporary("reading all trainings took too long; trying again") from error
        return version, sorted(trainings, key=lambda t: (t.name, t.namespace))

    async def page(
        self,
        namespace: str,
        *,
        after: str = "",
        limit: int = 100,
        max_bytes: int = PAGE_BYTES,
        phase: str | None = None,
        prefix: str = "",
    ) -> TrainingPage:
        """The API server orders a namespace by name and limits a list by count, not by size: a page
        that is too large is requested again with fewer objects. Phases and prefixes are filtered
        here. One page reads at most `SCANNED` objects."""
        items: list[Training] = []
        scanned, left, more = 0, max_bytes, after
        while len(items) < limit and scanned < SCANNED:
            objects = await self._some(namespace, min(limit - len(items), LISTED), more)
            room = _fitting(objects.items, left) or (0 if items else 1)
            if room == 0:
                break
            if room < len(objects.items):
                objects = await self._some(namespace, room, more)
            for raw in objects.items:
                training = self._readable(raw)
                if training is None or not training.name.startswith(prefix):
                    continue
                if phase in (None, training.status.phase):
                    items.append(training)
                    left -= len(encode(raw))
            scanned += len(objects.items)
            more = objects.more
            if not more:
                break
        return TrainingPage(items, more or None)

    async def _some(self, namespace: str, count: int, after: str) -> ObjectList:
        try:
            return await self._cluster.page(KIND, namespace, limit=count, after=after)
        except Permanent as error:
            expected = f"expected the continue of the page before ({error})"
            raise ValidationError("continue", after, expected) from error

    async def update_spec(self, training: Training) -> Training:
        patch = [
            _on_version(training),
            {"op": "replace", "path": "/spec", "value": spec_body(training)},
        ]
        with _store_errors(training):
            raw = await self._cluster.patch(KIND, *training.key, patch, type="json")
            stored = _checked(raw, training)
            if training.deletion_requested_at is None or stored.deletion_requested_at is not None:
                return stored
            await self._cluster.delete(
                KIND, *training.key, uid=stored.uid, version=str(stored.resource_version)
            )
        try:
            return await self.get(training.key)
        except NotFound:
            return replace(stored, deletion_requested_at=training.deletion_requested_at)

    async def update_status(
        self,
        training: Training,
        status: Status,
        events: Sequence[Event] = (),
        attempts: Sequence[AttemptStatus] = (),
    ) -> Training:
        raw, last = self._last.pop(training.uid, (None, None))
        if raw is None or last is None or last.resource_version != training.resource_version:
            raw = await self._raw(training.key)
            if _checked(raw, training).resource_version != training.resource_version:
                raise _changed(training)
        if FINALIZER not in (raw["metadata"].get("finalizers") or ()) and not is_leaving(raw):
            raw = await self._hold(raw)
        before = raw.get("status") or {}
        conditions = clear_condition(status.conditions, ConditionType.STATUS_INCOMPLETE)
        status = replace(status, conditions=conditions)
        history, past = with_events(before, events), with_attempts(before, attempts)
        body = status_body(training, status, history, past)
        with _store_errors(training):
            try:
                raw = await self._write_status(raw, body)
                version = int(raw["metadata"]["resourceVersion"])
                training = replace(training, status=status, resource_version=version)
            except (Permanent, Denied) as refusal:
                raw = await self._write_less(raw, body, training, status, refusal)
                training = to_training(raw)
        self._copy(raw, events)
        self._last[training.uid] = raw, training
        return training

    async def remove(self, training: Training) -> None:
        with contextlib.suppress(NotFound):
            raw = await self._raw(training.key)
            if raw["metadata"]["uid"] != training.uid:
                return
            await self._drop_finalizer(raw)
            self._refusals.pop(training.uid, None)
            if not is_leaving(raw):
                with contextlib.suppress(Conflict):  # by now, another training has its name
                    await self._cluster.delete(KIND, *training.key, uid=training.uid)

    async def record(self, key: Key, event: Event) -> None:
        while True:
            raw = await self._raw(key)
            body = dict(raw.get("status") or {})
            body["events"] = with_events(body, [event])
            try:
                raw = await self._write_status(raw, body)
            except Conflict:
                continue
            except Permanent:  # no room: the copy has to do
                pass
            self._copy(raw, [event])
            return

    async def events(self, key: Key, *, since: float | None = None) -> Sequence[Event]:
        status = (await self._raw(key)).get("status") or {}
        history = read_list(status.get("events"), Event)
        recent = [e for e in history if since is None or e.at >= since]
        return sorted(recent, key=lambda e: (e.at, e.id), reverse=True)

    async def attempts(self, key: Key) -> Sequence[AttemptStatus]:
        status = (await self._raw(key)).get("status") or {}
        return read_list(status.get("attempts"), AttemptStatus)

    async def watch(self, after: int, key: Key | None = None) -> AsyncIterator[Change]:
        namespace, name = key or (self._namespace, "")
        fields = f"metadata.name={name}" if name else ""
        if after > (newest := await self.version()):
            raise Gone(after, newest)  # the API server would wait for that version
        version = max(after, 1)  # 0 would mean "from anywhere", with gaps
        latest: dict[Key, Training] = {}
        while True:
            try:
                events = self._cluster.watch(KIND, namespace, after=str(version), fields=fields)
                async with contextlib.aclosing(events):
                    async for event in events:
                        version = int(event.object["metadata"]["resourceVersion"])
                        if event.type == "BOOKMARK":
                            continue
                        training = self._readable(event.object)
                        if training is None or _is_same(training, event.type, latest):
                            continue
                        is_removed = event.type == "DELETED"
                        yield Change(version=version, training=training, is_removed=is_removed)
            except Gone as error:
                raise Gone(after, version) from error
            except Temporary as error:
                log.info("watching trainings: %s; trying again", error)
                await asyncio.sleep(RETRY_S)

    async def source(self, training: Training) -> bytes:
        assert training.spec.source is not None
        return training.spec.source.content

    async def code(self, training: Training) -> bytes:
        """Its digest: the archive is in ConfigMaps beside the training."""
        assert training.spec.code is not None
        return training.spec.code.content

    async def version(self) -> int:
        return int((await self._cluster.page(KIND, self._namespace, limit=1)).version)

    async def close(self) -> None:
        await asyncio.gather(*self._copies, return_exceptions=True)

    def _parse(self, raw: Json) -> Training:
        """Each version of an object is read once, and its spec once a generation."""
        metadata = raw["metadata"]
        _, last = self._last.get(metadata["uid"], (None, None))
        if last is None:
            return to_training(raw)
        if last.resource_version == int(metadata["resourceVersion"]):
            return last
        is_same = last.generation == metadata.get("generation", 1)
        return to_training(raw, last.spec if is_same else None)

    async def _raw(self, key: Key) -> Json:
        try:
            return await self._cluster.get(KIND, *key)
        except NotFound as error:
            raise NotFound("training", key[1]) from error

    async def _find_by_key(self, training: Training, mark: str) -> Training | None:
        objects = await self._cluster.list(KIND, training.namespace, labels=f"{KEY_LABEL}={mark}")
        if not objects.items:
            return None
        original = to_training(objects.items[0])
        if original.name != training.name:
            raise Conflict(
                f"this idempotency key made the training {original.name!r}, not {training.name!r}"
            )
        return original

    async def _hold(self, raw: Json) -> Json:
        """The object with atoll's finalizer, which it needs before anything is started for it."""
        metadata = raw["metadata"]
        patch = {
            "metadata": {
                "resourceVersion": metadata["resourceVersion"],
                "finalizers": [*(metadata.get("finalizers") or ()), FINALIZER],
            }
        }
        return await self._cluster.patch(KIND, metadata["namespace"], metadata["name"], patch)

    async def _drop_finalizer(self, raw: Json) -> None:
        while FINALIZER in (raw["metadata"].get("finalizers") or ()):
            metadata = raw["metadata"]
            others = [f for f in metadata["finalizers"] if f != FINALIZER]
            version = metadata["resourceVersion"]
            patch = {"metadata": {"resourceVersion": version, "finalizers": others}}
            key = (metadata["namespace"], metadata["name"])
            try:
                await self._cluster.patch(KIND, *key, patch)
                return
            except Conflict:
                raw = await self._raw(key)

    async def _write_status(self, raw: Json, body: Json) -> Json:
        metadata = raw["metadata"]
        patch = [
            {
                "op": "replace",
                "path": "/metadata/resourceVersion",
                "value": metadata["resourceVersion"],
            },
            {"op": "add", "path": "/status", "value": body},
        ]
        return await self._cluster.patch(
            KIND, metadata["namespace"], metadata["name"], patch, type="json", part="status"
        )

    async def _write_less(
        self, raw: Json, body: Json, training: Training, status: Status, refusal: AtollError
    ) -> Json:
        """Writes what the API server takes of a status that it has refused; a condition and an
        event say what it did not take. Raises StatusRefused if it takes nothing that will do."""
        for left_out, smaller in smaller_bodies(training, status, body):
            message = f"{left_out} could not be stored: {refusal}"
            marked = mark_incomplete(smaller, _reason(refusal), message, time.time())
            with contextlib.suppress(Permanent, Denied):
                raw = await self._write_status(raw, marked)
                self._record_refusal(raw, message)
                return raw
        message = f"the status cannot be stored: {refusal}"
        self._record_refusal(raw, message)
        before = mark_incomplete(raw.get("status") or {}, _reason(refusal), message, time.time())
        if before != raw.get("status"):
            with contextlib.suppress(AtollError):
                await self._write_status(raw, before)
        raise StatusRefused(message) from refusal

    def _record_refusal(self, raw: Json, message: str) -> None:
        """One event for each refusal, however often the status is written again."""
        uid = raw["metadata"]["uid"]
        if self._refusals.get(uid) == message:
            return
        self._refusals[uid] = message
        event = Event(
            type="Warning", reason=ConditionType.STATUS_INCOMPLETE, message=message, at=time.time()
        )
        self._copy(raw, [event])
        log.warning(
            "training %s/%s: %s", raw["metadata"]["namespace"], raw["metadata"]["name"], message
        )

    def _readable(self, raw: Json) -> Training | None:
        """None for an object whose spec breaks a rule that the API server does not check."""
        try:
            return self._parse(raw)
        except ValidationError as error:
            metadata = raw["metadata"]
            log.warning("training %s/%s: %s", metadata["namespace"], metadata["name"], error)
            message = (raw.get("status") or {}).get("message", "")
            if message != str(error):
                self._spawn(self._refuse(raw, str(error)))
            return None

    async def _refuse(self, raw: Json, message: str) -> None:
        body = {**(raw.get("status") or {}), "phase": "failed", "reason": PhaseReason.INVALID_SPEC}
        await self._write_status(raw, {**body, "message": message})

    def _copy(self, raw: Json, events: Sequence[Event]) -> None:
        """Copies events for `kubectl describe`; those in the status are authoritative."""
        for event in events:
            body = to_event(raw, event)
            self._spawn(self._cluster.create("events", raw["metadata"]["namespace"], body))

    def _spawn(self, call: Any) -> None:
        async def quietly() -> None:
            with contextlib.suppress(AtollError):
                await call

        task = asyncio.create_task(quietly())
        self._copies.add(task)
        task.add_done_callback(self._copies.discard)


def _snapshot(version: int, trainings: Iterable[Training]) -> Snapshot:
    active, settled = list[Training](), list[SettledTraining]()
    for each in trainings:
        if each.is_settled:
            settled.append(SettledTraining(each.uid, each.key, each.status.phase))
        else:
            active.append(each)
    return Snapshot(version, active, settled)


def _fitting(objects: Sequence[Json], max_bytes: int) -> int:
    """How many of the first objects have that many bytes together."""
    for count, raw in enumerate(objects):
        max_bytes -= len(encode(raw))
        if max_bytes < 0:
            return count
    return len(objects)


def _is_same(training: Training, type: str, latest: dict[Key, Training]) -> bool:
    """Whether only metadata that a Training does not contain has changed, such as a finalizer."""
    bare = replace(training, resource_version=0)
    if type == "DELETED":
        latest.pop(training.key, None)
        return False
    before, latest[training.key] = latest.get(training.key), bare
    return before == bare


def _on_version(training: Training) -> Json:
    version = str(training.resource_version)
    return {"op": "replace", "path": "/metadata/resourceVersion", "value": version}


def _checked(raw: Json, training: Training) -> Training:
    """The training as stored. Raises NotFound if another one has taken its name."""
    stored = to_training(raw)
    if stored.uid != training.uid:
        raise NotFound("training", training.name)
    return stored


def _changed(training: Training) -> Conflict:
    return Conflict(
        f"training {training.name!r} was changed since version "
        f"{training.resource_version}: read it again"
    )


@contextlib.contextmanager
def _store_errors(training: Training) -> Any:
    """Turns Kubernetes' errors about this training into errors of the Store."""
    try:
        yield
    except NotFound as error:
        raise NotFound("training", training.name) from error
    except Conflict as error:
        raise _changed(training) from error
    except StatusRefused:
        raise
    except Permanent as error:
        raise ValidationError("spec", training.name, str(error)) from error


def _reason(refusal: Exception) -> str:
    return "TooLarge" if isinstance(refusal, ObjectTooLarge) else "Refused"


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:40]
