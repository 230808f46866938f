"""What is in a weight channel: its versions and its followers, for people and dashboards."""

from __future__ import annotations

import os
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

from atoll.core.errors import ValidationError
from atoll.core.model import Model
from atoll.objectstore import ObjectStore
from atoll.weights.machine import LEASE_LIFE_S
from atoll.weights.records import (
    Claim,
    Damaged,
    VersionRecord,
    log_number,
    read_lease,
    read_record,
    read_try,
)


class VersionStatus(Model, frozen=True):
    """`is_full`: there are files of a full copy of it."""

    number: int
    step: int | None
    bytes: int
    changed: int
    publisher: str
    age_s: float
    is_full: bool


class FollowerStatus(Model, frozen=True):
    """`number`: the version it stands on, 0 on its way in. `behind`: versions that it lacks."""

    name: str
    number: int
    age_s: float
    behind: int
    is_fresh: bool


class Channel(Model, frozen=True):
    uri: str
    versions: tuple[VersionStatus, ...]
    followers: tuple[FollowerStatus, ...]
    publisher: str | None = None


def _check_folder(uri: str | os.PathLike[str]) -> None:
    """Opening a store makes its folder, and a mistyped path must not look like a channel."""
    parts = urlsplit(text := os.fspath(uri))
    if parts.scheme not in ("", "file"):
        return
    path = Path(unquote(parts.path) if parts.scheme else text)
    if not path.is_dir():
        raise ValidationError("uri", text, "expected a folder that exists: a Publisher makes it")


def read_channel(uri: str | os.PathLike[str], *, limit: int = 20) -> Channel:
    """The newest versions, up to `limit`, and all followers that have a lease."""
    _check_folder(uri)
    store = ObjectStore.open(uri, patience_s=10.0)
    log, leases = store.list("log"), store.list("lease")
    full = {copy.number for row in store.list("full") if (copy := read_try(row.key))}
    times = [row.modified.timestamp() for row in (*log, *leases)]
    now = max([time.time(), *times])
    versions, publisher = list[VersionStatus](), None
    for row in reversed(log):
        number = log_number(row.key)
        if number is None or len(versions) == limit:
            continue
        try:
            record = read_record(store.get(row.key), number)
        except Damaged:
            continue
        if publisher is None:
            publisher = record.publisher
        if isinstance(record, VersionRecord):
            versions.append(
                VersionStatus(
                    number=number,
                    step=record.step,
                    bytes=record.bytes,
                    changed=record.changed,
                    publisher=record.publisher,
                    age_s=now - row.modified.timestamp(),
                    is_full=number in full,
                )
            )
        else:
            assert isinstance(record, Claim)
    newest: dict[str, FollowerStatus] = {}
    for row in leases:
        lease = read_lease(row.key)
        if lease is None:
            continue
        age_s = now - row.modified.timestamp()
        status = FollowerStatus(
            name=lease[0],
            number=lease[1],
            age_s=age_s,
            behind=sum(each.number > lease[1] for each in versions),
            is_fresh=age_s <= LEASE_LIFE_S,
        )
        if lease[0] not in newest or age_s <= newest[lease[0]].age_s:
            newest[lease[0]] = status
    return Channel(
        uri=store.uri,
        versions=tuple(versions),
        followers=tuple(newest.values()),
        publisher=publisher,
    )
