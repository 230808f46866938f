"""Trainings and their changes as bytes. Each change is encoded once for all watchers."""

from __future__ import annotations

from collections import OrderedDict
from datetime import UTC, datetime

from msgspec.structs import replace

from atoll.core.conditions import set_condition
from atoll.core.model import encode
from atoll.core.ports import Change
from atoll.core.status import Training

STALE = "StatusStale"
CACHE_BYTES = 8 * 2**20  # thousands of changes: slower watchers encode again
MASK = "***"  # instead of the values of environment variables, which may be secrets


class EncodedChanges:
    """A cache of the newest changes as server-sent events, by version."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._by_version: OrderedDict[int, bytes] = OrderedDict()

    def of(self, change: Change) -> bytes:
        event = self._by_version.get(change.version)
        if event is None:
            event = self._by_version[change.version] = event_bytes(change)
            self._bytes += len(event)
            while self._bytes > self._max_bytes and len(self._by_version) > 1:
                self._bytes -= len(self._by_version.popitem(last=False)[1])
        return event


def event_bytes(change: Change) -> bytes:
    """One change as a server-sent event; its id is the version to resume from."""
    kind = b"removed" if change.is_removed else b"changed"
    data = encode(redact(change.training))
    return b"event: %b\nid: %d\ndata: %b\n\n" % (kind, change.version, data)


def with_staleness(training: Training, stale: tuple[float, str] | None) -> Training:
    """Adds the condition that the status may be stale, if statuses cannot be written."""
    if stale is None or training.status.phase.is_terminal:
        return training
    since, why = stale
    when = datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    message = f"this status may be out of date since {when}: {why}"
    conditions = set_condition(training.status.conditions, STALE, "CannotWrite", message, since)
    status = replace(training.status, conditions=conditions)
    return replace(training, status=status)


def redact(training: Training) -> Training:
    """The training for readers: its code as a digest, without values of variables."""
    spec = training.spec.by_digest()
    env, nccl_env = dict.fromkeys(spec.env, MASK), dict.fromkeys(spec.nccl_env, MASK)
    return replace(training, spec=replace(spec, env=env, nccl_env=nccl_env))
