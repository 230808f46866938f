"""What ranks report of weights is stored once, bounded, and goes with their training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.agent.metrics import MetricWriter, batch_of
from atoll.core.errors import ValidationError
from atoll.core.weights import Channel, channel_of_uri, lag_of_channels
from atoll.metrics import weights as stored_weights
from atoll.metrics.store import MetricStore
from atoll.metrics.weights import TrainingName

NOW = 1000.0
NAMES = {"u": TrainingName("t", is_over=False), "v": TrainingName("other", is_over=False)}


def published(number: int, at: float, **more: Any) -> dict[str, Any]:
    report = {"channel": "s3://b/p", "role": "publisher", "id": "who", "publisher": "who"}
    return report | {"number": number, "step": 10 * number, "bytes": 7, "at": at} | more


def served(number: int, at: float, id: str = "f", **more: Any) -> dict[str, Any]:
    return published(number, at, role="follower", id=id, **more)


class Reports:
    """Batches of ranks, each numbered."""

    def __init__(self, path: Path) -> None:
        self.store = MetricStore(path)
        self._count = 0

    def add(
        self, *reports: dict[str, Any], uid: str = "u", rank: int = 0, attempt: int = 1
    ) -> None:
        self._count += 1
        writer = MetricWriter(rank, attempt, 0, f"life-{self._count}")
        self.store.take(uid, [batch_of(writer, 1, {}, 0, more={"weights": list(reports)})])

    def channels(self, uid: str = "u", names: Any = NAMES, now: float = NOW) -> list[Channel]:
        return self.store.weights.channels(uid, names, now)


def test_a_follower_is_behind_since_the_oldest_version_that_it_lacks(tmp_path: Path) -> None:
    reports = Reports(tmp_path / "db")
    reports.add(published(2, 900.0), published(3, 940.0), published(5, 990.0))
    reports.add(served(2, 905.0), rank=1)
    reports.add(served(5, 995.0, id="g"), uid="v", rank=3)
    reports.add(served(0, 999.0, id="h"), uid="v", rank=4)
    (channel,) = reports.channels()
    assert [(each.number, each.step, each.age_s) for each in channel.versions] == [
        (5, 50, 10.0), (3, 30, 60.0), (2, 20, 100.0)
    ]  # fmt: skip
    assert [(each.training, each.rank) for each in channel.versions] == [("t", 0)] * 3
    rows = {each.name: each for each in channel.followers}
    assert (rows["f"].behind, rows["f"].lag_s, rows["f"].training) == (2, 60.0, "t")
    assert (rows["g"].behind, rows["g"].lag_s, rows["g"].training) == (0, 0.0, "other")
    assert (rows["h"].number, rows["h"].lag_s) == (0, None)  # on its way in
    gauges = {"weights_version": 5.0, "weights_behind": 2.0, "weights_lag_seconds": 60.0}
    assert lag_of_channels([channel], "t") == gauges
    assert MetricStore(tmp_path / "db").weights.channels("u", NAMES, NOW) == [channel]


def test_without_its_publisher_a_channel_has_the_versions_that_followers_served(
    tmp_path: Path,
) -> None:
    reports = Reports(tmp_path / "db")
    reports.add(served(2, 900.0), rank=1)
    reports.add(served(3, 950.0, id="g"), rank=2)
    reports.add(served(3, 960.0, id="h"), rank=3)
    (channel,) = reports.channels()
    assert [(each.number, each.age_s, each.rank) for each in channel.versions] == [
        (3, 50.0, None), (2, 100.0, None)
    ]  # fmt: skip
    assert [(each.behind, each.lag_s) for each in channel.followers] == [
        (1, 50.0), (0, 0.0), (0, 0.0)
    ]  # fmt: skip
    reports.add(published(3, 940.0))  # its publisher knows best
    assert reports.channels()[0].versions[0].age_s == 60.0


def test_followers_of_an_earlier_attempt_and_closed_ones_are_not_listed(tmp_path: Path) -> None:
    reports = Reports(tmp_path / "db")
    reports.add(served(2, 900.0, id="before"), served(2, 900.0, id="beside"), rank=1)
    reports.add(served(2, 900.0, id="other"), rank=2)
    reports.add(served(3, 950.0, id="again"), rank=1, attempt=2)
    reports.add(served(2, 960.0, id="other", is_closed=True), rank=2)
    assert [each.name for each in reports.channels()[0].followers] == ["again"]


def test_a_silent_follower_and_one_of_an_ended_training_have_ended(tmp_path: Path) -> None:
    reports = Reports(tmp_path / "db")
    reports.add(published(2, 900.0), served(2, 950.0))
    (follower,) = reports.channels()[0].followers
    assert follower.is_fresh
    (follower,) = reports.channels(now=950.0 + 301.0)[0].followers
    assert (follower.is_fresh, follower.lag_s) == (False, None)
    (channel,) = reports.channels(names={"u": TrainingName("t", is_over=True)})
    assert not channel.followers[0].is_fresh
    assert "weights_behind" not in lag_of_channels([channel], "t")


def test_other_namespaces_are_not_read(tmp_path: Path) -> None:
    reports = Reports(tmp_path / "db")
    reports.add(published(2, 900.0))
    reports.add(published(9, 900.0), served(9, 900.0), uid="secret")
    (channel,) = reports.channels()
    assert [each.number for each in channel.versions] == [2]
    assert channel.followers == ()


def test_reports_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_weights, "MAX_VERSIONS", 3)
    monkeypatch.setattr(stored_weights, "MAX_FOLLOWERS", 2)
    monkeypatch.setattr(stored_weights, "MAX_CHANNELS", 1)
    reports = Reports(tmp_path / "db")
    reports.add(*(published(number, 900.0 + number) for number in range(1, 9)))
    reports.add(*(served(8, 950.0 + number, id=f"f{number}") for number in range(4)))
    reports.add(published(1, 900.0, channel="s3://b/other"))
    (channel,) = reports.channels()
    assert [each.number for each in channel.versions] == [8, 7, 6]
    assert [each.name for each in channel.followers] == ["f2", "f3"]
    for bad in (published(-1, 1.0), published(1, -1.0), published(2**60, 1.0), {"channel": "x"}):
        with pytest.raises(ValidationError, match="not a report"):
            reports.add(bad)


def test_reports_go_with_their_training(tmp_path: Path) -> None:
    reports = Reports(tmp_path / "db")
    reports.add(published(2, 900.0), served(2, 950.0))
    assert reports.store.uids() == {"u"}
    reports.store.remove("u")
    assert reports.channels() == []
    assert reports.store.uids() == set()


def test_a_channel_has_one_name_without_credentials() -> None:
    names = {channel_of_uri(uri) for uri in ("/a/b c", "/a/b c/", "file:///a/b%20c")}
    assert names == {"file:///a/b%20c"}
    assert channel_of_uri("s3://key:secret@bucket/run/p/?token=x") == "s3://bucket/run/p"
