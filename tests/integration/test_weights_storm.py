"""Ten thousand publishes with failing requests and dying trainers, in one process.

Requests fail before or after they happen; a trainer that dies does so between any two requests, and
a new one opens the channel. Two followers check every version that they reach, bit for bit.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.allreduce.s3server import S3Server
from tests.integration.weights_process import weights
from tests.support.stores import FaultyStore

from atoll.objectstore import ObjectStore
from atoll.weights import Follower, Publisher, Superseded, Temporary, api, machine
from atoll.weights.records import looks_like_claim

# The storm publishes a hundred times as often as a trainer: times of leases are as much shorter, or
# the lease of each trainer that dies while it opens would hold thousands of versions.
LIFE_S, DEAD_S = 3.0, 30.0
MAX_VERSIONS = 1000  # that are left: as many as are published in some lives of a lease
STORM = int(os.environ.get("ATOLL_STORM_COUNT", "10000"))  # publishes


class Killed(BaseException):
    """The trainer's process ends here."""


class Storm:
    def __init__(self, uri: str, seed: int, failing: float, dying: float) -> None:
        self.uri, self.rng = uri, random.Random(seed)
        self.failing, self.dying = failing, dying
        self.counts = Counter[str]()
        self.steps: dict[int, int] = {}  # of versions that were answered
        self.is_trainer = False

    def fault(self, what: str, key: str, is_done: bool) -> None:
        if self.rng.random() < self.failing / 2:
            self.counts["failed requests"] += 1
            raise Temporary("no answer")
        if self.is_trainer and self.rng.random() < self.dying / 2:
            raise Killed

    def run(self, publishes: int) -> None:
        publisher: Publisher | None = None
        followers = [Follower(self.uri) for _ in range(2)]
        while self.counts["publishes"] < publishes:
            self.is_trainer = True
            try:
                publisher = publisher or Publisher(self.uri, full_every=7, keep=3)
                step = self.counts["publishes"] = self.counts["publishes"] + 1
                version = publisher.publish(weights(step), step=step)
                self.counts["answered"] += 1
                assert self.steps.setdefault(version.number, step) == step
            except Temporary:
                pass
            except Killed:
                self.counts["kills"] += 1
                publisher = None
            except Superseded:  # by a claim that was made without an answer
                publisher = None
            self.is_trainer = False
            for at, follower in enumerate(followers):
                if self.rng.random() < 0.3:
                    self.follow(follower)
                if self.rng.random() < 0.001:
                    followers[at] = Follower(self.uri)

    def follow(self, follower: Follower) -> None:
        before = follower._last  # one that an error came after is returned by the next call
        try:
            version = follower.next()
        except Temporary:
            return
        if version is None:
            return
        assert version.number > before
        assert version.step is not None
        assert self.steps.setdefault(version.number, version.step) == version.step
        for name, values in weights(version.step).items():
            assert (follower._copy().tensors[name].values == values).all()
        self.counts["verified"] += 1


def run_storm(uri: str, publishes: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    storm = Storm(uri, 1, failing=0.05, dying=0.005)
    monkeypatch.setattr(api, "ObjectStore", FaultyStore)
    monkeypatch.setattr(machine, "LEASE_LIFE_S", LIFE_S)
    monkeypatch.setattr(machine, "DEAD_LEASE_S", DEAD_S)
    monkeypatch.setattr(FaultyStore, "fault", staticmethod(storm.fault))
    storm.run(publishes)
    monkeypatch.setattr(FaultyStore, "fault", None)
    with Publisher(uri) as publisher, Follower(uri) as follower:
        last = publisher.publish(weights(3), step=3)
        assert follower.next() == last
    log = ObjectStore.open(uri).list("log")
    claims = sum(looks_like_claim(row.size) for row in log)
    assert len(log) - claims < MAX_VERSIONS, "old versions are not deleted"
    storm.counts["committed"] = last.number - claims
    sys.stderr.write(f"{uri.partition(':')[0]}: {dict(storm.counts)}\n")
    return storm.counts


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.mark.timeout(250)
def test_a_short_storm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = run_storm(f"file://{tmp_path}/a", 300, monkeypatch)
    for what in ("answered", "verified", "kills", "failed requests"):
        assert counts[what], f"no {what}"


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_ten_thousand_publishes(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    uri = f"file://{tmp_path}/a" if kind == "folder" else s3.use(monkeypatch, "storm")
    run_storm(uri, STORM, monkeypatch)
