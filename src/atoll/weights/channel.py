"""What is in a weight channel: its versions and its followers, for people and dashboards."""

from __future__ import annotations

import os
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

from atoll.core.errors import ValidationError
from atoll.core.weights import Channel, FollowerStatus, VersionStatus, lag_of
from atoll.objectstore import ObjectStore
from atoll.weights.machine import LEASE_LIFE_S
from atoll.weights.records import (
    Claim,
    Damaged,
    VersionRecord,
    log_number,
    looks_like_claim,
    read_lease,
    read_record,
    read_try,
)


def check_folder(uri: str | os.PathLike[str]) -> None:
    """Opening a store makes its folder, and a mistyped path must not look like a channel."""
    parts = urlsplit(text := os.fspath(uri))
    if parts.scheme not in ("", "file"):
        return
    path = Path(unquote(parts.path) if parts.scheme else text)
    if not path.is_dir():
        raise ValidationError("uri", text, "expected a folder that exists: a Publisher makes it")


def read_channel(uri: str | os.PathLike[str], *, limit: int = 20) -> Channel:
    """The newest versions, up to `limit`, and all followers that have a lease."""
    check_folder(uri)
    store = ObjectStore.open(uri, patience_s=10.0)
    log, leases = store.list("log"), store.list("lease")
    full = {copy.number for row in store.list("full") if (copy := read_try(row.key))}
    times = [row.modified.timestamp() for row in (*log, *leases)]
    now = max([time.time(), *times])
    ages = {
        number: now - row.modified.timestamp()
        for row in log
        if (number := log_number(row.key)) is not None and not looks_like_claim(row.size)
    }
    versions, publisher = list[VersionStatus](), None
    for row in reversed(log):
        number = log_number(row.key)
        if number is None or len(versions) == limit:
            continue
        if publisher is not None and looks_like_claim(row.size):
            continue  # the newest record alone says who publishes
        data = store.find(row.key)
        if data is None:
            continue  # it was deleted meanwhile
        try:
            record = read_record(data, number)
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
                    age_s=ages.get(number, 0.0),
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
        is_fresh = age_s <= LEASE_LIFE_S
        number = 0 if lease.is_joining else lease.number
        behind, lag_s = lag_of(number, ages)
        status = FollowerStatus(
            name=lease.follower,
            number=number,
            age_s=age_s,
            behind=behind,
            lag_s=lag_s if is_fresh and number else None,
            is_fresh=is_fresh,
        )
        if lease.follower not in newest or age_s <= newest[lease.follower].age_s:
            newest[lease.follower] = status
    return Channel(
        uri=store.uri,
        versions=tuple(versions),
        followers=tuple(newest.values()),
        publisher=publisher,
    )
