"""The weights that ranks of all trainings publish and follow, in the file of the series.

Bounded for each training: the newest versions of a channel, and the followers that reported last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from atoll.core.model import json_decoder
from atoll.core.weights import Channel, ReportedWeights, StoredFollower, StoredVersion, channels_of
from atoll.metrics.file import MetricFile

MAX_VERSIONS = 200  # of a channel: a follower further behind is late in any case
MAX_CHANNELS = 100  # of a training: one for each policy, so that reports cannot fill the file
MAX_FOLLOWERS = 2000  # of a training: two engines on each of 1,000 ranks
MAX_LISTED_VERSIONS = 20  # as `atoll weights` lists of a store

SCHEMA = """
create table weight_versions (
    uid text not null, channel text not null, number integer not null, rank integer,
    body blob not null, primary key (uid, channel, number)) without rowid;
create index weight_versions_of_channel on weight_versions (channel);
create table weight_followers (
    uid text not null, channel text not null, id text not null, rank integer not null,
    attempt integer not null, at real not null, body blob not null,
    primary key (uid, channel, id)) without rowid;
create index weight_followers_of_channel on weight_followers (channel);
"""
TABLES = ("weight_versions", "weight_followers")

_BODY = json_decoder(ReportedWeights)


class TrainingName(NamedTuple):
    """`is_over`: its ranks have ended."""

    name: str
    is_over: bool


class WeightTable:
    """Its methods may be called from several threads."""

    def __init__(self, file: MetricFile) -> None:
        self._file = file

    def add_reports(
        self, uid: str, rank: int, attempt: int, reports: Iterable[ReportedWeights]
    ) -> None:
        """Within a transaction of the caller."""
        for report in reports:
            if not self._has_room(uid, report.channel):
                continue
            if report.number:
                self._add_version(uid, rank, report)
            if report.role == "follower":
                self._add_follower(uid, rank, attempt, report)

    def uris(self, uid: str) -> set[str]:
        """The channels that this training publishes or follows."""
        query = " union ".join(f"select channel from {table} where uid = ?" for table in TABLES)
        with self._file:
            return {channel for (channel,) in self._file.db.execute(query, (uid, uid))}

    def channels(
        self, uid: str, trainings: Mapping[str, TrainingName], now: float
    ) -> list[Channel]:
        """The channels that this training publishes or follows, with what is known of them from
        all these `trainings`, by uid: its own and those that may share a channel with it."""
        versions, followers = list[StoredVersion](), list[StoredFollower]()
        with self._file:
            for channel in self.uris(uid):
                rows = self._file.db.execute(
                    "select uid, rank, body from weight_versions where channel = ?", (channel,)
                )
                versions += [
                    StoredVersion(_BODY.decode(body), trainings[each].name, rank)
                    for each, rank, body in rows
                    if each in trainings
                ]
                rows = self._file.db.execute(
                    "select uid, rank, body from weight_followers where channel = ?", (channel,)
                )
                followers += [
                    StoredFollower(_BODY.decode(body), *_name_and_rank(trainings[each], rank))
                    for each, rank, body in rows
                    if each in trainings
                ]
        return channels_of(versions, followers, now, MAX_LISTED_VERSIONS)

    def remove(self, uid: str) -> None:
        """Within a transaction of the caller."""
        for table in TABLES:
            self._file.db.execute(f"delete from {table} where uid = ?", (uid,))

    def uids(self) -> set[str]:
        with self._file:
            query = " union ".join(f"select distinct uid from {table}" for table in TABLES)
            return {uid for (uid,) in self._file.db.execute(query)}

    def _has_room(self, uid: str, channel: str) -> bool:
        known = self.uris(uid)
        return channel in known or len(known) < MAX_CHANNELS

    def _add_version(self, uid: str, rank: int, report: ReportedWeights) -> None:
        """A follower shows that its version exists; the publisher says more."""
        is_published = report.role == "publisher"
        self._file.db.execute(
            f"insert or {'replace' if is_published else 'ignore'} into weight_versions "
            "values (?, ?, ?, ?, ?)",
            (
                uid,
                report.channel,
                report.number,
                rank if is_published else None,
                msgspec.json.encode(report),
            ),
        )
        self._file.db.execute(
            "delete from weight_versions where uid = ? and channel = ? and number <= "
            "(select number from weight_versions where uid = ? and channel = ? "
            "order by number desc limit 1 offset ?)",
            (uid, report.channel, uid, report.channel, MAX_VERSIONS),
        )

    def _add_follower(self, uid: str, rank: int, attempt: int, report: ReportedWeights) -> None:
        db = self._file.db
        # The followers of an earlier attempt of this rank died with it.
        db.execute(
            "delete from weight_followers where uid = ? and rank = ? and attempt < ?",
            (uid, rank, attempt),
        )
        key = (uid, report.channel, report.id)
        if report.is_closed:
            db.execute("delete from weight_followers where uid = ? and channel = ? and id = ?", key)
            return
        db.execute(
            "insert or replace into weight_followers values (?, ?, ?, ?, ?, ?, ?)",
            (*key, rank, attempt, report.at, msgspec.json.encode(report)),
        )
        db.execute(
            "delete from weight_followers where uid = ? and at < "
            "(select at from weight_followers where uid = ? order by at desc limit 1 offset ?)",
            (uid, uid, MAX_FOLLOWERS - 1),
        )


def _name_and_rank(training: TrainingName, rank: int) -> tuple[str, int, bool]:
    return training.name, rank, training.is_over
