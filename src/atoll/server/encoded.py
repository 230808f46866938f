"""Trainings and their changes as bytes. A change is encoded once, for all who watch it."""

from __future__ import annotations

from collections import OrderedDict

from msgspec.structs import replace

from atoll.core.model import encode
from atoll.core.ports import Change
from atoll.core.status import Training

KEPT_BYTES = 8 * 2**20


class EncodedChanges:
    """The newest changes as server-sent events, by version. Older ones are encoded anew."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._bytes = 0
        self._by_version: OrderedDict[int, bytes] = OrderedDict()

    def of(self, change: Change) -> bytes:
        event = self._by_version.get(change.version)
        if event is None:
            event = self._by_version[change.version] = event_bytes(change)
            self._bytes += len(event)
            while self._bytes > self._kept_bytes and len(self._by_version) > 1:
                self._bytes -= len(self._by_version.popitem(last=False)[1])
        return event


def event_bytes(change: Change) -> bytes:
    """One change as a server-sent event; its id is the version to resume from."""
    kind = b"removed" if change.is_removed else b"changed"
    data = encode(compact(change.training))
    return b"event: %b\nid: %d\ndata: %b\n\n" % (kind, change.version, data)


def compact(training: Training) -> Training:
    """The training with the digest of its shipped code in place of the code, for small answers."""
    source = training.spec.source
    if source is None:
        return training
    return replace(training, spec=replace(training.spec, source=source.by_digest()))
