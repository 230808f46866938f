"""Converts trainings to Kubernetes objects and back. Pure."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec.structs import replace

from atoll.core.errors import ValidationError
from atoll.core.model import decode, encode
from atoll.core.spec import TrainingSpec
from atoll.core.status import Event, Status, Training
from atoll.kubernetes.crd import GROUP, VERSION

Json = dict[str, Any]
log = logging.getLogger(__name__)

FINALIZER = "atoll.dev/teardown"
KEY_LABEL = "atoll.dev/idempotency-key"
EVENTS_KEPT = 100
STATUS_MAX = 1_000_000  # the API server takes 1.5 MB, spec and metadata included


def to_training(raw: Json) -> Training:
    """Raises ValidationError if the spec breaks a rule."""
    metadata = raw["metadata"]
    spec = {"executor": "kubernetes", **raw["spec"], "name": metadata["name"]}
    status = raw.get("status") or {}
    leaving = metadata.get("deletionTimestamp")
    return Training(
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        spec=decode(msgspec.json.encode(spec), TrainingSpec),
        status=_read_status(status),
        generation=metadata.get("generation", 1),
        resource_version=int(metadata["resourceVersion"]),
        created_at=datetime.fromisoformat(metadata["creationTimestamp"]).timestamp(),
        deletion_requested_at=datetime.fromisoformat(leaving).timestamp() if leaving else None,
    )


def _read_status(raw: Json) -> Status:
    """The status, or, if somebody has broken it by hand, those of its fields that can be read.

    Otherwise its ranks could not be stopped, nor the training be deleted.
    """
    try:
        return decode(msgspec.json.encode(raw), Status)
    except ValidationError as error:
        log.warning("a status is invalid, its readable fields are used: %s", error)
    good: Json = {}
    for field, value in raw.items():
        with contextlib.suppress(ValidationError):
            decode(msgspec.json.encode({field: value}), Status)
            good[field] = value
    return decode(msgspec.json.encode(good), Status)


def read_events(status: Json) -> list[Event]:
    """The events of a status that can be read."""
    raw_events = status.get("events")
    events = []
    for item in raw_events if isinstance(raw_events, list) else ():
        with contextlib.suppress(ValidationError):
            events.append(decode(msgspec.json.encode(item), Event))
    return events


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
    at = datetime.fromtimestamp(event.at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
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


def status_body(training: Training, status: Status, events: list[Json]) -> Json:
    """The status as it is stored: with zeros for `kubectl get`, and within the server's limit."""
    body: Json = msgspec.json.decode(encode(status))
    world = status.world
    body["world"] = {
        "ready": world.ready,
        "target": world.target,
        "min": world.min,
        "max": world.max,
        "belowMinimum": world.below_minimum,
    }
    body["phase"] = str(status.phase)
    body["selector"] = f"atoll.dev/uid={training.uid}"
    body["events"] = events
    return _fitting(body)


def _fitting(status: Json) -> Json:
    """The status; if it is too large, without the last log lines of ranks that are not to blame."""
    if len(msgspec.json.encode(status)) <= STATUS_MAX:
        return status
    for rank in (*status.get("ranks", ()), *status.get("retired", ())):
        for ended in ("exit", "previous"):
            rank.get(ended, {}).pop("logTail", None)
    for record in status.get("rankExits", ()):
        record.pop("logTail", None)
    return status


def with_events(status: Json, events: Sequence[Event]) -> list[Json]:
    """The stored events plus these, the newest of them; a repeated event raises a count."""
    history: list[Json] = [msgspec.json.decode(encode(event)) for event in read_events(status)]
    for event in events:
        last = history[-1] if history else {}
        if [last.get(f) for f in ("type", "reason", "message")] == [
            event.type,
            event.reason,
            event.message,
        ]:
            history[-1] = {**last, "at": event.at, "count": last.get("count", 1) + 1}
            continue
        numbered = replace(event, id=last.get("id", 0) + 1)
        history.append(msgspec.json.decode(encode(numbered)))
    return history[-EVENTS_KEPT:]


def is_leaving(raw: Json) -> bool:
    return "deletionTimestamp" in raw["metadata"]
