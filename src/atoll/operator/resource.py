"""Converts trainings to Kubernetes objects and back. Pure."""

from __future__ import annotations

import base64
import binascii
import contextlib
import logging
import zlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from atoll.backends.kubernetes.names import GROUP, VERSION
from atoll.core.errors import ValidationError
from atoll.core.model import Model, convert, decode, encode, json_decoder
from atoll.core.phase import ConditionType
from atoll.core.ranks import newest_attempts
from atoll.core.spec import TrainingSpec
from atoll.core.status import (
    AttemptStatus,
    Condition,
    Event,
    Exit,
    RankExit,
    RankPhase,
    RankStatus,
    Status,
    StatusHead,
    Training,
    in_ms,
    set_condition,
)
from atoll.core.text import spans

Json = dict[str, Any]
log = logging.getLogger(__name__)

FINALIZER = "atoll.dev/teardown"
KEY_LABEL = "atoll.dev/idempotency-key"
# Some hundred bytes each, of an object that may have 1 MB with all its ranks.
MAX_EVENTS = 100
MAX_ATTEMPTS = 500
EVENTS_LEFT = 10  # where there is no room for more
ItemT = TypeVar("ItemT")


def to_training(raw: Json, spec: TrainingSpec | None = None) -> Training:
    """`spec` is that of the object, if it is known. Raises ValidationError if it breaks a rule."""
    metadata = raw["metadata"]
    if spec is None:
        fields = {"executor": "kubernetes", **raw["spec"], "name": metadata["name"]}
        spec = decode(msgspec.json.encode(fields), TrainingSpec)
    leaving = metadata.get("deletionTimestamp")
    return Training(
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        spec=spec,
        status=_read_status(raw.get("status") or {}),
        generation=metadata.get("generation", 1),
        resource_version=int(metadata["resourceVersion"]),
        created_at=datetime.fromisoformat(metadata["creationTimestamp"]).timestamp(),
        deletion_requested_at=datetime.fromisoformat(leaving).timestamp() if leaving else None,
    )


def _read_status(raw: Json) -> Status:
    """The status, or, if somebody has broken it by hand, those of its fields that can be read.

    Otherwise its ranks could not be stopped, nor the training be deleted.
    """
    raw = {**raw, "conditions": _read_conditions(raw.get("conditions"))}
    if isinstance(cause := raw.get("rootCause"), dict):
        # Not known: where a schema does not allow null, the API server drops it.
        raw["rootCause"] = {"exitCode": None, **cause}
    try:
        return unfold_status(raw)
    except (ValidationError, msgspec.ValidationError) as error:
        log.warning("a status is invalid, its readable fields are used: %s", error)
    good: Json = {}
    for field, value in raw.items():
        with contextlib.suppress(ValidationError, msgspec.ValidationError):
            unfold_status({field: value})
            good[field] = value
    return unfold_status(good)


def _read_conditions(conditions: Any) -> Any:
    """The conditions with their times as numbers."""
    if not isinstance(conditions, list):
        return []
    read = []
    for condition in conditions:
        moment = condition.get("lastTransitionTime") if isinstance(condition, dict) else None
        if isinstance(moment, str):
            with contextlib.suppress(ValueError):
                at = datetime.fromisoformat(moment).timestamp()
                condition = {**condition, "lastTransitionAt": at}
        read.append(condition)
    return read


def rfc3339(at: float) -> str:
    """`2026-11-17T02:33:57Z`, with milliseconds where there are some."""
    moment = datetime.fromtimestamp(in_ms(at), UTC)
    digits = "milliseconds" if moment.microsecond else "seconds"
    return moment.replace(tzinfo=None).isoformat(timespec=digits) + "Z"


def read_list(items: Any, kind: type[ItemT]) -> list[ItemT]:
    """Those of a status's events or attempts that can be read."""
    read = []
    for item in items if isinstance(items, list) else ():
        with contextlib.suppress(msgspec.ValidationError):
            read.append(convert(item, kind))
    return read


def with_attempts(status: Json, attempts: Sequence[AttemptStatus]) -> list[Json]:
    """The stored attempts plus these, the newest of them."""
    stored = status.get("attempts", [])
    if not attempts and isinstance(stored, list):
        return stored
    both = [*read_list(stored, AttemptStatus), *attempts]
    newest: list[Json] = msgspec.to_builtins(newest_attempts(both, MAX_ATTEMPTS))
    return newest


def to_resource(training: Training, mark: str | None = None) -> Json:
    metadata: Json = {"name": training.name, "finalizers": [FINALIZER]}
    if mark is not None:
        metadata["labels"] = {KEY_LABEL: mark}
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "Training",
        "metadata": metadata,
        "spec": spec_body(training),
    }


def to_event(raw: Json, event: Event) -> Json:
    metadata = raw["metadata"]
    at = rfc3339(int(event.at))
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{metadata['name']}."},
        "involvedObject": {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "Training",
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
            "resourceVersion": metadata["resourceVersion"],
        },
        "type": event.type,
        "reason": event.reason,
        "message": event.message[:1024],
        "source": {"component": "atoll"},
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": event.count,
    }


def spec_body(training: Training) -> Json:
    body: Json = msgspec.json.decode(encode(training.spec))
    body.pop("name")
    return body


def status_body(
    training: Training, status: Status, events: list[Json], attempts: Sequence[Json] = ()
) -> Json:
    """The status as it is stored, with the fields that `kubectl` users expect written out."""
    body: Json = msgspec.json.decode(encode(fold_status(status)))
    world = status.world
    body["world"] = {
        "ready": world.ready,
        "target": world.target,
        "min": world.min,
        "max": world.max,
        "belowMinimum": world.below_minimum,
    }
    body["phase"] = str(status.phase)
    body["observedGeneration"] = status.observed_generation
    body["restarts"] = sum(r.restarts for r in (*status.ranks, *status.removed_ranks))
    body["conditions"] = [_condition_body(condition) for condition in status.conditions]
    body["selector"] = f"atoll.dev/uid={training.uid}"
    body["events"] = events
    if attempts:
        body["attempts"] = list(attempts)
    return body


def smaller_bodies(training: Training, status: Status, body: Json) -> Iterator[tuple[str, Json]]:
    """The status again, with less and less in it, and what is left out."""
    for left_out, smaller in smaller_statuses(status):
        yield left_out, status_body(training, smaller, body["events"][-EVENTS_LEFT:])


def mark_incomplete(body: Json, reason: str, message: str, now: float) -> Json:
    """The status with the condition that the API server did not take all of it."""
    known = []
    for condition in _read_conditions(body.get("conditions")):
        with contextlib.suppress(msgspec.ValidationError):  # somebody else wrote that one
            known.append(convert(condition, Condition))
    conditions = set_condition(known, ConditionType.STATUS_INCOMPLETE, reason, message, now)
    return {**body, "conditions": [_condition_body(condition) for condition in conditions]}


def _condition_body(condition: Condition) -> Json:
    return {
        "type": condition.type,
        "status": condition.status,
        "reason": condition.reason,
        "message": condition.message,
        "lastTransitionTime": rfc3339(condition.last_transition_at),
    }


def with_events(status: Json, events: Sequence[Event]) -> list[Json]:
    """The stored events plus these, the newest of them; a repeated event raises a count."""
    history = read_list(status.get("events"), Event)
    for event in events:
        last = history[-1] if history else None
        if last and (last.type, last.reason, last.message) == (
            *(event.type, event.reason, event.message),
        ):
            history[-1] = replace(last, at=event.at, count=last.count + 1)
        else:
            history.append(replace(event, id=last.id + 1 if last else 1))
    newest: list[Json] = msgspec.to_builtins(history[-MAX_EVENTS:])
    return newest


def is_leaving(raw: Json) -> bool:
    return "deletionTimestamp" in raw["metadata"]


MAX_GROUPS = 64  # of a summary: more than this nobody reads
# 10,000 ranks that differ in everything are 6 MB; whoever may write the object may write anything.
MAX_RANK_BYTES = 64 * 2**20


class RankGroup(Model, frozen=True):
    """Ranks that are in the same state."""

    ranks: str
    """Which ranks: 0-192, 195."""
    phase: RankPhase | None = None
    """Pending, Running, Succeeded, Failed or Stopped."""
    restarts: int | None = None
    """How often each of them was restarted."""
    message: str | None = None
    """What these ranks wait for, or how they ended."""


class ExitGroup(Model, frozen=True):
    """Ranks that ended in the same way."""

    ranks: str
    """Which ranks: 0-192, 195."""
    exit_code: int | None = None
    """Exit code; null if nobody knows it."""
    termination_reason: str | None = None
    """How they ended."""
    signal: str | None = None
    """Signal that killed them."""
    collateral: bool | None = None
    """Whether they ended because another rank had failed."""
    message: str | None = None
    """Details for people."""


GroupT = TypeVar("GroupT", RankGroup, ExitGroup)
# What a group leaves out, as it says nothing.
NOTHING = {"restarts": 0, "collateral": False, "message": ""}
OTHERS = "others: see `atoll status`"


class RankData(Model, frozen=True):
    """What `rankData` holds."""

    ranks: list[RankStatus] = []
    removed_ranks: list[RankStatus] = []
    rank_exits: list[RankExit] = []
    discarded_attempts: dict[int, int] = {}
    desired_discarded: dict[int, int] = {}


class StoredStatus(StatusHead, frozen=True):
    ranks: list[RankGroup] = []
    removed_ranks: list[RankGroup] = []
    rank_exits: list[ExitGroup] = []
    rank_data: str = ""


_head = json_decoder(StatusHead)
_data = json_decoder(RankData)


def fold_status(status: Status) -> StoredStatus:
    head = {name: getattr(status, name) for name in StatusHead.__struct_fields__}
    desired = status.desired
    data = RankData(
        ranks=status.ranks,
        removed_ranks=status.removed_ranks,
        rank_exits=status.rank_exits,
        discarded_attempts=status.discarded_attempts,
        desired_discarded=desired.discarded_attempts if desired else {},
    )
    return StoredStatus(
        **head
        | {
            "discarded_attempts": {},
            "desired": desired and replace(desired, discarded_attempts={}),
        },
        ranks=_grouped(RankGroup, status.ranks),
        removed_ranks=_grouped(RankGroup, status.removed_ranks),
        rank_exits=_grouped(ExitGroup, status.rank_exits),
        rank_data="" if data == RankData() else _packed(data),
    )


def unfold_status(raw: dict[str, Any]) -> Status:
    """Raises ValidationError if `rankData` cannot be read, and msgspec's for the rest."""
    packed = raw.get("rankData", "")
    head = _head.decode(msgspec.json.encode({k: v for k, v in raw.items() if k != "rankData"}))
    data = _unpacked(packed) if packed else RankData()
    fields = {name: getattr(head, name) for name in StatusHead.__struct_fields__}
    desired = head.desired
    return Status(
        **fields
        | {
            "discarded_attempts": data.discarded_attempts,
            "desired": desired and replace(desired, discarded_attempts=data.desired_discarded),
        },
        ranks=data.ranks,
        removed_ranks=data.removed_ranks,
        rank_exits=data.rank_exits,
    )


def smaller_statuses(status: Status) -> Iterator[tuple[str, Status]]:
    """The status with less and less in it, and what is left out, for an object with little room.

    Of a training that goes on, nothing is left out that it needs to go on; of one that is over,
    the verdict stays.
    """
    status = replace(status, world_size_history=[])
    placeless = [
        [replace(r, pod_name="", node=None) for r in rows]
        for rows in (status.ranks, status.removed_ranks)
    ]
    yield (
        "the pods and nodes of ranks",
        replace(status, ranks=placeless[0], removed_ranks=placeless[1]),
    )
    if status.phase.is_terminal:
        exits = [
            RankExit(rank=e.rank, exit_code=e.exit_code, termination_reason=e.termination_reason)
            for e in status.rank_exits
        ]
        yield (
            "all about ranks but their exit codes",
            replace(
                status,
                ranks=[_bare(r, status) for r in status.ranks],
                removed_ranks=[_bare(r, status) for r in status.removed_ranks],
                rank_exits=exits,
            ),
        )
        yield "all about the ranks", replace(status, ranks=[], removed_ranks=[], rank_exits=[])


def _bare(row: RankStatus, status: Status) -> RankStatus:
    exit = row.exit and Exit(code=row.exit.code, at=status.ended_at or 0.0, reason=row.exit.reason)
    return RankStatus(rank=row.rank, phase=row.phase, attempt=row.attempt, exit=exit)


def _packed(data: RankData) -> str:
    return base64.b64encode(zlib.compress(encode(data))).decode()


def _unpacked(text: str) -> RankData:
    reader = zlib.decompressobj()
    try:
        content = reader.decompress(base64.b64decode(text, validate=True), MAX_RANK_BYTES)
        if not reader.eof:
            raise ValueError(f"it is cut, or more than {MAX_RANK_BYTES} bytes")
        return _data.decode(content)
    except (ValueError, TypeError, zlib.error, binascii.Error, msgspec.DecodeError) as error:
        expected = f"expected what atoll wrote there: {error}"
        raise ValidationError("status.rankData", "…", expected) from error


def _grouped(kind: type[GroupT], rows: Iterable[RankStatus | RankExit]) -> list[GroupT]:
    """Ranks by what they share, in order; those beyond the last group are one, without details."""
    fields = kind.__struct_fields__[1:]  # the first is the ranks
    members: dict[tuple[Any, ...], list[int]] = {}
    for row in rows:
        values = ((field, getattr(row, field)) for field in fields)
        key = tuple(None if value == NOTHING.get(field) else value for field, value in values)
        members.setdefault(key, []).append(row.rank)
    groups = list(members.items())
    others = sorted(rank for _, ranks in groups[MAX_GROUPS:] for rank in ranks)
    known: list[GroupT] = [
        kind(ranks=spans(ranks), **dict(zip(fields, key, strict=True)))
        for key, ranks in groups[:MAX_GROUPS]
    ]
    if others:
        known.append(kind(ranks=spans(others), message=OTHERS))
    return known
