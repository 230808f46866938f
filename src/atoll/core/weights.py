"""Weight channels as people and the page see them: versions, followers, and how far behind they
are. Pure.

What is in a channel is read from its store (`weights/channel.py`), or reported by the ranks of
trainings that publish to it or follow it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal
from urllib.parse import quote, unquote, urlsplit

import msgspec

from atoll.core.metrics import MAX_COUNT, MAX_TIME
from atoll.core.model import Model

# A follower renews its lease and its report every minute while it runs. After five without one it
# counts as one that has ended.
FRESH_S = 300.0


class ReportedWeights(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a publisher says of its newest version, or a follower of the one that it serves.

    `id`: of the publisher or the follower, random for each. `number` is 0 while a follower is on
    its way in. `at`: when that was so, by the clock of the rank.
    """

    channel: str
    role: Literal["publisher", "follower"]
    id: str
    at: float
    number: int = 0
    step: int | None = None
    bytes: int = 0
    changed: int = 0
    publisher: str = ""  # of the version
    is_closed: bool = False


class StoredVersion(msgspec.Struct, frozen=True):
    """A version that a rank reported. `rank` is None if only followers have."""

    report: ReportedWeights
    training: str
    rank: int | None


class StoredFollower(msgspec.Struct, frozen=True):
    report: ReportedWeights
    training: str
    rank: int
    is_over: bool  # its training has ended


class VersionStatus(Model, frozen=True, omit_defaults=False):
    """`is_full`: there are files of a full copy of it; None where the store was not read.

    `training` and `rank`: who published it, where that was reported.
    """

    number: int
    step: int | None
    bytes: int
    changed: int
    publisher: str
    age_s: float
    is_full: bool | None = None
    training: str | None = None
    rank: int | None = None


class FollowerStatus(Model, frozen=True, omit_defaults=False):
    """`number`: the version that it serves, 0 on its way in.

    `behind`: versions that it lacks; `lag_s`: the age of the oldest of them, 0 if there is none and
    None if it is on its way in or has ended. `age_s`: of its lease or its last report.
    """

    name: str
    number: int
    age_s: float
    behind: int
    lag_s: float | None
    is_fresh: bool
    training: str | None = None
    rank: int | None = None


class Channel(Model, frozen=True, omit_defaults=False):
    """Versions are the newest, newest first."""

    uri: str
    versions: tuple[VersionStatus, ...]
    followers: tuple[FollowerStatus, ...]
    publisher: str | None = None


class ChannelList(Model, frozen=True, omit_defaults=False):
    items: list[Channel]


def channel_of_uri(uri: str) -> str:
    """The name of a channel for everybody: without credentials, and the same for all who write
    the URI of a folder in another way. Paths are absolute."""
    parts = urlsplit(uri)
    if parts.scheme in ("", "file"):
        path = unquote(parts.path) if parts.scheme else uri
        return f"file://{quote(path.rstrip('/') or '/')}"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"


def is_bounded(report: ReportedWeights) -> bool:
    """Whether all its numbers can be stored, shown and added up."""
    numbers = (report.number, report.bytes, report.changed)
    step = report.step or 0
    return (
        all(0 <= value <= MAX_COUNT for value in numbers)
        and abs(step) <= MAX_COUNT
        and 0 <= report.at <= MAX_TIME
    )


def lag_of(number: int, ages: Mapping[int, float]) -> tuple[int, float]:
    """How many of these versions come after `number`, and the age of the oldest of them."""
    missing = [age_s for each, age_s in ages.items() if each > number]
    return len(missing), max(missing, default=0.0)


def channels_of(
    versions: Iterable[StoredVersion],
    followers: Iterable[StoredFollower],
    now: float,
    limit: int,
) -> list[Channel]:
    """The channels that these reports speak of, in order of their URIs."""
    versions, followers = list(versions), list(followers)
    uris = {each.report.channel for each in versions}
    uris |= {each.report.channel for each in followers}
    return [
        _channel(
            uri,
            [each for each in versions if each.report.channel == uri],
            [each for each in followers if each.report.channel == uri],
            now,
            limit,
        )
        for uri in sorted(uris)
    ]


def _channel(
    uri: str,
    versions: Sequence[StoredVersion],
    followers: Sequence[StoredFollower],
    now: float,
    limit: int,
) -> Channel:
    by_number: dict[int, StoredVersion] = {}
    for each in versions:
        before = by_number.get(each.report.number)
        # Its publisher knows best when it came; of followers the first that had it.
        if before is None or _order(each) < _order(before):
            by_number[each.report.number] = each
    ages = {number: max(0.0, now - each.report.at) for number, each in by_number.items()}
    newest = [by_number[number] for number in sorted(by_number, reverse=True)]
    statuses = []
    for follower in followers:
        report = follower.report
        age_s = max(0.0, now - report.at)
        is_fresh = not follower.is_over and age_s <= FRESH_S
        behind, lag_s = lag_of(report.number, ages)
        statuses.append(
            FollowerStatus(
                name=report.id,
                number=report.number,
                age_s=age_s,
                behind=behind,
                lag_s=lag_s if is_fresh and report.number else None,
                is_fresh=is_fresh,
                training=follower.training,
                rank=follower.rank,
            )
        )
    statuses.sort(key=lambda each: (not each.is_fresh, each.training, each.rank, each.name))
    return Channel(
        uri=uri,
        versions=tuple(
            VersionStatus(
                number=each.report.number,
                step=each.report.step,
                bytes=each.report.bytes,
                changed=each.report.changed,
                publisher=each.report.publisher,
                age_s=ages[each.report.number],
                training=each.training if each.rank is not None else None,
                rank=each.rank,
            )
            for each in newest[:limit]
        ),
        followers=tuple(statuses),
        publisher=newest[0].report.publisher if newest else None,
    )


def _order(each: StoredVersion) -> tuple[bool, float]:
    return each.rank is None, each.report.at


def lag_of_channels(channels: Iterable[Channel], training: str) -> dict[str, float]:
    """The newest version, and how far the slowest follower of `training` is behind; what is not
    known is absent."""
    values: dict[str, float] = {}
    for channel in channels:
        if channel.versions:
            newest = float(channel.versions[0].number)
            values["weights_version"] = max(values.get("weights_version", 0.0), newest)
        for follower in channel.followers:
            if follower.lag_s is None or follower.training != training:
                continue
            behind = float(follower.behind)
            values["weights_behind"] = max(values.get("weights_behind", 0.0), behind)
            lag_s = max(values.get("weights_lag_seconds", 0.0), follower.lag_s)
            values["weights_lag_seconds"] = lag_s
    return values
